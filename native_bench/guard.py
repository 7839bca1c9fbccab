"""Has the engine fallen behind the machine's own limit, compared with a baseline? Ratios only, so that a
faster or slower machine of the same kind does not matter."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from native_bench.results import Results
from native_bench.targets import limit_of, memcpy_of

BASELINE = Path(__file__).with_name("baseline.json")
TOLERANCE = 0.25

SYSTEMS = ("engine", "raw")
CASES = ("large", "small")

Measure = Callable[[], Results]


class Baseline(msgspec.Struct, kw_only=True):
    """ratios: `case.figure` → limit's seconds by the engine's, so higher is better."""

    machine: str
    ratios: dict[str, float]


def ratios(results: Results) -> dict[str, float]:
    """Of every case: save and cold restore against the storage's limit, hot restore against memcpy. Not
    stalls: those of small states are too short to compare across minutes."""
    found = {}
    for case in results.cases:
        copy = memcpy_of(case)
        for figure in ("save_s", "restore_cold_s", "restore_hot_s"):
            limit = copy if figure == "restore_hot_s" else limit_of(case, figure)
            engine = case.median("engine", figure)
            if limit is not None and engine:
                found[f"{case.case.name}.{figure.removesuffix('_s')}"] = limit[1] / engine
    return found


def regressions(now: Mapping[str, float], baseline: Mapping[str, float]) -> dict[str, float]:
    """Figure → ratio now by ratio then, of those that lost more than `TOLERANCE`. A figure that is missing
    now lost everything."""
    changes = {name: now.get(name, 0.0) / then for name, then in baseline.items()}
    return {name: change for name, change in changes.items() if change < 1 - TOLERANCE}


def better(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Of each figure the higher ratio: other work on the machine can only lower it for long."""
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}


def check(measure: Measure, baseline: Baseline, say: Callable[[str], None]) -> dict[str, float]:
    """Measure; if figures fell behind, once more. Returns what fell behind both times."""
    now = ratios(measure())
    fell = regressions(now, baseline.ratios)
    if fell:
        say(f"behind the baseline: {describe(fell)}; measuring once more")
        now = better(now, ratios(measure()))
        fell = regressions(now, baseline.ratios)
    for name in sorted(baseline.ratios):
        then, value = baseline.ratios[name], now.get(name, 0.0)
        say(f"{name:24} {value:6.2f} of the limit, baseline {then:.2f}{'  BEHIND' if name in fell else ''}")
    return fell


def describe(fell: Mapping[str, float]) -> str:
    return ", ".join(f"{name} at {change:.0%} of the baseline" for name, change in sorted(fell.items()))


def read(path: Path = BASELINE) -> Baseline:
    """Raises FileNotFoundError, or ValueError if the file is no baseline."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Baseline)
    except msgspec.DecodeError as exc:
        raise ValueError(f"{path} is no baseline: {exc}") from exc


def write(results: Results, path: Path = BASELINE) -> Baseline:
    machine = results.machine
    mount = machine.get("mount") or {}
    baseline = Baseline(
        machine=f"{machine.get('cores', os.cpu_count())} cores, {mount.get('file_system')}",
        ratios={name: round(value, 3) for name, value in sorted(ratios(results).items())},
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(baseline), indent=2) + b"\n")
    return baseline
