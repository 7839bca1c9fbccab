"""How do a raw block's bytes get from the file to their destinations and into its digest, in one pass?

Piece by piece: a piece is read, digested and copied on while it is in the core's own cache. From the page
cache, a piece that goes to one place only is read there straight, and only small or shared ones go through
the buffer. From the disk, all go through the buffer, whose huge pages the device likes better than whatever
pages the destination has. So bytes arrive before the block's digest is known: the caller compares it, and
says so if they were damaged.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from ckptengine.format.digest import PIECE_NBYTES, Hasher
from ckptengine.read.plan import Copy
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.storage.store import BlockReader, ReadSource

READ_NBYTES = 8 << 20
"""One read from the disk, and a thread's buffer. Smaller ones are as fast on a local disk, not on a striped
file system."""

STRAIGHT_NBYTES = 64 << 10
"""Shorter runs go through the buffer: a system call for each would cost more than copying them."""

_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_at.restype = ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE


def buffer_nbytes(block_nbytes: int) -> int:
    """How large a buffer `deliver` needs for blocks of up to `block_nbytes`."""
    return min(block_nbytes, READ_NBYTES)


def deliver(
    file: BlockReader,
    offset: int,
    nbytes: int,
    copies: Sequence[Copy],
    buffer: AlignedBuffer,
    *,
    verify: bool = True,
    keep: bool = False,
) -> tuple[bytes | None, ReadSource]:
    """Reads the block of `nbytes` bytes at `offset` of the file and makes its copies, which are ordered by
    `at`. Returns its digest (None without `verify`) and where it came from.

    keep: there are no copies, and the whole block is to be in `buffer`, which has room for it; else one of
    `buffer_nbytes` suffices.
    Whatever is raised, and if the digest is wrong, parts of the destinations may have been written.
    """
    source = file.source(offset, nbytes)
    hasher = Hasher() if verify else None
    if source == "direct":
        give = _Giver(copies)
        for start in range(0, nbytes, READ_NBYTES):
            place = start if keep else 0
            data = buffer.view[place : place + min(READ_NBYTES, nbytes - start)]
            source = file.pread_into(offset + start, data, source)
            for at in range(0, len(data), PIECE_NBYTES):
                piece = data[at : at + PIECE_NBYTES]
                if hasher is not None:
                    hasher.update(piece)
                give(start + at, start + at + len(piece), buffer.address + place + at)
        return hasher and hasher.digest(), source
    # Through a cold page cache, longer reads: each starts the next ones' readahead.
    step = PIECE_NBYTES if source == "cache" and verify else READ_NBYTES
    for run in _runs(copies, nbytes):
        give = _Giver(run.copies)
        for start in range(run.start, run.stop, step):
            stop = min(start + step, run.stop)
            if run.address is None:
                place = start if keep else 0
                data = buffer.view[place : place + stop - start]
            else:
                data = _memory_at(run.address + start - run.start, stop - start, _WRITABLE)
            file.pread_into(offset + start, data, source)
            if hasher is not None:
                hasher.update(data)
            if run.address is None:
                give(start, stop, buffer.address + place)
    return hasher and hasher.digest(), source


class _Run:
    """Bytes [start, stop) of a block: to be read to `address`, or into a buffer for `copies` to be made."""

    __slots__ = ("address", "copies", "start", "stop")

    def __init__(self, start: int, stop: int, address: int | None, copies: Sequence[Copy] = ()) -> None:
        self.start = start
        self.stop = stop
        self.address = address
        self.copies = copies


def _runs(copies: Sequence[Copy], nbytes: int) -> Iterator[_Run]:
    """Cuts a block into long runs that one copy alone wants, and what lies between them."""
    at = 0
    between: list[Copy] = []
    end_before = 0
    for i, copy in enumerate(copies):
        end = copy.at + copy.nbytes
        alone = end_before <= copy.at and (i + 1 == len(copies) or copies[i + 1].at >= end)
        end_before = max(end_before, end)
        if copy.nbytes < STRAIGHT_NBYTES or not alone:
            between.append(copy)
            continue
        if at < copy.at:
            yield _Run(at, copy.at, None, between)
            between = []
        yield _Run(copy.at, end, copy.address)
        at = end
    if at < nbytes:
        yield _Run(at, nbytes, None, between)


class _Giver:
    """Makes copies from a block that comes in pieces, in order."""

    __slots__ = ("_copies", "_next", "_open")

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._next = 0
        # Begun, and not at their end yet.
        self._open: list[Copy] = []

    def __call__(self, start: int, stop: int, address: int) -> None:
        """Bytes [start, stop) of the block are at `address`."""
        copies, i = self._copies, self._next
        while i < len(copies) and copies[i].at < stop:
            i += 1
        wanted = [*self._open, *copies[self._next : i]]
        self._next = i
        self._open = []
        for copy in wanted:
            at, nbytes, to = copy
            end = at + nbytes
            if end > stop:
                self._open.append(copy)
                end = stop
            first = at if at > start else start
            ctypes.memmove(to + first - at, address + first - start, end - first)
