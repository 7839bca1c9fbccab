"""Has the engine fallen behind the machine's own limit, compared with a baseline? Ratios only, so that a
faster or slower machine of the same kind does not matter; a ratio that scatters is given more room."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from native_bench.cases import Case
from native_bench.reached import limit_of, memcpy_of
from native_bench.results import NATIVE, Results, quartiles

BASELINE = Path(__file__).with_name("baseline.json")
TOLERANCE = 0.25
"""How much of a ratio may be lost, where the rounds of the baseline's run do not scatter by more."""
MOST_TOLERANCE = 0.5

SYSTEMS = ("engine", "engine-sync", "engine-overlap", "raw")
CASES = ("large", "small", "two-ranks")
ROUNDS = 4
"""Together eight minutes on two cores."""

Measure = Callable[[], Results]


class Baseline(msgspec.Struct, kw_only=True):
    """started: of the run whose figures these are; docs/benchmarks.md says the same of its tables. ratios:
    `case.figure` → limit's seconds by the engine's, so higher is better. tolerances: what share of each may
    be lost, from how its run's rounds scatter; else `TOLERANCE`."""

    started: str
    machine: str
    ratios: dict[str, float]
    tolerances: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class _Compared:
    """A figure of the engine's and the limit it is held against: the seconds of each round."""

    engine: Sequence[float]
    limit: Sequence[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.limit) / statistics.median(self.engine)

    @property
    def tolerance(self) -> float:
        """The middle halves of both, as shares of their medians, together."""
        scatter = 0.0
        for samples in (self.engine, self.limit):
            low, high = quartiles(samples)
            scatter += (high - low) / statistics.median(samples)
        return min(MOST_TOLERANCE, max(TOLERANCE, scatter))


def ratios(results: Results) -> dict[str, float]:
    """Of every case: saves, blocking and not, and cold restore against the storage's limit; hot restore and
    stall against memcpy.

    Stalls only of large tensors, as those of small ones have too little of a copy in them; of overlapping
    saves only in `large`, as ranks that start a copy on few cores wait for each other now and then.
    """
    return {name: compared.ratio for name, compared in _compared(results)}


def tolerances(results: Results) -> dict[str, float]:
    """What share of each ratio may be lost: a quarter, or as much as the middle halves of the run's own
    rounds scatter, and never more than a half."""
    return {name: compared.tolerance for name, compared in _compared(results)}


def _compared(results: Results) -> Iterator[tuple[str, _Compared]]:
    for case in results.cases:
        copy = memcpy_of(case)
        write, read = limit_of(case, "save_s"), limit_of(case, "restore_cold_s")
        of = [
            ("save", "engine-sync", "save_s", write),
            ("async_save", "engine", "save_s", write),
            ("restore_cold", "engine", "restore_cold_s", read),
            ("restore_hot", "engine", "restore_hot_s", copy),
        ]
        if case.case.kind == "model":
            of.append(("stall", "engine", "stall_s", copy))
            if case.case.name == "large":
                of.append(("stall_overlap", "engine-overlap", "stall_s", copy))
        for name, system, figure, limit in of:
            engine = case.find(system)
            if limit is not None and engine is not None and engine.rounds(figure):
                yield f"{case.case.name}.{name}", _Compared(engine.samples[figure], limit.samples)


def watched(table: Sequence[Case]) -> tuple[Case, ...]:
    """The cases of `table` that are measured, without what no ratio is made of."""
    overlap = {"engine-overlap": "the guard watches it in `large`"}
    return tuple(
        case if case.name == "large" else msgspec.structs.replace(case, apart={**case.apart, **overlap})
        for case in table
        if case.name in CASES
    )


def regressions(now: Mapping[str, float], baseline: Baseline) -> dict[str, float]:
    """Figure → ratio now by ratio then, of those that lost more than they may. A figure that is missing now
    lost everything."""
    changes = {name: now.get(name, 0.0) / then for name, then in baseline.ratios.items()}
    return {
        name: change
        for name, change in changes.items()
        if change < 1 - baseline.tolerances.get(name, TOLERANCE)
    }


def better(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Of each figure the higher ratio: other work on the machine can only lower it for long."""
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}


def check(measure: Measure, baseline: Baseline, say: Callable[[str], None]) -> dict[str, float]:
    """Measure; if figures fell behind, once more. Returns what fell behind both times."""
    now = ratios(measure())
    fell = regressions(now, baseline)
    if fell:
        say(f"behind the baseline: {describe(fell)}; measuring once more")
        now = better(now, ratios(measure()))
        fell = regressions(now, baseline)
    for name in sorted(baseline.ratios):
        then, value = baseline.ratios[name], now.get(name, 0.0)
        least = then * (1 - baseline.tolerances.get(name, TOLERANCE))
        behind = "  BEHIND" if name in fell else ""
        say(f"{name:24} {value:6.2f} of the limit, baseline {then:.2f}, at least {least:.2f}{behind}")
    return fell


def describe(fell: Mapping[str, float]) -> str:
    return ", ".join(f"{name} at {change:.0%} of the baseline" for name, change in sorted(fell.items()))


def read(path: Path = BASELINE) -> Baseline:
    """Raises FileNotFoundError, or ValueError if the file is no baseline."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Baseline)
    except msgspec.DecodeError as exc:
        raise ValueError(f"{path} is no baseline: {exc}") from exc


def baseline_of(results: Results) -> Baseline:
    """Of a whole run at full size. Raises ValueError if it is none, and says what it lacks."""
    finished = {case.case.name for case in results.cases} - set(results.unfinished)
    if results.mode != "full":
        raise ValueError(
            f"a {results.mode} run is no baseline: its sizes are not those that the guard measures"
        )
    if missing := [name for name in CASES if name not in finished]:
        raise ValueError(f"no baseline without the case{'s' * (len(missing) > 1)} {', '.join(missing)}")
    if lacking := [case.case.name for case in results.cases if case.find(NATIVE) is None]:
        raise ValueError(f"no baseline without the native limits, which {', '.join(lacking)} has not")
    machine = results.machine
    mount = machine.get("mount") or {}
    return Baseline(
        started=results.started,
        machine=f"{machine.get('cores', os.cpu_count())} cores, {mount.get('file_system')}",
        ratios=_watched_only(ratios(results)),
        tolerances=_watched_only(tolerances(results)),
    )


def _watched_only(values: Mapping[str, float]) -> dict[str, float]:
    return {
        name: round(value, 3) for name, value in sorted(values.items()) if name.partition(".")[0] in CASES
    }


def write(results: Results, path: Path = BASELINE) -> Baseline:
    """Raises ValueError as `baseline_of`; then what is there stays."""
    baseline = baseline_of(results)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(baseline), indent=2) + b"\n")
    return baseline
