"""How is memory copied fastest, by libc's `memmove` alone?

A long copy lets other Python threads go on; a short one had better not (`move`).

And libc decides by the size how to copy, from what it believes the caches to be, and not always well. Up to
the second-level cache's size it uses the CPU's own string copy; above it plain stores, for which the CPU
reads each line of the target first; and above some part of the last level, stores that pass the caches by. On
one virtual machine that part is 240 MiB: two threads copied 13.3 GiB/s in calls of 1 to 64 MiB, 16.3 in calls
of 512 KiB, 19.5 in calls of 1 GiB. Elsewhere a long call may be the fastest. So both are tried (`copy`).
"""

from __future__ import annotations

import ctypes
import itertools
import time

SHORT_NBYTES = 512 << 10
"""Within any server core's second-level cache, and 60 µs of copying, beside which a call costs nothing."""

HELD_NBYTES = 64 << 10
"""Up to here a copy takes a few microseconds, less than giving Python's lock away and taking it back."""

WORTH_IT_NBYTES = 4 << 20
"""Shorter copies are made in one way, and not timed."""

_TRIALS = 8
"""Copies that are timed before it is settled, half of them in each way."""

_memmove = ctypes.PyDLL(None).memmove  # unlike ctypes.memmove, it keeps the lock
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


def move(to: int, source: int, nbytes: int) -> None:
    """Copy bytes from the address `source` to `to`.

    Other Python threads go on during a long copy only. With two threads that copy 15 KiB at a time and give
    the lock away for each, the lock's way from core to core took four times as long as the copies.
    """
    if nbytes <= HELD_NBYTES:
        _memmove(to, source, nbytes)
    else:
        ctypes.memmove(to, source, nbytes)


class Copier:
    """Copies memory in short calls or in one, whichever turned out faster. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # Seconds a byte, the best of each way: others may have had to share their core.
        self._best = {True: float("inf"), False: float("inf")}
        self._short: bool | None = None

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from the address `source` to `to`; the two do not overlap."""
        if nbytes < WORTH_IT_NBYTES or self._short is not None:
            _copy(to, source, nbytes, self._short is not False)
            return
        number = next(self._numbers)
        short = number % 2 == 0
        began = time.perf_counter()
        _copy(to, source, nbytes, short)
        self._best[short] = min(self._best[short], (time.perf_counter() - began) / nbytes)
        if number >= _TRIALS - 1:
            self._short = self._best[True] <= self._best[False]


def _copy(to: int, source: int, nbytes: int, short: bool) -> None:
    if not short:
        ctypes.memmove(to, source, nbytes)
        return
    for at in range(0, nbytes, SHORT_NBYTES):
        ctypes.memmove(to + at, source + at, min(SHORT_NBYTES, nbytes - at))


copy = Copier().copy
"""The process's own: what one copy finds out, the next ones need not."""
