"""How does a raw block get from the arena to the file and into its digest, in one pass?

Past the page cache, through a buffer, although direct I/O can write from the arena: shared memory has 4 KiB
pages that lie anywhere, and some devices take a transfer apart by physically contiguous segments
(`AlignedBuffer` has figures). What is copied, into the buffer or into the page cache, is copied piece by
piece while a piece is in the core's cache for its digest.
"""

from __future__ import annotations

import ctypes

from ckptengine.format.digest import Hasher
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.storage.linux import address_of
from ckptengine.storage.store import BlockWriter

PIECE_NBYTES = 512 << 10
"""Half of a small core's second-level cache."""

WRITE_NBYTES = 8 << 20
"""One write, and a thread's buffer."""


def buffer_nbytes(block_nbytes: int) -> int:
    """How large a buffer `write` needs for blocks of up to `block_nbytes`."""
    return min(block_nbytes, WRITE_NBYTES)


def write(writer: BlockWriter, offset: int, block: memoryview, buffer: AlignedBuffer) -> bytes:
    """Writes `block`, bytes in pages of their own, at `offset` of the file; returns its digest."""
    hasher = Hasher()
    if not writer.direct:
        for start in range(0, len(block), PIECE_NBYTES):
            piece = block[start : start + PIECE_NBYTES]
            hasher.update(piece)
            writer.pwrite(offset + start, piece)
        return hasher.digest()
    address = address_of(block)
    for start in range(0, len(block), WRITE_NBYTES):
        stop = min(start + WRITE_NBYTES, len(block))
        for at in range(start, stop, PIECE_NBYTES):
            piece = block[at : min(at + PIECE_NBYTES, stop)]
            hasher.update(piece)
            ctypes.memmove(buffer.address + at - start, address + at, len(piece))
        writer.pwrite(offset + start, buffer.view[: stop - start])
    return hasher.digest()
