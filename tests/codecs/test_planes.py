"""Are a block's byte planes what the format says, and is the block put together from them the same?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.codecs import planes
from ckptengine.codecs.planes import _TILE_NBYTES
from tests.format.strategies import usual

SIZES = [2, 4, 8]


def split(block: bytes | memoryview, size: int) -> bytes:
    return b"".join(map(bytes, planes.pieces(block, size)))


def join(cut: bytes, size: int) -> bytes:
    out = bytearray(len(cut))
    planes.join(cut, size, out)
    return bytes(out)


@usual
@given(st.binary(max_size=3000), st.sampled_from(SIZES))
def test_plane_p_is_byte_p_of_each_element(data: bytes, size: int) -> None:
    block = data[: len(data) // size * size]
    cut = split(block, size)
    assert cut == b"".join(block[p::size] for p in range(size))
    assert join(cut, size) == block


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("more", [-8, 0, 8, 4096])
def test_blocks_around_a_tile_and_of_several_come_back(size: int, more: int) -> None:
    block = np.random.default_rng(size).bytes(2 * _TILE_NBYTES + more)
    cut = split(block, size)
    assert cut == b"".join(block[p::size] for p in range(size))
    assert join(cut, size) == block


@pytest.mark.parametrize("size", SIZES)
def test_memory_at_an_odd_address_is_taken(size: int) -> None:
    memory = bytearray(b"x" + bytes(range(248)) + b"x")
    cut = split(memoryview(memory)[1:-1], size)
    assert cut == b"".join(bytes(range(p, 248, size)) for p in range(size))
    out = bytearray(250)
    planes.join(memoryview(b"x" + cut + b"x")[1:-1], size, memoryview(out)[1:-1])
    assert bytes(out) == b"\0" + bytes(range(248)) + b"\0"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("nbytes", "out_nbytes"), [(16, 8), (8, 16), (9, 9), (8, 0)])
def test_lengths_that_do_not_fit_are_refused(size: int, nbytes: int, out_nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"elements of|planes of"):
        planes.join(bytes(nbytes), size, bytearray(out_nbytes))


@pytest.mark.parametrize("size", SIZES)
def test_a_block_that_is_not_whole_elements_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="9 bytes are not elements of"):
        next(planes.pieces(bytes(9), size))
