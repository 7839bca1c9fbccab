"""The native programs as a system among the others: what the machine can do, measured in the same rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptengine.format.limits import PAGE, round_up
from native_bench import limits
from native_bench.cases import Case
from native_bench.limits.values import Best, Knobs
from native_bench.results import STREAMING

_CANDIDATES = (1, 2, 4)
READ_PROBES = 2
WRITE_PROBES = 1
"""Of each set of knobs that is left, in every round, in processes of their own; the fastest counts. How fast
a read into 4 KiB pages is depends on how the pages lie that a process happens to get: of reads of the same 2
GiB by the same knobs, one took 1.6 times as long as another, and a limit is what the machine does at best."""


@dataclass(slots=True)
class Tuned:
    """The fastest knobs of each program for cases of one kind in one place; none: not found out yet."""

    write: tuple[limits.WriteKnobs, ...] = ()
    read: tuple[limits.ReadKnobs, ...] = ()
    threads: int | None = None


class Limits:
    """Runs the programs in every round, with knobs that are found once for all cases of a kind and a place.

    On tmpfs only copies: there is no device whose limit could be found, and what the programs do to get the
    most out of one costs time there.

    tuned: what earlier cases of the run have found. missing: why nothing can be measured, or None.
    """

    def __init__(self, case: Case, directory: Path, tuned: dict[tuple[str, str], Tuned]) -> None:
        self._case, self._directory = case, directory
        self._nbytes = 0
        self._device = case.place == "disk"
        self._tuned = tuned.setdefault((case.place, case.kind), Tuned())
        self.missing: str | None = None
        try:
            limits.build()
        except limits.BuildError as exc:
            self.missing = f"the native programs cannot be built: {exc}"

    @property
    def how(self) -> str:
        """Which programs, with which knobs."""
        write, read = (
            " or ".join(map(_knobs, found)) or "best knobs" for found in (self._tuned.write, self._tuned.read)
        )
        device = (
            f"`direct_write` ({write}); `direct_read` of the engine's shards ({read}), of either "
            f"{READ_PROBES} times; of a round the fastest; "
        )
        return (
            f"{device if self._device else ''}`buffered_read` of the engine's shards when hot; "
            f"`memcpy` between warm 4 KiB pages, {self._tuned.threads or 1} threads, each its share in one "
            "call (and the same with non-temporal stores, for a note)"
        )

    def prepare(self, nbytes: int) -> None:
        """Find the fastest knobs for writing so many bytes, and for copying them."""
        self._nbytes = round_up(nbytes, PAGE)
        if self._tuned.threads is not None:
            return
        if self._device:
            best = limits.best_direct_write(
                self._directory, self._nbytes, files=self._case.world_size, rounds=1
            )
            self._tuned.write = _finalists(best, lambda knobs: knobs.pages)
        cores = len(os.sched_getaffinity(0))
        rates = {
            threads: limits.memcpy(self._nbytes, threads, repeat=3).gib_s
            for threads in _CANDIDATES
            if threads <= cores
        }
        self._tuned.threads = max(rates, key=lambda threads: rates[threads])

    def alone(self) -> dict[str, float]:
        """Seconds to write as many bytes as the case has, and to copy them: as libc does it, and with
        non-temporal stores where the program has them."""
        found = {}
        if self._device:
            found["save_s"] = min(
                limits.direct_write(
                    self._directory, self._nbytes, knobs, files=self._case.world_size, repeat=1
                ).seconds[0]
                for knobs in WRITE_PROBES * (self._tuned.write or (limits.WriteKnobs(),))
            )
        threads = self._tuned.threads or 1
        copy = limits.memcpy(self._nbytes, threads, repeat=3)
        found["memcpy_s"] = sorted(copy.seconds)[1]
        try:
            streamed = limits.memcpy(self._nbytes, threads, stores="streaming", repeat=3)
        except limits.Unavailable:
            return found
        return {**found, STREAMING: sorted(streamed.seconds)[1]}

    def read(self, paths: Sequence[str], kind: str) -> dict[str, float]:
        """Seconds to read the engine's own shards, of all ranks together, `"cold"` or `"hot"`."""
        shards = [path for path in paths if os.path.basename(path).startswith("shard-")]
        if kind == "hot":
            threads = len(os.sched_getaffinity(0))
            return {"restore_hot_s": limits.buffered_read(shards, threads=threads, repeat=1).seconds[0]}
        if not self._tuned.read:
            best = limits.best_direct_read(shards, rounds=1)
            self._tuned.read = _finalists(best, lambda knobs: knobs.into)
        probes = [
            limits.direct_read(shards, knobs, repeat=1).seconds[0] for knobs in READ_PROBES * self._tuned.read
        ]
        return {"restore_cold_s": min(probes)}


def _finalists(best: Best[Knobs], way: Callable[[Knobs], Any]) -> tuple[Knobs, ...]:
    """The fastest knobs, and the fastest of those that go another way: which of the two it is changes with
    how the memory lies, from process to process, and one trial of each does not tell."""
    others = (knobs for knobs, _ in best.trials if way(knobs) != way(best.knobs))
    other = next(others, None)
    return (best.knobs,) if other is None else (best.knobs, other)


def _knobs(knobs: limits.ReadKnobs | limits.WriteKnobs) -> str:
    words = [
        "threads" if knobs.engine == "threads" else "io_uring",
        f"{knobs.threads} × {knobs.depth}" if knobs.depth > 1 else f"{knobs.threads}",
        f"{knobs.block >> 20} MiB blocks",
    ]
    if isinstance(knobs, limits.ReadKnobs) and knobs.into != "target":
        words.append(f"into {knobs.into}")
    elif isinstance(knobs, limits.WriteKnobs) and knobs.pages == "huge":
        words.append("huge pages")
    if not knobs.direct:
        words.append("through the page cache")
    return ", ".join(words)
