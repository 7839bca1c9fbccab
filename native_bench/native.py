"""The native programs as a system among the others: what the machine can do, measured in the same rounds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptengine.format.limits import PAGE, round_up
from native_bench import limits
from native_bench.cases import Case
from native_bench.results import STREAMING

_CANDIDATES = (1, 2, 4)


@dataclass(slots=True)
class Tuned:
    """The fastest knobs of each program for cases of one kind in one place; None: not found out yet."""

    write: limits.WriteKnobs | None = None
    read: limits.ReadKnobs | None = None
    threads: int | None = None


class Limits:
    """Runs the programs in every round, with knobs that are found once for all cases of a kind and a place.

    tuned: what earlier cases of the run have found. missing: why nothing can be measured, or None.
    """

    def __init__(self, case: Case, directory: Path, tuned: dict[tuple[str, str], Tuned]) -> None:
        self._case, self._directory = case, directory
        self._nbytes = 0
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
            _knobs(knobs) if knobs is not None else "best knobs"
            for knobs in (self._tuned.write, self._tuned.read)
        )
        return (
            f"`direct_write` ({write}); `direct_read` of the engine's shards ({read}); "
            f"`buffered_read` of them when hot; `memcpy` between warm 4 KiB pages, "
            f"{self._tuned.threads or 1} threads, each its share in one call (and the same "
            "with non-temporal stores, for a note)"
        )

    def prepare(self, nbytes: int) -> None:
        """Find the fastest knobs for writing so many bytes, and for copying them."""
        self._nbytes = round_up(nbytes, PAGE)
        if self._tuned.write is not None:
            return
        self._tuned.write = limits.best_direct_write(
            self._directory, self._nbytes, files=self._case.world_size, rounds=1
        ).knobs
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
        knobs = self._tuned.write or limits.WriteKnobs()
        write = limits.direct_write(
            self._directory, self._nbytes, knobs, files=self._case.world_size, repeat=1
        )
        threads = self._tuned.threads or 1
        copy = limits.memcpy(self._nbytes, threads, repeat=3)
        found = {"save_s": min(write.seconds), "memcpy_s": sorted(copy.seconds)[1]}
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
        if self._tuned.read is None:
            self._tuned.read = limits.best_direct_read(shards, rounds=1).knobs
        return {"restore_cold_s": limits.direct_read(shards, self._tuned.read, repeat=1).seconds[0]}


def _knobs(knobs: limits.ReadKnobs | limits.WriteKnobs) -> str:
    words = [
        "threads" if knobs.engine == "threads" else "io_uring",
        f"{knobs.threads} × {knobs.depth}" if knobs.depth > 1 else f"{knobs.threads}",
        f"{knobs.block >> 20} MiB blocks",
    ]
    if isinstance(knobs, limits.ReadKnobs) and knobs.into != "target":
        words.append(f"into {knobs.into}")
    if not knobs.direct:
        words.append("through the page cache")
    return ", ".join(words)
