"""What a run leaves behind: every sample, and what it has to be read beside."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec

from native_bench.cases import Case

FORMAT = 1

TIMED = ("stall_s", "save_s", "restore_cold_s", "restore_hot_s", "memcpy_s", "memcpy_streaming_s", "turn_s")
"""Figures of which ratios are made."""

NATIVE = "native"
"""The name under which the native programs' limits stand among the systems."""

STREAMING = "memcpy_streaming_s"
"""Of the native programs: the copy with non-temporal stores. Told beside the targets, which are held against
libc's memcpy."""


class System(msgspec.Struct, kw_only=True):
    """One system in one case. samples: seconds of each round, by figure; of several ranks the slowest one's.

    `stall_s`, `save_s` (from the call to durable and, if the system commits, committed), `restore_cold_s`,
    `restore_hot_s`; `turn_s`, all that a round took; others are the system's own. error: why it stopped.
    note: why there are fewer rounds.
    """

    name: str
    title: str
    how: str = ""
    fsyncs: bool = False
    copies: bool = True
    limit: bool = False
    restores_like: str | None = None
    saves_like: str | None = None
    samples: dict[str, list[float]] = {}
    error: str | None = None
    note: str | None = None

    def median(self, figure: str) -> float | None:
        values = self.samples.get(figure)
        return statistics.median(values) if values else None

    def rounds(self, figure: str) -> int:
        return len(self.samples.get(figure, ()))


class CaseResult(msgspec.Struct, kw_only=True):
    """nbytes, tensors: of all ranks together. skipped: system → why it was not measured. started: in UTC."""

    case: Case
    nbytes: int
    tensors: int
    directory: str
    file_system: str
    started: str = ""
    systems: list[System] = []
    skipped: dict[str, str] = {}
    notes: list[str] = []

    def find(self, name: str) -> System | None:
        return next((system for system in self.systems if system.name == name), None)

    def median(self, name: str, figure: str) -> float | None:
        system = self.find(name)
        return None if system is None else system.median(figure)


class Results(msgspec.Struct, kw_only=True):
    """A whole run. machine: `native_bench.condition`'s words. mode: `"full"` or `"quick"`.

    added: parts that were measured later, by a run of their own.
    unfinished: cases and parts that were to be measured, and were not or not wholly. cut_short: why.
    interrupted: by a signal.
    """

    format: int = FORMAT
    mode: str
    started: str
    seconds: float = 0.0
    machine: dict[str, Any] = {}
    versions: dict[str, str] = {}
    cases: list[CaseResult] = []
    added: list[str] = []
    unfinished: list[str] = []
    cut_short: str | None = None
    interrupted: bool = False

    @property
    def whole(self) -> bool:
        return not self.interrupted and not self.unfinished

    def case(self, name: str) -> CaseResult | None:
        return next((result for result in self.cases if result.case.name == name), None)

    @property
    def errors(self) -> list[str]:
        return [
            f"{result.case.name}: {system.name}: {system.error}"
            for result in self.cases
            for system in result.systems
            if system.error
        ]


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Of systems that were not measured, and why: those of one reason together."""
    found: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        found.setdefault(reason, []).append(name)
    return found


def now() -> str:
    """In UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The middle half's ends."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def write(results: Results, path: str) -> None:
    data = msgspec.json.format(msgspec.json.encode(results), indent=1)
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(data + b"\n")
    os.replace(temporary, path)


def read(path: str) -> Results:
    """Raises ValueError if the file is none, or of another version, or has figures that cannot have been
    measured; it names the file and the field."""
    with open(path, "rb") as file:
        try:
            results = msgspec.json.decode(file.read(), type=Results)
        except msgspec.DecodeError as exc:
            raise ValueError(f"{path} is no result of native_bench: {exc}") from exc
    if results.format != FORMAT:
        raise ValueError(f"{path} has format {results.format}; this version reads {FORMAT}")
    try:
        msgspec.convert(results.machine, _Machine)
    except msgspec.ValidationError as exc:
        raise ValueError(f"{path} is no result of native_bench: {exc}, in `$.machine`") from exc
    if problem := next(_problems(results), None):
        raise ValueError(f"{path} is no result of native_bench: {problem}")
    return results


class _Mount(msgspec.Struct):
    file_system: str | None = None
    device: str | None = None


class _Machine(msgspec.Struct):
    """What the report shows of `Results.machine`."""

    cpu_model: str | None = None
    cores: float = 0.0
    memory_total: float = 0.0
    memory_available: float = 0.0
    transparent_huge_pages: str | None = None
    load: list[float] = []
    kernel: str | None = None
    python: str | None = None
    warnings: list[str] = []
    mount: _Mount | None = None


def _problems(results: Results) -> Iterator[str]:
    """What is of the right type, but nothing that a run leaves behind: ratios cannot be made of it."""
    for i, case in enumerate(results.cases):
        for name in ("nbytes", "tensors"):
            if getattr(case, name) <= 0:
                yield f"{getattr(case, name)} is not above 0 - at `$.cases[{i}].{name}`"
        for name in ("world_size", "count"):
            if getattr(case.case, name) <= 0:
                yield f"{getattr(case.case, name)} is not above 0 - at `$.cases[{i}].case.{name}`"
        if case.case.nbytes < 0:
            yield f"{case.case.nbytes} is not 0 or more - at `$.cases[{i}].case.nbytes`"
        for j, system in enumerate(case.systems):
            at = f"$.cases[{i}].systems[{j}].samples"
            for figure, values in system.samples.items():
                if not values:
                    yield f"no samples - at `{at}.{figure}` ({system.name} in {case.case.name})"
                for k, value in enumerate(values):
                    if value < 0 or (value == 0 and figure in TIMED):
                        least = "above 0" if figure in TIMED else "0 or more"
                        where = f"{at}.{figure}[{k}]` ({system.name} in {case.case.name})"
                        yield f"{value:g} s is not {least} - at `{where}"
