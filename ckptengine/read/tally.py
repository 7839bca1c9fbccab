"""What has a read come to, with several threads at it?"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ckptengine.phases import Phase
from ckptengine.read.spent import Spent, parts


@dataclass(frozen=True, slots=True)
class ReadStats:
    """nbytes_read: from the file, whole blocks, as stored. nbytes_delivered: copied to destinations.
    from_cache: the part of nbytes_read that the page cache had. phases: `read`, `decompress`, `verify`,
    `scatter` of `ckptengine.phases`, and `plan` where a plan was made."""

    nbytes_read: int = 0
    nbytes_delivered: int = 0
    blocks: int = 0
    seconds: float = 0.0
    from_cache: int = 0
    phases: Mapping[str, Phase] = field(default_factory=dict, compare=False)

    def __add__(self, other: ReadStats) -> ReadStats:
        """Of two reads, one after the other."""
        return ReadStats(
            self.nbytes_read + other.nbytes_read,
            self.nbytes_delivered + other.nbytes_delivered,
            self.blocks + other.blocks,
            self.seconds + other.seconds,
            self.from_cache + other.from_cache,
            {
                name: self.phases.get(name, Phase()) + other.phases.get(name, Phase())
                for name in (*self.phases, *other.phases)
            },
        )


class _HasSpent(Protocol):
    spent: Spent


_Entering = TypeVar("_Entering", bound=_HasSpent)


class Tally:
    """Adds up one read while it goes on. Thread-safe; lock: for whoever counts along."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._began = time.monotonic()
        self._threads: list[Spent] = []
        self._blocks = self._read = self._cached = self._delivered = 0
        self._decompressed = self._verified = 0

    def entered(self, buffers: _Entering) -> _Entering:
        """A thread begins, with these buffers, which it gets back."""
        self._threads.append(buffers.spent)
        return buffers

    def count(self, *, read: int, cached: int, delivered: int, decompressed: int, verified: int) -> None:
        """A block is done; the bytes of each."""
        with self.lock:
            self._blocks += 1
            self._read += read
            self._cached += cached
            self._delivered += delivered
            self._decompressed += decompressed
            self._verified += verified

    def correct(self, *, delivered: int) -> None:
        """Bytes that were copied elsewhere than to a destination."""
        with self.lock:
            self._delivered += delivered

    def stats(self) -> ReadStats:
        """Of all that was counted, when the threads have ended."""
        return ReadStats(
            self._read,
            self._delivered,
            self._blocks,
            time.monotonic() - self._began,
            self._cached,
            parts(
                self._threads,
                read_nbytes=self._read,
                decompressed_nbytes=self._decompressed,
                verified_nbytes=self._verified,
            ),
        )
