"""How does a raw block get from the arena to the file and into its digest, in one pass?

Past the page cache, straight from an arena in huge pages. Pages of 4 KiB lie anywhere, and some devices take
a transfer apart by physically contiguous segments (`AlignedBuffer` has figures): from those it goes through a
buffer. What is copied, into the buffer or into the page cache, is copied piece by piece while a piece is in
the core's cache for its digest.
"""

from __future__ import annotations

import ctypes

from ckptengine.format.digest import PIECE_NBYTES, Hasher
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.storage.linux import address_of
from ckptengine.storage.store import BlockWriter
from ckptengine.tracing import recorder

WRITE_NBYTES = 8 << 20
"""One write, and a thread's buffer."""


def buffer_nbytes(block_nbytes: int) -> int:
    """How large a buffer `write` needs for blocks of up to `block_nbytes`."""
    return min(block_nbytes, WRITE_NBYTES)


def write(writer: BlockWriter, offset: int, block: memoryview, buffer: AlignedBuffer | None) -> bytes:
    """Writes `block`, bytes in pages of their own, at `offset` of the file; returns its digest.

    buffer: None where the block itself is in huge pages.
    """
    hasher = Hasher()
    trace = recorder.current
    if buffer is None or not writer.direct:
        step = WRITE_NBYTES if writer.direct else PIECE_NBYTES
        for start in range(0, len(block), step):
            piece = block[start : start + step]
            began = recorder.clock()
            hasher.update(piece)
            if trace is not None:
                trace.add("digest", "cpu", began, recorder.clock(), {"bytes": len(piece)})
            writer.pwrite(offset + start, piece)
        return hasher.digest()
    address = address_of(block)
    for start in range(0, len(block), WRITE_NBYTES):
        stop = min(start + WRITE_NBYTES, len(block))
        began = recorder.clock()
        for at in range(start, stop, PIECE_NBYTES):
            piece = block[at : min(at + PIECE_NBYTES, stop)]
            hasher.update(piece)
            ctypes.memmove(buffer.address + at - start, address + at, len(piece))
        if trace is not None:
            trace.add("digest and copy", "cpu", began, recorder.clock(), {"bytes": stop - start})
        writer.pwrite(offset + start, buffer.view[: stop - start])
    return hasher.digest()
