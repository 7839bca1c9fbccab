"""Does every block come back from every method, and does nothing else pass for one?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.codecs.block import pack_into, unpack_into
from ckptengine.format.blocks import AS_IT_IS, METHODS, PLANES, ZSTD
from tests.format.strategies import usual

COMPRESSING = [ZSTD, *PLANES.values()]


def packed(block: bytes, method: str, level: int = 1) -> bytes | None:
    out = bytearray(len(block) + 8)
    nbytes = pack_into(memoryview(out), memoryview(block), method, level)
    return None if nbytes is None else bytes(out[:nbytes])


def unpacked(stored: bytes, method: str, nbytes: int) -> bytes:
    out = bytearray(nbytes + 1)
    unpack_into(memoryview(stored), method, memoryview(out)[:-1])
    assert out[-1] == 0
    return bytes(out[:-1])


def weights(nbytes: int) -> bytes:
    """bfloat16 weights, as numpy has them: the upper halves of float32."""
    values = np.random.default_rng(1).standard_normal(nbytes // 2, dtype=np.float32) * np.float32(0.02)
    return values.view(np.uint16)[1::2].tobytes()


@usual
@given(
    st.binary(max_size=600).map(lambda data: data * 8),
    st.sampled_from(COMPRESSING),
    st.sampled_from([-5, 0, 1, 3]),
)
def test_block_comes_back_or_is_kept_as_it_is(block: bytes, method: str, level: int) -> None:
    frame = packed(block, method, level)
    if frame is not None:
        assert len(frame) < len(block)
        assert unpacked(frame, method, len(block)) == block


def test_as_it_is_packs_nothing() -> None:
    assert packed(bytes(4096), AS_IT_IS) is None


def test_planes_of_weights_leave_less_than_weights_as_they_lie() -> None:
    block = weights(1 << 20)
    whole, cut, wrong = (packed(block, method) for method in (ZSTD, PLANES[2], PLANES[8]))
    assert whole is not None
    assert cut is not None
    assert wrong is not None
    assert len(cut) < 0.9 * len(whole)
    assert len(cut) < len(wrong)


def test_another_method_gives_another_block_or_an_error() -> None:
    """What a damaged method would do, if the header's digest did not find it first."""
    block = weights(4096)
    for method in COMPRESSING:
        frame = packed(block, method)
        assert frame is not None
        for other in METHODS - {AS_IT_IS, method}:
            assert unpacked(frame, other, len(block)) != block


@pytest.mark.parametrize("method", COMPRESSING)
def test_damage_gives_another_block_or_an_error(method: str) -> None:
    block = weights(4096)
    frame = packed(block, method)
    assert frame is not None
    for cut in range(0, len(frame), 7):
        with pytest.raises(ValueError):
            unpacked(frame[:cut], method, len(block))
    for stored in (frame + b"\0", frame * 2):
        with pytest.raises(ValueError):
            unpacked(stored, method, len(block))
    with pytest.raises(ValueError):
        unpacked(frame, method, len(block) + 8)


def test_threads_do_not_meet() -> None:
    blocks = [weights(1 << 16)[i:] + bytes(i) for i in range(0, 64, 8)] * 4
    with ThreadPoolExecutor(8) as pool:
        frames = list(pool.map(lambda block: packed(block, PLANES[2]), blocks))
        out = list(pool.map(lambda frame: unpacked(frame or b"", PLANES[2], 1 << 16), frames))
    assert out == blocks
