"""Has the engine fallen behind the machine's own limit, compared with a baseline? Ratios only, so that a
faster or slower machine of the same kind does not matter; a case that is short is measured again."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from native_bench.cases import Case
from native_bench.reached import Reached, limit_of, memcpy_of
from native_bench.results import NATIVE, Results

BASELINE = Path(__file__).with_name("baseline.json")
TOLERANCE = 0.25
"""How much of a ratio may be lost: of each the same. What scatters by more is measured again, as a wider
tolerance would hide a regression on quiet machines, too."""
TRIES = 3

SYSTEMS = ("engine", "engine-sync", "engine-overlap", "raw")
CASES = ("large", "small", "two-ranks")
ROUNDS = 4
"""Of a try. All cases together take eight minutes on two cores."""

Measure = Callable[[Collection[str]], Results]
"""The cases of these names, each with its limit in the same rounds."""


class Baseline(msgspec.Struct, kw_only=True):
    """started: of the run whose figures these are; docs/benchmarks.md says the same of its tables. ratios:
    `case.figure` → limit's seconds by the engine's, so higher is better."""

    started: str
    machine: str
    ratios: dict[str, float]


@dataclass(frozen=True, slots=True)
class Watched:
    """A figure in the tries so far: its ratio in each, and in the baseline."""

    name: str
    then: float
    tries: Sequence[float]

    @property
    def least(self) -> float:
        return self.then * (1 - TOLERANCE)

    @property
    def best(self) -> float:
        """Other work on the machine lowers a ratio in one try; a slower engine does in each."""
        return max(self.tries)

    @property
    def behind(self) -> bool:
        return self.best < self.least

    def __str__(self) -> str:
        tried = ", then ".join(f"{value:.3g}" for value in self.tries)
        return f"{self.name:24} {tried} of the limit, baseline {self.then:.3g}, at least {self.least:.3g}"


def ratios(results: Results) -> dict[str, float]:
    """Of every case: saves, blocking and not, and cold restore against the storage's limit; hot restore and
    stall against memcpy.

    Stalls only of large tensors, as those of small ones have too little of a copy in them; of overlapping
    saves only in `large`, as ranks that start a copy on few cores wait for each other now and then.
    """
    return dict(_ratios(results))


def _ratios(results: Results) -> Iterator[tuple[str, float]]:
    for case in results.cases:
        copy = memcpy_of(case)
        write, read = limit_of(case, "save_s"), limit_of(case, "restore_cold_s")
        of: list[tuple[str, str, str, Reached | None]] = [
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
                yield f"{case.case.name}.{name}", limit.seconds / statistics.median(engine.samples[figure])


def watched(table: Sequence[Case], names: Collection[str] = CASES) -> tuple[Case, ...]:
    """The cases of these names of `table`, with all that ratios are made of and nothing else; a quick table
    leaves some of it out."""
    overlap = {"engine-overlap": "the guard watches it in `large`"}
    return tuple(
        msgspec.structs.replace(
            case,
            apart={
                **{name: why for name, why in case.apart.items() if name not in SYSTEMS},
                **({} if case.name == "large" else overlap),
            },
        )
        for case in table
        if case.name in names
    )


def check(measure: Measure, baseline: Baseline, say: Callable[[str], None]) -> list[Watched]:
    """Measure; of what is short the cases again, up to `TRIES` times. Returns what was short each time.

    A figure that a try did not find counts as lost in it.
    """
    found = {name: Watched(name, then, ()) for name, then in sorted(baseline.ratios.items())}
    behind = list(found.values())
    for number in range(1, TRIES + 1):
        cases = {case_of(one.name) for one in behind}
        now = ratios(measure([name for name in CASES if name in cases]))
        for one in behind:
            found[one.name] = Watched(one.name, one.then, [*one.tries, now.get(one.name, 0.0)])
        behind = [one for one in found.values() if one.behind]
        if not behind:
            break
        if number < TRIES:
            say(f"try {number} of {TRIES}: {describe(behind)}; measuring again what is short")
    for one in found.values():
        say(f"{one}{'  BEHIND' if one.behind else ''}")
    return behind


def case_of(figure: str) -> str:
    """The case that a figure of `Baseline.ratios` is measured in."""
    return figure.partition(".")[0]


def describe(behind: Sequence[Watched]) -> str:
    return ", ".join(f"{one.name} at {one.best / one.then:.0%} of the baseline" for one in behind)


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
        ratios={
            name: round(value, 3) for name, value in sorted(ratios(results).items()) if case_of(name) in CASES
        },
    )


def write(results: Results, path: Path = BASELINE) -> Baseline:
    """Raises ValueError as `baseline_of`; then what is there stays."""
    baseline = baseline_of(results)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(baseline), indent=2) + b"\n")
    return baseline
