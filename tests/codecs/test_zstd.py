"""Does a compressed block come back exactly, or not at all?"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.codecs import zstd
from tests.format.strategies import usual

BLOCK = bytes(range(256)) * 64


decompress = zstd.decompress


def compress(block: Any, level: int | None, piece: int = 1 << 20) -> bytes | None:
    pieces = [memoryview(block)[at : at + piece] for at in range(0, len(block), piece)]
    out = memoryview(bytearray(len(block)))
    nbytes = zstd.compress_into(out, pieces, len(block), level)
    return None if nbytes is None else bytes(out[:nbytes])


@usual
@given(st.binary(max_size=2000).map(lambda data: data * 7), st.sampled_from([-5, 1, 3, None]))
def test_block_comes_back_or_is_kept_as_it_is(block: bytes, level: int | None) -> None:
    frame = compress(block, level)
    if frame is not None:
        assert len(frame) < len(block)
        assert decompress(frame, len(block)) == block


def test_block_that_does_not_shrink_is_kept_as_it_is() -> None:
    assert compress(b"\x00\x9f\x31\x77", 1) is None
    assert compress(b"", 1) is None


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_taken(kind: type) -> None:
    frame = compress(kind(BLOCK), 1)
    assert frame is not None
    assert decompress(kind(frame), len(BLOCK)) == BLOCK


@pytest.mark.parametrize("piece", [1, 7, 1 << 14])
def test_pieces_make_one_frame(piece: int) -> None:
    frame = compress(BLOCK, 1, piece)
    assert frame is not None
    assert decompress(frame, len(BLOCK)) == BLOCK


def test_a_frame_that_does_not_fit_is_given_up_and_the_next_is_whole() -> None:
    noise = random.Random(0).randbytes(3 << 20)
    out = bytearray(b"x" * (2 << 20) + b"y" * 10)
    assert zstd.compress_into(memoryview(out)[: 2 << 20], [noise], len(noise), 1) is None
    assert out[2 << 20 :] == b"y" * 10
    frame = compress(BLOCK, 1)
    assert frame is not None
    assert decompress(frame, len(BLOCK)) == BLOCK


@pytest.mark.parametrize("more", [-1, 1])
def test_a_length_that_the_pieces_do_not_have_is_an_error(more: int) -> None:
    with pytest.raises(zstandard.ZstdError):
        zstd.compress_into(memoryview(bytearray(len(BLOCK))), [BLOCK], len(BLOCK) + more, 1)


def test_only_the_start_of_a_buffer_is_written() -> None:
    out = bytearray(b"x" * (len(BLOCK) + 20))
    zstd.copy(BLOCK, memoryview(out)[10:])
    assert out == b"x" * 10 + BLOCK + b"x" * 10
    with pytest.raises(ValueError, match="do not fit"):
        zstd.copy(BLOCK, memoryview(out)[21:])
    assert out == b"x" * 10 + BLOCK + b"x" * 10


def test_every_cut_is_detected() -> None:
    frame = compress(BLOCK, 1)
    assert frame is not None
    for at in range(len(frame)):
        with pytest.raises(ValueError):
            decompress(frame[:at], len(BLOCK))


def test_flips_give_as_many_bytes_or_an_error() -> None:
    """The frame has no checksum of its own: the block's digest is over what comes out."""
    frame = compress(BLOCK, 1)
    assert frame is not None
    for at in range(len(frame)):
        for mask in (0x01, 0x40, 0xFF):
            damaged = bytearray(frame)
            damaged[at] ^= mask
            try:
                assert len(decompress(bytes(damaged), len(BLOCK))) == len(BLOCK)
            except ValueError:
                pass


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\0" * 64,
        zstandard.compress(BLOCK) + b"\0",
        zstandard.compress(BLOCK) * 2,
        zstandard.compress(BLOCK + b"x"),
        zstandard.compress(BLOCK[:-1]),
        zstandard.ZstdCompressor(write_content_size=False).compress(BLOCK),
        b"\x28\xb5\x2f\xfd\xe0" + (1 << 60).to_bytes(8, "little") + b"\x01\x00\x00",
        b"\x28\xb5\x2f\xfd\xe0" + len(BLOCK).to_bytes(8, "little") + b"\x01\x00\x00",
    ],
    ids=[
        "nothing",
        "zeros",
        "byte after",
        "two frames",
        "larger",
        "smaller",
        "no size",
        "huge claim",
        "false claim",
    ],
)
def test_anything_but_one_frame_of_the_block_is_refused(stored: bytes) -> None:
    with pytest.raises(ValueError):
        decompress(stored, len(BLOCK))


def test_threads_have_contexts_of_their_own() -> None:
    blocks = [bytes([i]) * 50_000 + BLOCK for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        frames = list(pool.map(lambda block: compress(block, 1), blocks))
        out = list(pool.map(lambda frame: decompress(frame or b"", len(blocks[0])), frames))
    assert out == blocks
