"""Do the planned copies move exactly the shared elements, in as few pieces as there can be?"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.format.geometry import Box, Chunk, byte_runs, c_strides, check_shape, copy_runs, intersect
from tests.format.strategies import chunks_of, flat_chunks_of, usual

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
ITEMSIZE = 4


def elements(chunk: Chunk) -> np.ndarray:
    """The chunk's elements in its own order, each the flat index it has in the whole tensor."""
    whole = np.arange(prod(chunk.tensor_shape), dtype=np.int32)
    if chunk.flat_of is None:
        whole = whole.reshape(chunk.global_shape)
    window = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.shape, strict=True))
    return np.ascontiguousarray(whole[window]).reshape(-1)


def are_fewest(runs: Iterable[tuple[int, ...]]) -> bool:
    """Does no run continue the one before it on all sides?"""
    runs = list(runs)
    return not any(
        all(a + before[-1] == b for a, b in zip(before[:-1], after[:-1], strict=True))
        for before, after in pairwise(runs)
    )


def any_chunk_of(shape: tuple[int, ...]) -> st.SearchStrategy[Chunk]:
    return chunks_of(shape) | flat_chunks_of(shape)


@usual
@given(shapes.flatmap(lambda shape: st.tuples(any_chunk_of(shape), any_chunk_of(shape))))
def test_copies_move_exactly_the_shared_elements(pair: tuple[Chunk, Chunk]) -> None:
    src, dst = pair
    src.validate()
    dst.validate()
    have, want = elements(src), elements(dst)
    got = np.full_like(want, -1)
    box = intersect(src, dst)
    runs = list(copy_runs(box, src, dst, ITEMSIZE)) if box else []
    for src_start, dst_start, nbytes in runs:
        assert nbytes > 0
        got.view(np.uint8)[dst_start : dst_start + nbytes] = have.view(np.uint8)[
            src_start : src_start + nbytes
        ]
    assert np.array_equal(got, np.where(np.isin(want, have), want, -1))
    assert sum(nbytes for *_, nbytes in runs) == np.isin(want, have).sum() * ITEMSIZE
    assert are_fewest(runs)


@usual
@given(shapes.flatmap(lambda shape: st.tuples(any_chunk_of(shape), any_chunk_of(shape))))
def test_intersection_is_symmetric_and_none_only_when_nothing_is_shared(pair: tuple[Chunk, Chunk]) -> None:
    a, b = pair
    assert intersect(a, b) == intersect(b, a)
    assert (intersect(a, b) is not None) == bool(np.isin(elements(a), elements(b)).any())


@usual
@given(shapes.flatmap(lambda shape: st.tuples(chunks_of(shape), chunks_of(shape))))
def test_intersection_of_rectangles_is_the_slice_numpy_takes(pair: tuple[Chunk, Chunk]) -> None:
    box = intersect(*pair)
    if box is not None:
        shared = elements(Chunk(pair[0].global_shape, box.offsets, box.shape))
        assert np.array_equal(shared, np.intersect1d(elements(pair[0]), elements(pair[1])))


@usual
@given(shapes.flatmap(lambda shape: st.tuples(any_chunk_of(shape), any_chunk_of(shape))))
def test_byte_runs_cover_the_box_in_ascending_order(pair: tuple[Chunk, Chunk]) -> None:
    chunk, other = pair
    box = intersect(chunk, other)
    if box is None:
        return
    values = elements(chunk)
    runs = list(byte_runs(box, chunk, ITEMSIZE))
    found = [values[a // ITEMSIZE : (a + n) // ITEMSIZE] for a, n in runs]
    if chunk.flat_of is None:
        assert np.array_equal(np.concatenate(found), np.intersect1d(values, elements(other)))
    assert all(a + n < b for (a, n), (b, _) in pairwise(runs))


def test_what_a_rectangle_has_of_a_flat_range_is_one_run() -> None:
    column, start = Chunk((2, 2), (0, 0), (2, 1)), Chunk((4,), (0,), (3,), flat_of=(2, 2))
    box = intersect(column, start)
    assert box is not None
    assert list(byte_runs(box, column, 4)) == [(0, 8)]


def test_rows_of_a_matrix_are_one_copy() -> None:
    src = Chunk((8, 6), (0, 0), (4, 6))
    dst = Chunk((8, 6), (2, 0), (6, 6))
    box = intersect(src, dst)
    assert box == Box((2, 0), (2, 6))
    assert list(copy_runs(box, src, dst, 2)) == [(24, 0, 24)]


def test_columns_of_a_matrix_are_one_copy_per_row() -> None:
    src = Chunk((3, 6), (0, 0), (3, 6))
    dst = Chunk((3, 6), (0, 4), (3, 2))
    box = intersect(src, dst)
    assert box is not None
    assert list(copy_runs(box, src, dst, 1)) == [(4, 0, 2), (10, 2, 2), (16, 4, 2)]


def test_flat_parameter_reaches_the_columns_of_a_matrix() -> None:
    src = Chunk((12,), (2,), (8,), flat_of=(3, 4))
    dst = Chunk((3, 4), (0, 2), (3, 2))
    box = intersect(src, dst)
    assert box == Box((2,), (8,))
    assert list(copy_runs(box, src, dst, 1)) == [(0, 0, 2), (4, 2, 2)]


def test_flat_range_between_a_rectangles_rows_shares_nothing() -> None:
    assert intersect(Chunk((12,), (0,), (2,), flat_of=(3, 4)), Chunk((3, 4), (0, 2), (3, 2))) is None
    assert intersect(Chunk((12,), (4,), (2,), flat_of=(3, 4)), Chunk((3, 4), (0, 2), (3, 2))) is None


def test_distant_piece_of_a_large_rectangle_is_found_without_walking_to_it() -> None:
    rect = Chunk((1 << 40, 8), (0, 0), (1 << 40, 4))
    flat = Chunk((1 << 43,), ((1 << 43) - 16,), (16,), flat_of=(1 << 40, 8))
    box = intersect(flat, rect)
    assert box is not None
    assert [n for *_, n in copy_runs(box, flat, rect, 1)] == [4, 4]


def test_scalar_is_one_element() -> None:
    scalar = Chunk.whole(())
    box = intersect(scalar, scalar)
    assert box == Box((), ())
    assert list(copy_runs(box, scalar, scalar, 8)) == [(0, 0, 8)]
    assert list(byte_runs(box, scalar, 8)) == [(0, 8)]
    assert scalar.is_whole
    assert scalar.nelem == 1


def test_chunks_of_different_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="different tensors"):
        intersect(Chunk.whole((4, 6)), Chunk.whole((24,)))
    with pytest.raises(ValueError, match="different tensors"):
        intersect(Chunk((24,), (0,), (4,), flat_of=(4, 6)), Chunk.whole((6, 4)))


def test_box_outside_a_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="not inside"):
        list(byte_runs(Box((0, 0), (2, 2)), Chunk((4, 4), (1, 0), (3, 4)), 4))
    with pytest.raises(ValueError, match="not inside"):
        list(copy_runs(Box((0,), (9,)), Chunk.whole((9,)), Chunk((9,), (0,), (8,)), 4))


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk((4,), (0, 0), (4,)),
        Chunk((4,), (0,), (4, 1)),
        Chunk((4,), (1,), (4,)),
        Chunk((4,), (-1,), (4,)),
        Chunk((4,), (5,), (-1,)),
        Chunk((-4,), (0,), (0,)),
        Chunk((2**62, 2), (0, 0), (1, 1)),
        Chunk((0, 2**62, 2**62), (0, 0, 0), (0, 1, 1)),
        Chunk((1,) * 65, (0,) * 65, (1,) * 65),
        Chunk((12,), (0,), (4,), flat_of=(3, 5)),
        Chunk((3, 4), (0, 0), (3, 4), flat_of=(3, 4)),
    ],
)
def test_impossible_chunk_is_refused(chunk: Chunk) -> None:
    with pytest.raises(ValueError):
        chunk.validate()


def test_shape_at_the_bounds_is_accepted() -> None:
    check_shape((2**63 - 1,))
    check_shape((1,) * 64)
    check_shape((0, 2**63 - 1))
    with pytest.raises(ValueError, match="overflow"):
        check_shape((2**62, 2))


def test_strides_are_numpys() -> None:
    shape = (3, 4, 5)
    assert c_strides(shape) == tuple(s // 8 for s in np.empty(shape, "i8").strides)
    assert c_strides(()) == ()
