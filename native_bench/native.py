"""The native programs as a system among the others: what the machine can do, measured in the same rounds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckptengine.format.limits import PAGE, round_up
from native_bench import limits
from native_bench.cases import Case

_CANDIDATES = (1, 2, 4)


class Limits:
    """Chooses the knobs of each program once per case, then runs it with those in every round.

    missing: why nothing can be measured, or None.
    """

    def __init__(self, case: Case, directory: Path) -> None:
        self._case, self._directory = case, directory
        self._nbytes = 0
        self._write = limits.WriteKnobs()
        self._read: limits.ReadKnobs | None = None
        self._threads = 1
        self.missing: str | None = None
        try:
            limits.build()
        except limits.BuildError as exc:
            self.missing = f"the native programs cannot be built: {exc}"

    @property
    def how(self) -> str:
        """Which programs, with which knobs."""
        read = _knobs(self._read) if self._read is not None else "best knobs"
        return (
            f"`direct_write` ({_knobs(self._write)}); `direct_read` of the engine's shards ({read}); "
            f"`buffered_read` of them when hot; `memcpy` into warm memory, {self._threads} threads"
        )

    def prepare(self, nbytes: int) -> None:
        """Find the fastest knobs for writing so many bytes, and for copying them."""
        self._nbytes = round_up(nbytes, PAGE)
        self._write = limits.best_direct_write(
            self._directory, self._nbytes, files=self._case.world_size, rounds=1
        ).knobs
        cores = len(os.sched_getaffinity(0))
        rates = {
            threads: limits.memcpy(self._nbytes, threads, repeat=3).gib_s
            for threads in _CANDIDATES
            if threads <= cores
        }
        self._threads = max(rates, key=lambda threads: rates[threads])

    def alone(self) -> dict[str, float]:
        """Seconds to write as many bytes as the case has, and to copy them."""
        write = limits.direct_write(
            self._directory, self._nbytes, self._write, files=self._case.world_size, repeat=1
        )
        copy = limits.memcpy(self._nbytes, self._threads, repeat=3)
        return {"save_s": min(write.seconds), "memcpy_s": sorted(copy.seconds)[1]}

    def read(self, paths: Sequence[str], kind: str) -> dict[str, float]:
        """Seconds to read the engine's own shards, of all ranks together, `"cold"` or `"hot"`."""
        shards = [path for path in paths if os.path.basename(path).startswith("shard-")]
        if kind == "hot":
            threads = len(os.sched_getaffinity(0))
            return {"restore_hot_s": limits.buffered_read(shards, threads=threads, repeat=1).seconds[0]}
        if self._read is None:
            self._read = limits.best_direct_read(shards, rounds=1).knobs
        return {"restore_cold_s": limits.direct_read(shards, self._read, repeat=1).seconds[0]}


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
