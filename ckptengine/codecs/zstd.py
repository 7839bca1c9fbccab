"""How is one block compressed? As one zstd frame, with one context per thread.

A context may not be shared between threads, and making one costs as much as compressing a small block.
"""

from __future__ import annotations

import ctypes
import threading

import zstandard


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.compressors: dict[int | None, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress(block: bytes | bytearray | memoryview, level: int | None) -> bytes | None:
    """The block as one zstd frame; None if that is not smaller, and the block should be stored as it is.

    `level` None is for byte planes. They repeat no strings, only the frequencies of bytes: matches that a
    search finds there are short, and cost more than they save. Level 1 with a table too small to find any but
    long runs is twice as fast as plain level 1, and compresses better than level 3, on weights and on Adam's
    moments alike (docs/design/performance.md).
    """
    compressor = _contexts.compressors.get(level)
    if compressor is None:
        compressor = _contexts.compressors[level] = _compressor(level)
    frame = compressor.compress(block)
    return frame if len(frame) < len(block) else None


def decompress(stored: bytes | bytearray | memoryview, nbytes: int) -> bytes:
    """The `nbytes` bytes that `stored` is the frame of: no byte more, none less, else `ValueError`."""
    try:
        # The size a damaged or hostile frame claims is compared before it is allocated.
        size = zstandard.get_frame_parameters(stored).content_size
        if size != nbytes:
            raise ValueError(f"a frame of {size} bytes where {nbytes} belong")
        block = _contexts.decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"damaged frame: {error}") from error
    if len(block) != nbytes:
        raise ValueError(f"a frame of {len(block)} bytes where {nbytes} belong")
    return block


def copy(source: bytes, out: memoryview) -> None:
    """Into the start of `out`. Unlike a slice assignment, a call through ctypes lets other threads run
    meanwhile."""
    if len(source) > out.nbytes:
        raise ValueError(f"{len(source)} bytes do not fit in {out.nbytes}")
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(out)), source, len(source))


def _compressor(level: int | None) -> zstandard.ZstdCompressor:
    if level is not None:
        return zstandard.ZstdCompressor(level=level)
    parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=8)
    return zstandard.ZstdCompressor(compression_params=parameters)
