"""How is memory copied fastest, by libc's `memmove` or by the compiled helper?

A long copy lets other Python threads go on; a short one had better not (`move`), or many of them go in one
call (`copy_all`).

And libc decides by the size how to copy, from what it believes the caches to be, and not always well. Up to
the second-level cache's size it uses the CPU's own string copy; above it plain stores, for which the CPU
reads each line of the target first; and above some part of the last level, stores that pass the caches by. On
one virtual machine that part is 240 MiB: two threads copied 18 GiB/s in calls of 0.5 to 64 MiB, 19.5 in calls
of 1 GiB, and 30 with the helper, which always passes the caches by. Elsewhere a long call may be the fastest.
So all are tried (`copy`).

What passes the caches by is for a target that nobody reads soon. A digest of what was just copied took, copy
included, 7 to 25 % longer after such a copy.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence

from ckptengine.storage import streaming
from ckptengine.storage.streaming import Copy, Helper
from ckptengine.storage.threads import in_threads

SHORT_NBYTES = 512 << 10
"""Within any server core's second-level cache, and 60 µs of copying, beside which a call costs nothing."""

HELD_NBYTES = 64 << 10
"""Up to here a copy takes a few microseconds, less than giving Python's lock away and taking it back."""

BATCH_NBYTES = 2 << 20
"""Of many short copies in one call: a hundred microseconds, beside which neither call nor thread shows."""

WORTH_IT_NBYTES = 4 << 20
"""Shorter copies are made in one way, and not timed."""

_TRIALS = 4
"""Copies that are timed in each way before it is settled."""

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


def copy_all(
    moves: Sequence[int],
    threads: int,
    go_on: Callable[[], None] = lambda: None,
    helper: Helper | None = streaming.helper,
) -> None:
    """Make many short copies to where nobody reads soon, side by side in up to `threads` threads.

    moves: the address to copy to, that to copy from, and a number of bytes, again and again; no copy overlaps
    another's target. `go_on` is called now and then, from any thread, and ends the copying by raising.
    Without the helper there is one thread, as only calls that keep Python's lock pay.
    """
    rows = array("Q", moves)
    ends = list(itertools.accumulate(moves[2::3]))
    borders = (bisect_right(ends, at) for at in range(0, ends[-1] if ends else 0, BATCH_NBYTES))
    batches = list(itertools.pairwise([*dict.fromkeys(borders), len(ends)]))

    def step(batch: tuple[int, int], _: None) -> None:
        go_on()
        first, last = (3 * row for row in batch)
        if helper is not None:
            helper.copy_all(rows.buffer_info()[0] + first * rows.itemsize, batch[1] - batch[0])
            return
        for at in range(first, last, 3):
            move(rows[at], rows[at + 1], rows[at + 2])

    in_threads(batches, threads if helper is not None else 1, lambda: None, step)


class Copier:
    """Copies memory to where nobody reads soon: in short calls, in one, or by the helper, whichever turned
    out the fastest. Thread-safe."""

    def __init__(self, helper: Helper | None) -> None:
        # The likeliest first, for what is copied before it is settled.
        self._ways: tuple[Copy, ...] = (_in_short_calls, _in_one_call)
        if helper is not None:
            self._ways = (helper.copy, *self._ways)
        self._numbers = itertools.count()
        # Seconds a byte, of each way.
        self._times: list[list[float]] = [[] for _ in self._ways]
        self._settled: Copy | None = None

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from the address `source` to `to`; the two do not overlap."""
        if self._settled is not None or nbytes < WORTH_IT_NBYTES:
            (self._settled or self._ways[0])(to, source, nbytes)
            return
        way = next(self._numbers) % len(self._ways)
        began = time.perf_counter()
        self._ways[way](to, source, nbytes)
        self._times[way].append((time.perf_counter() - began) / nbytes)
        if min(map(len, self._times)) >= _TRIALS:
            # The second best of each: whoever had to share the core was slower for it, and one that found its
            # source in a cache was faster.
            seconds = [sorted(times)[1] for times in self._times]
            self._settled = self._ways[seconds.index(min(seconds))]


def _in_one_call(to: int, source: int, nbytes: int) -> None:
    ctypes.memmove(to, source, nbytes)


def _in_short_calls(to: int, source: int, nbytes: int) -> None:
    for at in range(0, nbytes, SHORT_NBYTES):
        ctypes.memmove(to + at, source + at, min(SHORT_NBYTES, nbytes - at))


copy = Copier(streaming.helper).copy
"""The process's own: what one copy finds out, the next ones need not."""
