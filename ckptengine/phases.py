"""How long did a restore take at what, and how much went through? Values that add up.

Some phases come one after the other, and are measured as wall time. In others several threads are at work at
once, each reading, digesting and copying piece by piece; their time is added up over the threads
(`thread_seconds`), and divided by the number of threads it is the phase's share of the wall time (`seconds`).
So the phases' `seconds` may be added up, and come to the restore's wall time but for what no phase accounts
for; their `thread_seconds` come to more than that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgspec

from ckptengine.tracing.recorder import span

GB = 1e9


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a save or restore.

    seconds: of wall time; where threads work side by side, their time divided by how many they are. nbytes:
    bytes that went through the phase. thread_seconds: the threads' time, added up; a thread that waits for
    the storage, or for a core, counts as well.
    """

    seconds: float = 0.0
    nbytes: int = 0
    thread_seconds: float = 0.0

    @property
    def gbps(self) -> float:
        """GB (1e9 bytes) a second, all threads together; 0.0 if no time was spent."""
        return self.nbytes / self.seconds / GB if self.seconds > 0 else 0.0

    def __add__(self, other: Phase) -> Phase:
        return Phase(
            self.seconds + other.seconds,
            self.nbytes + other.nbytes,
            self.thread_seconds + other.thread_seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gbps": self.gbps}


@dataclass(frozen=True, slots=True)
class RestorePhases:
    """Where one rank's time went, over all the steps that were tried; but what was read of a step that turned
    out to be damaged is in no phase. None of the phases' `seconds` overlap.

    agree: waiting for other ranks, until all had reported. metadata: the list of steps, manifest and headers
        (nbytes: of headers).
    plan: comparing the target with the checkpoint, and laying out what goes where.
    read: from storage or the page cache into memory, whole blocks as stored; in threads.
    decompress: of compressed blocks, nbytes as they come out; in threads.
    verify: digests; in threads.
    scatter: bytes that were copied from a buffer to where they belong; in threads, and between the rounds of
        a restore that needs several. What is read straight into its place counts as read alone.
    exchange: bytes that came from other ranks instead of storage.
    apply: putting values in place, `load_state_dict`.
    """

    agree: Phase = field(default_factory=Phase)
    metadata: Phase = field(default_factory=Phase)
    plan: Phase = field(default_factory=Phase)
    read: Phase = field(default_factory=Phase)
    decompress: Phase = field(default_factory=Phase)
    verify: Phase = field(default_factory=Phase)
    scatter: Phase = field(default_factory=Phase)
    exchange: Phase = field(default_factory=Phase)
    apply: Phase = field(default_factory=Phase)

    def items(self) -> Iterator[tuple[str, Phase]]:
        """Names and phases, in the order of a restore."""
        return ((one.name, getattr(self, one.name)) for one in fields(self))

    @property
    def seconds(self) -> float:
        """Of all phases."""
        return sum(phase.seconds for _, phase in self.items())

    @property
    def busy_seconds(self) -> float:
        """Of all phases but `agree`, in which a rank that is done waits for others."""
        return self.seconds - self.agree.seconds

    @property
    def longest(self) -> str:
        """The name of the phase that took longest, `agree` aside."""
        return max((item for item in self.items() if item[0] != "agree"), key=lambda item: item[1].seconds)[0]

    def to_dict(self) -> dict[str, Any]:
        return {name: phase.to_dict() for name, phase in self.items()}


@dataclass(frozen=True, slots=True)
class RankPhases:
    """One rank's figures as the other ranks hear of them: until the last time that all agreed."""

    rank: int
    phases: RestorePhases

    @property
    def seconds(self) -> float:
        """In which the rank was busy: all but waiting for others."""
        return self.phases.busy_seconds

    @property
    def phase(self) -> str:
        """What it was longest at."""
        return self.phases.longest

    def to_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "seconds": self.seconds,
            "phase": self.phase,
            "phases": self.phases.to_dict(),
        }


class Stopwatch:
    """Adds up the phases of one restore while it runs. For the one thread that drives it."""

    def __init__(self) -> None:
        self._phases: dict[str, Phase] = {}

    def add(self, name: str, phase: Phase) -> None:
        self._phases[name] = self._phases.get(name, Phase()) + phase

    def add_all(self, phases: Mapping[str, Phase]) -> None:
        for name, phase in phases.items():
            self.add(name, phase)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """The wall time of what is done within, less that of the phases which are measured inside it."""
        before, began = self._seconds, time.perf_counter()
        try:
            with span(name, "whole"):
                yield
        finally:
            seconds = time.perf_counter() - began
            inside = self._seconds - before
            self.add(name, Phase(max(seconds - inside, 0.0), 0, max(seconds - inside, 0.0)))

    @property
    def _seconds(self) -> float:
        return sum(phase.seconds for phase in self._phases.values())

    def phases(self) -> RestorePhases:
        return RestorePhases(**self._phases)


def encode(one: RankPhases) -> bytes:
    """For other ranks: some 200 bytes, as there may be thousands."""
    phases = [(phase.seconds, phase.nbytes, phase.thread_seconds) for _, phase in one.phases.items()]
    return msgspec.msgpack.encode((one.rank, phases))


def decode(data: bytes) -> RankPhases:
    rank, phases = msgspec.msgpack.decode(data, type=tuple[int, list[tuple[float, int, float]]])
    return RankPhases(rank, RestorePhases(*(Phase(*phase) for phase in phases)))


class Ranks:
    """All ranks' figures, which travel with the word that all have succeeded: no wait of their own."""

    def __init__(self, rank: int, watch: Stopwatch) -> None:
        self._rank = rank
        self._watch = watch
        self.all: tuple[RankPhases, ...] = ()
        self.slowest: RankPhases | None = None

    def own(self) -> bytes:
        return encode(RankPhases(self._rank, self._watch.phases()))

    def summary(self, values: list[bytes]) -> bytes:
        """The coordinator's: it keeps all, and the others hear of the slowest."""
        self.all = tuple(decode(value) for value in values)
        return encode(max(self.all, key=lambda one: one.seconds))

    def learn(self, slowest: bytes) -> None:
        self.slowest = decode(slowest)


def table(phases: Iterator[tuple[str, Phase]], seconds: float) -> list[str]:
    """Lines for people: each phase's share of the wall time `seconds`, and what none accounts for."""
    lines = [f"{'phase':<11}{'seconds':>9}{'share':>7}{'bytes':>17}{'GB/s':>9}"]
    accounted = 0.0
    for name, phase in phases:
        if not phase.seconds and not phase.nbytes:
            continue
        accounted += phase.seconds
        rate = f"{phase.gbps:.2f}" if phase.nbytes and phase.seconds else "-"
        nbytes = f"{phase.nbytes:,}" if phase.nbytes else "-"
        lines.append(f"{name:<11}{phase.seconds:>9.4f}{_share(phase.seconds, seconds)}{nbytes:>17}{rate:>9}")
    rest = max(seconds - accounted, 0.0)
    lines.append(f"{'other':<11}{rest:>9.4f}{_share(rest, seconds)}{'-':>17}{'-':>9}")
    return lines


def _share(part: float, whole: float) -> str:
    return f"{part / whole:>7.1%}" if whole > 0 else f"{'-':>7}"
