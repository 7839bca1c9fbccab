"""How is one block compressed? As one zstd frame, with one context per thread.

A context may not be shared between threads, and making one costs as much as compressing a small block.
"""

from __future__ import annotations

import ctypes
import threading

import zstandard


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress(block: bytes | bytearray | memoryview, level: int) -> bytes | None:
    """The block as one zstd frame; None if that is not smaller, and the block should be stored as it is."""
    compressor = _contexts.compressors.get(level)
    if compressor is None:
        compressor = _contexts.compressors[level] = zstandard.ZstdCompressor(level=level)
    frame = compressor.compress(block)
    return frame if len(frame) < len(block) else None


def decompress_into(stored: bytes | bytearray | memoryview, out: memoryview) -> None:
    """Fill `out` with the block that `stored` is the frame of: no byte more, none less, else `ValueError`."""
    try:
        # The size a damaged or hostile frame claims is compared before it is allocated.
        size = zstandard.get_frame_parameters(stored).content_size
        if size != out.nbytes:
            raise ValueError(f"a frame of {size} bytes where {out.nbytes} belong")
        block = _contexts.decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"damaged frame: {error}") from error
    if len(block) != out.nbytes:
        raise ValueError(f"a frame of {len(block)} bytes where {out.nbytes} belong")
    # Unlike a slice assignment, a call through ctypes lets other threads run meanwhile.
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(out)), block, len(block))
