"""How do a raw block's bytes get from the file to their destinations and into its digest, in one pass?

Piece by piece: a piece is read, digested and copied on while it is in the core's own cache. From the page
cache, what goes to one place only is read there straight, with one system call for many places, and only tiny
or shared parts go through the buffer. From the disk, all go through the buffer, whose huge pages the device
likes better than whatever pages the destination has. So bytes arrive before the block's digest is known: the
caller compares it, and says so if they were damaged.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ckptengine.format.digest import PIECE_NBYTES, Hasher
from ckptengine.read.plan import Copy
from ckptengine.read.spent import Spent
from ckptengine.storage.direct import Memory
from ckptengine.storage.memcopy import move
from ckptengine.storage.store import BlockReader, ReadSource
from ckptengine.tracing import recorder

READ_NBYTES = 8 << 20
"""One read from the disk, and a thread's buffer. Smaller ones are as fast on a local disk, not on a striped
file system."""

STRAIGHT_NBYTES = 2 << 10
"""Shorter runs go through the buffer: to make each known to the system call and to the digest would cost more
than copying it."""

MAX_PIECES = 1024
"""Of memory that one system call fills (IOV_MAX)."""

_memory_at = ctypes.PyDLL(None).PyMemoryView_FromMemory
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_at.restype = ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE

_FIRST = 1  # NULL is no memory
_memory = _memory_at(_FIRST, sys.maxsize - _FIRST, _WRITABLE)
"""All there can be. Nothing of it is touched but slices, which are the destinations: each small tensor has
one, and to make it takes a quarter of the time of a call through ctypes."""


def buffer_nbytes(block_nbytes: int) -> int:
    """How large a buffer `deliver` needs for blocks of up to `block_nbytes`."""
    return min(block_nbytes, READ_NBYTES)


def deliver(
    file: BlockReader,
    offset: int,
    nbytes: int,
    copies: Sequence[Copy],
    buffer: Memory,
    *,
    verify: bool = True,
    keep: bool = False,
    spent: Spent | None = None,
) -> tuple[bytes | None, ReadSource]:
    """Reads the block of `nbytes` bytes at `offset` of the file and makes its copies, which are ordered by
    `at`. Returns its digest (None without `verify`) and where it came from.

    keep: there are no copies, and the whole block is to be in `buffer`, which has room for it; else one of
    `buffer_nbytes` suffices.
    spent: the calling thread's, to which the times are added.
    Whatever is raised, and if the digest is wrong, parts of the destinations may have been written.
    """
    source = file.source(offset, nbytes)
    hasher = Hasher() if verify else None
    spent = spent if spent is not None else Spent()
    clock = time.monotonic_ns
    trace = recorder.current
    if source == "direct":
        give = _Giver(copies)
        for start in range(0, nbytes, READ_NBYTES):
            place = start if keep else 0
            data = buffer.view[place : place + min(READ_NBYTES, nbytes - start)]
            began = clock()
            source = file.pread_into(offset + start, data, source)
            at_hand = clock()
            spent.read_ns += at_hand - began
            begun = at_hand
            for at in range(0, len(data), PIECE_NBYTES):
                piece = data[at : at + PIECE_NBYTES]
                if hasher is not None:
                    hasher.update(piece)
                digested = clock()
                spent.scattered_nbytes += give(
                    start + at, start + at + len(piece), buffer.address + place + at
                )
                spent.verify_ns += digested - at_hand
                at_hand = clock()
                spent.scatter_ns += at_hand - digested
            if trace is not None:
                # They take turns, piece by piece.
                trace.add(_name(verify, bool(copies)), "cpu", begun, at_hand, {"bytes": len(data)})
        return hasher and hasher.digest(), source
    # Through a cold page cache, longer reads: each starts the next ones' readahead.
    step = PIECE_NBYTES if source == "cache" and verify else READ_NBYTES
    for pieces in _batches(copies, nbytes, step):
        first = pieces[0][0]
        origin = 0 if keep else -first  # the buffer's place for the block's first byte
        views = [
            buffer.view[start + origin : stop + origin]
            if address is None
            else _memory[address - _FIRST : address - _FIRST + stop - start]
            for start, stop, address, _ in pieces
        ]
        began = clock()
        file.preadv_into(offset + first, views, source)
        at_hand = clock()
        if hasher is not None:
            for view in views:
                hasher.update(view)
        digested = clock()
        for start, stop, _, giver in pieces:
            if giver is not None:
                spent.scattered_nbytes += giver(start, stop, buffer.address + start + origin)
        ended = clock()
        spent.read_ns += at_hand - began
        spent.verify_ns += digested - at_hand
        spent.scatter_ns += ended - digested
        if trace is not None:
            if verify:
                trace.add("digest", "cpu", at_hand, digested, {"bytes": pieces[-1][1] - first})
            if any(giver is not None for *_, giver in pieces):
                trace.add("copy", "cpu", digested, ended)
    return hasher and hasher.digest(), source


def _name(verify: bool, copied: bool) -> str:
    return "digest and copy" if verify and copied else "digest" if verify else "copy"


_Piece: TypeAlias = "tuple[int, int, int | None, _Giver | None]"
"""Bytes [start, stop) of a block: to be read to an address, or into the buffer and from there given on."""


def _batches(copies: Sequence[Copy], nbytes: int, step: int) -> Iterator[list[_Piece]]:
    """Cuts a block into pieces, and these into what is to be read at once: up to `step` bytes."""
    pieces: list[_Piece] = []
    room = step
    for piece in _runs(copies, nbytes):
        while (length := piece[1] - piece[0]) > room:
            start, stop, address, give = piece
            cut = start + room
            pieces.append((start, cut, address, give))
            piece = (cut, stop, None if address is None else address + room, give)
            yield pieces
            pieces, room = [], step
        pieces.append(piece)
        room -= length
        if not room or len(pieces) == MAX_PIECES:
            yield pieces
            pieces, room = [], step
    if pieces:
        yield pieces


def _runs(copies: Sequence[Copy], nbytes: int) -> Iterator[_Piece]:
    """Cuts a block into runs that one copy alone wants, and what lies between them."""
    at = 0
    between: list[Copy] = []
    end_before = 0
    last = len(copies) - 1
    for i, copy in enumerate(copies):
        begin, length, address = copy
        end = begin + length
        alone = end_before <= begin and (i == last or copies[i + 1].at >= end)
        if end > end_before:
            end_before = end
        if length < STRAIGHT_NBYTES or not alone:
            between.append(copy)
            continue
        if at < begin:
            yield at, begin, None, _Giver(between)
            between = []
        yield begin, end, address, None
        at = end
    if at < nbytes:
        yield at, nbytes, None, _Giver(between)


class _Giver:
    """Makes copies from a block that comes in pieces, in order."""

    __slots__ = ("_copies", "_next", "_open")

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._next = 0
        # Begun, and not at their end yet.
        self._open: list[Copy] = []

    def __call__(self, start: int, stop: int, address: int) -> int:
        """Bytes [start, stop) of the block are at `address`. Returns how many bytes were copied."""
        copies, i = self._copies, self._next
        while i < len(copies) and copies[i].at < stop:
            i += 1
        wanted = [*self._open, *copies[self._next : i]]
        self._next = i
        self._open = []
        copied = 0
        for copy in wanted:
            at, nbytes, to = copy
            end = at + nbytes
            if end > stop:
                self._open.append(copy)
                end = stop
            first = at if at > start else start
            copied += end - first
            move(to + first - at, address + first - start, end - first)
        return copied
