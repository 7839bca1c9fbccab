"""Which of the engine's targets does a run meet? Pure: from medians to a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from native_bench.peers import SYSTEMS, make
from native_bench.reached import Reached, fastest_limit, limits_of, memcpy_of, streaming_of
from native_bench.results import CaseResult, Results, System

SMALL_OVERHEAD_S = 10e-6
SAVE_OVERHEAD = "a save, in call and writer, without I/O, copy and digest"
SAVE_OVERHEADS = ("stall_s", "save_writer_cpu_s")
"""What a save does for each tensor: the call, and the writer process in the CPU time from the call to the
commit. Its wall time has the disk in it, which moves by more than all tensors cost."""
REPORTED = "reported"
"""The target of a figure that has none but to be told."""
COMPARED = ("stall_s", "save_s", "restore_cold_s", "restore_hot_s")
MOST_NAMED = 4
"""Peers that a row names as not measured; of more it gives the number, and the case's table has the names."""


@dataclass(frozen=True, slots=True)
class Target:
    """One line. met: None if it was not measured, and `measured` says why. note: what the run itself says
    beside it, such as that a target that is short lies beyond the machine's limit. held: of a figure that is
    only reported, whether it would meet the target of the one it stands beside."""

    figure: str
    measured: str
    target: str
    met: bool | None
    note: str = ""
    held: bool | None = None


def targets(results: Results) -> list[Target]:
    """Every target that this run can speak about; others are measured elsewhere."""
    found: list[Target] = []
    large = results.case("large")
    if large is not None:
        found += _stall(large)
        found += _save(large)
        found += _cold(large)
        found += _hot(large)
    small = results.case("small")
    if small is not None:
        found += _small(small, large)
    two = results.case("two-ranks")
    if two is not None:
        found += _two_ranks(two)
    tmpfs = results.case("tmpfs")
    if tmpfs is not None:
        found += _tmpfs(tmpfs)
    return found


def peers(
    case: CaseResult, figure: str, which: Callable[[System], bool] = lambda _: True
) -> Iterator[System]:
    """Systems that are neither the engine nor a limit, and have the figure."""
    for system in case.systems:
        if (
            not system.limit
            and not system.name.startswith("engine")
            and system.rounds(figure)
            and which(system)
        ):
            yield system


def _copies(system: System) -> bool:
    return system.copies


def _fsyncs(system: System) -> bool:
    return system.fsyncs


def _stall(case: CaseResult) -> Iterator[Target]:
    copy = memcpy_of(case)
    yield _ratio_of_limit("stall, copied snapshot", case, "engine", "stall_s", copy, at_most=1.25)
    yield _beats("stall, beside the fastest peer that copies", case, "stall_s", 1.0, _copies)
    if (overlap := case.median("engine-overlap", "stall_s")) is not None and copy is not None:
        share = overlap / copy.seconds
        yield Target("stall, overlap mode", f"{share:.1%} of {copy.label}", "≤ 2 %", share <= 0.02)
    else:
        yield Target("stall, overlap mode", _why(case, "engine-overlap"), "≤ 2 %", None)


def _save(case: CaseResult) -> Iterator[Target]:
    for by in _savers(case):
        yield by.row(_of_limit("save to committed, large", case, "save_s", 0.9, by.name))
        yield by.row(
            _beats_best("save, beside DCP `thread_count=1`", case, ("dcp-1",), "save_s", 3.0, by.name)
        )
        yield by.row(
            _beats("save, beside the fastest peer that fsyncs", case, "save_s", 1.3, _fsyncs, by.name)
        )
        yield by.row(_beats_best("save, beside stock NVRx", case, ("nvrx",), "save_s", 3.0, by.name))


def _cold(case: CaseResult) -> Iterator[Target]:
    yield _of_limit("restore cold, large", case, "restore_cold_s", 0.95)
    yield _beats_best("restore cold, beside DCP", case, ("dcp-1", "dcp-2"), "restore_cold_s", 2.5)
    yield _beats("restore cold, beside the fastest peer", case, "restore_cold_s", 1.3)


def _hot(case: CaseResult) -> Iterator[Target]:
    yield _of_memcpy("restore hot, digests checked", case, "engine", 0.65)
    yield _of_memcpy("restore hot, digests not checked", case, "engine-unverified", 0.9)
    yield _beats_best("restore hot, beside DCP", case, ("dcp-1", "dcp-2"), "restore_hot_s", 5.0)


def _small(case: CaseResult, large: CaseResult | None) -> Iterator[Target]:
    for kind in ("cold", "hot"):
        figure = f"restore_{kind}_s"
        yield _beats_best(
            f"small tensors, restore {kind}, beside DCP", case, ("dcp-1", "dcp-2"), figure, 15.0
        )
        yield _beats(f"small tensors, restore {kind}, beside the fastest peer", case, figure, 1.0)
    for by in _savers(case):
        dcp = ("dcp-1", "dcp-2")
        yield by.row(_beats_best("small tensors, save, beside DCP", case, dcp, "save_s", 10.0, by.name))
        fastest = "small tensors, save, beside the fastest peer that fsyncs"
        yield by.row(_beats(fastest, case, "save_s", 1.5, _fsyncs, by.name))
    yield _overhead("a restore", case, overhead_s(case, large, "restore_hot_s"), large)
    call, writer = (overhead_s(case, large, name) for name in SAVE_OVERHEADS)
    if call is None or writer is None:
        yield _overhead(SAVE_OVERHEAD, case, None, large)
    else:
        parts = f": {call * 1e6:.1f} in the call, {writer * 1e6:.1f} of the writer process's CPU time"
        yield _overhead(SAVE_OVERHEAD, case, call + writer, large, parts)


def _overhead(
    kind: str, case: CaseResult, overhead: float | None, large: CaseResult | None, parts: str = ""
) -> Target:
    figure, bound = f"small tensors, overhead of {kind}", "≤ 10 µs a tensor"
    if overhead is None:
        why = "needs the large case, too" if large is None else _why(case, "engine")
        return Target(figure, why, bound, None)
    return Target(figure, f"{overhead * 1e6:.1f} µs a tensor{parts}", bound, overhead <= SMALL_OVERHEAD_S)


def overhead_s(small: CaseResult, large: CaseResult | None, figure: str) -> float | None:
    """Seconds a small tensor costs beyond its bytes: the engine's time for many small tensors, less that for
    as many bytes of large ones (whose own number does not matter), by the number of small ones.

    figure: one that has no disk in it, but copies and digests, which cost as much for the large tensors:
    `restore_hot_s`, or of a save both of `SAVE_OVERHEADS`.
    """
    if large is None:
        return None
    of_small, of_large = small.median("engine", figure), large.median("engine", figure)
    if of_small is None or of_large is None:
        return None
    return max(0.0, of_small - of_large * small.nbytes / large.nbytes) / small.tensors


def _two_ranks(case: CaseResult) -> Iterator[Target]:
    """The same ratios to the limits as of one rank, and nobody faster."""
    copy = memcpy_of(case)
    yield _ratio_of_limit("two ranks, stall, copied snapshot", case, "engine", "stall_s", copy, at_most=1.25)
    for by in _savers(case):
        yield by.row(_of_limit("two ranks, save", case, "save_s", 0.9, by.name))
        fastest = "two ranks, save, beside the fastest peer that fsyncs"
        yield by.row(_beats(fastest, case, "save_s", 1.0, _fsyncs, by.name))
    yield _of_limit("two ranks, restore cold", case, "restore_cold_s", 0.95)
    yield _of_memcpy("two ranks, restore hot, digests checked", case, "engine", 0.65)
    yield _beats("two ranks, stall, beside the fastest peer that copies", case, "stall_s", 1.0, _copies)
    yield _beats("two ranks, restore cold, beside the fastest peer", case, "restore_cold_s", 1.0)
    yield _beats("two ranks, restore hot, beside the fastest peer", case, "restore_hot_s", 1.0)


def _tmpfs(case: CaseResult) -> Iterator[Target]:
    """None of these has a target."""
    yield _reported(
        _beats("tmpfs, stall, beside the fastest peer that copies", case, "stall_s", 1.0, _copies)
    )
    for by in _savers(case):
        fastest = "tmpfs, save, beside the fastest peer that fsyncs"
        yield _reported(by.row(_beats(fastest, case, "save_s", 1.0, _fsyncs, by.name)))
    yield _reported(_beats("tmpfs, restore, beside the fastest peer", case, "restore_hot_s", 1.0))


@dataclass(frozen=True, slots=True)
class _Saver:
    """One of the engine's ways to save. reported: its rows only stand beside those that have targets."""

    name: str
    call: str
    reported: bool = False
    note: str = ""

    def row(self, target: Target) -> Target:
        found = replace(target, figure=f"{target.figure}, by `{self.call}`")
        found = replace(found, note="; ".join(filter(None, (found.note, self.note))))
        return replace(_reported(found), held=found.met) if self.reported else found


def _savers(case: CaseResult) -> list[_Saver]:
    """The way that is durable soonest, which is what the peers' own blocking saves are to be compared with,
    and the one behind the training; where only that was measured, it has to do."""
    if case.median("engine-sync", "save_s") is None:
        return [_Saver("engine", "async_save", note=f"`save`: {_why(case, 'engine-sync')}")]
    return [_Saver("engine-sync", "save"), _Saver("engine", "async_save", reported=True)]


def _reported(target: Target) -> Target:
    return replace(target, target=REPORTED, met=None, held=None)


def _digits(ratio: float, target: float) -> str:
    """Two digits behind the point, or as many as it takes to differ from a target that it is not at."""
    digits = 2
    while digits < 6 and ratio != target and float(f"{ratio:.{digits}f}") == target:
        digits += 1
    return f"{ratio:.{digits}f}"


def _of_limit(figure: str, case: CaseResult, name: str, least: float, engine: str = "engine") -> Target:
    """The row says which limit was the faster one, and so counts; the note has the other one."""
    value, limits = case.median(engine, name), limits_of(case, name)
    if value is None or not limits:
        return Target(figure, _why(case, engine), f"≥ {least:g} × the limit", None)
    limit, *others = limits
    share = limit.seconds / value
    note = "; ".join(f"{other.seconds / value:.2f} × {other.label}" for other in others)
    said = f"{_digits(share, least)} × {limit.label}"
    return Target(figure, said, f"≥ {least:g} × the limit", share >= least, note)


def _of_memcpy(figure: str, case: CaseResult, system: str, least: float) -> Target:
    value, copy = case.median(system, "restore_hot_s"), memcpy_of(case)
    if value is None or copy is None:
        return Target(figure, _why(case, system), f"≥ {least:g} × memcpy", None)
    rate = copy.seconds / value
    return Target(figure, f"{_digits(rate, least)} × {copy.label}", f"≥ {least:g} × memcpy", rate >= least)


def _ratio_of_limit(
    figure: str, case: CaseResult, system: str, name: str, limit: Reached | None, *, at_most: float
) -> Target:
    value = case.median(system, name)
    if value is None or limit is None:
        return Target(figure, _why(case, system), f"≤ {at_most:g} ×", None)
    times = value / limit.seconds
    note = ""
    if (streaming := streaming_of(case)) is not None:
        note = f"a {streaming.label} takes {streaming.seconds / limit.seconds:.2f} × {limit.label}"
    return Target(
        figure, f"{_digits(times, at_most)} × {limit.label}", f"≤ {at_most:g} ×", times <= at_most, note
    )


def _beats(
    figure: str,
    case: CaseResult,
    name: str,
    least: float,
    which: Callable[[System], bool] = lambda _: True,
    engine: str = "engine",
) -> Target:
    """Beside whichever peer is the fastest; the note names those that could have been, were they measured."""
    rivals = [system.name for system in peers(case, name, which)]
    target = _beats_best(figure, case, rivals, name, least, engine)
    others = [f"`{other}`" for other in unmeasured(case) if _could_be(other, case, name, which)]
    if not others:
        return target
    many = len(others) > MOST_NAMED
    missing = f"{len(others)} peers were not measured" if many else f"not measured: {', '.join(others)}"
    return replace(target, note="; ".join(filter(None, (target.note, missing))))


def unmeasured(case: CaseResult) -> dict[str, str]:
    """Every system that has no figure in this case, and why: whoever adds a system, or leaves one out of a
    case, cannot forget to say so."""
    found = {}
    for name in SYSTEMS:
        system = case.find(name)
        if system is not None and any(system.rounds(figure) for figure in COMPARED):
            continue
        if system is not None:
            found[name] = f"failed: {system.error}" if system.error else "stopped before its first round"
        else:
            found[name] = case.skipped.get(name) or case.case.apart.get(name) or "not asked for in this run"
    return found


def _could_be(name: str, case: CaseResult, figure: str, which: Callable[[System], bool]) -> bool:
    """Might the figure of a system that was not measured have been the fastest peer's? Not if another one
    that makes the same calls was measured."""
    traits = make(name).traits
    if traits.limit or name.startswith("engine"):
        return False
    like = traits.restores_like if figure.startswith("restore") else traits.saves_like
    if like is not None and case.median(like, figure) is not None:
        return False
    return which(System(name=name, title=traits.title, fsyncs=traits.fsyncs, copies=traits.copies))


def _beats_best(
    figure: str, case: CaseResult, names: Iterable[str], name: str, least: float, engine: str = "engine"
) -> Target:
    """The engine's speed as a multiple of the fastest of `names`."""
    value = case.median(engine, name)
    rivals = [(median, peer) for peer in names if (median := case.median(peer, name)) is not None]
    if value is None or not rivals:
        return Target(figure, _why(case, engine if value is None else None), f"≥ {least:g} ×", None)
    best, peer = min(rivals)
    found = case.find(peer)
    title = found.title if found else peer
    met = best / value >= least
    notes = [
        "" if met else _beyond_the_limit(case, name, best, title, least),
        _few_rounds(case, engine, peer, name),
    ]
    said = f"{_digits(best / value, least)} × {title}"
    return Target(figure, said, f"≥ {least:g} ×", met, "; ".join(filter(None, notes)))


def _few_rounds(case: CaseResult, engine: str, peer: str, figure: str) -> str:
    """Says so if the peer that decides a row has fewer samples than the engine."""
    systems = [case.find(name) for name in (peer, engine)]
    fewer, rounds = (0 if system is None else system.rounds(figure) for system in systems)
    return f"from {fewer} of {rounds} rounds" if fewer < rounds else ""


def _beyond_the_limit(case: CaseResult, name: str, best: float, title: str, least: float) -> str:
    """Says so if not even the machine's own limit, as measured in the same run, is `least` × the peer."""
    limit = fastest_limit(case, name)
    if limit is None or best / limit.seconds >= least:
        return ""
    return f"the limit itself ({limit.label}) is {best / limit.seconds:.2f} × {title}"


def _why(case: CaseResult, name: str | None) -> str:
    if name is None:
        return "no such peer was measured"
    if name in case.skipped:
        return f"not measured: {case.skipped[name]}"
    system = case.find(name)
    return f"failed: {system.error}" if system is not None and system.error else "not measured"


def summary(found: Sequence[Target]) -> str:
    """How many are met, and by which of the two ways to save."""
    met = sum(target.met is True for target in found)
    short = sum(target.met is False for target in found)
    unmeasured = sum(target.met is None and target.target != REPORTED for target in found)
    verdicts = f"{met} met, {short} short" + (f", {unmeasured} not measured" if unmeasured else "")
    behind = [target for target in found if target.held is not None]
    if not behind:
        return verdicts
    would = sum(target.held is True for target in behind)
    told = "; ".join(f"{target.figure.partition(', by ')[0]}: {target.measured}" for target in behind)
    return (
        f"{verdicts}. Saves are judged by `save()`, which returns when the checkpoint is committed; stalls "
        f"by `async_save`, whose own saves would be {would} met, {len(behind) - would} short of the same "
        f"targets ({told})"
    )
