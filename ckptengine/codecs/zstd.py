"""How is one block compressed? As one zstd frame, with one context per thread.

A context may not be shared between threads, and making one costs as much as compressing a small block.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator

import zstandard

Buffer = bytes | bytearray | memoryview

_CHUNK_NBYTES = 64 << 10
"""Of what is compressed at once. From twice as much on, the C library maps new pages for each."""


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.compressors: dict[int | None, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress_into(out: memoryview, pieces: Iterable[Buffer], nbytes: int, level: int | None) -> int | None:
    """Put the `nbytes` bytes that the pieces are together into `out`, as one zstd frame, and return its
    length; None if it would not be smaller, or does not fit: the block should be stored as it is.

    Beyond `out`, it takes what zstd's window does and little more, whatever the block's size.

    `level` None is for byte planes. They repeat no strings, only the frequencies of bytes: matches that a
    search finds there are short, and cost more than they save. Level 1 with a table too small to find any but
    long runs is twice as fast as plain level 1, and compresses better than level 3, on weights and on Adam's
    moments alike (docs/design/performance.md).
    """
    compressor = _contexts.compressors.get(level)
    if compressor is None:
        compressor = _contexts.compressors[level] = _compressor(level)
    room = min(len(out), nbytes - 1)
    filled = 0
    for chunk in _chunks(compressor, pieces, nbytes):
        if filled + len(chunk) > room:
            return None
        copy(chunk, out[filled:])
        filled += len(chunk)
    return filled


def _chunks(compressor: zstandard.ZstdCompressor, pieces: Iterable[Buffer], nbytes: int) -> Iterator[bytes]:
    chunker = compressor.chunker(size=nbytes, chunk_size=_CHUNK_NBYTES)
    for piece in pieces:
        yield from chunker.compress(piece)
    yield from chunker.finish()  # type: ignore[no-untyped-call]


def decompress(stored: Buffer, nbytes: int) -> bytes:
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


def context_nbytes(level: int, nbytes: int) -> int:
    """What a thread's context for that level takes, for blocks of `nbytes` bytes."""
    parameters = zstandard.ZstdCompressionParameters.from_level(level, source_size=nbytes)
    return parameters.estimated_compression_context_size()


def _compressor(level: int | None) -> zstandard.ZstdCompressor:
    if level is not None:
        return zstandard.ZstdCompressor(level=level)
    parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=8)
    return zstandard.ZstdCompressor(compression_params=parameters)
