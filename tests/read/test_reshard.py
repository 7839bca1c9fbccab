"""Any stored layout into any target layout, checked element by element against the full tensor."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ckptengine.format.geometry import Chunk, c_strides
from ckptengine.format.index import ChunkRows
from ckptengine.read import reshard
from ckptengine.read.reshard import boxes_of_range, parts_of
from tests.format.strategies import usual

DTYPE, ITEMSIZE = "int64", 8
UNTOUCHED = -1


def rows_of(
    chunks: list[Chunk], *, ranks: list[int] | None = None, starts: list[int] | None = None
) -> ChunkRows:
    """Each in its rank's shard, from byte 0 on unless told otherwise."""
    first = chunks[0]
    count, ndim = len(chunks), len(first.global_shape)
    return ChunkRows(
        DTYPE,
        first.global_shape,
        first.flat_of,
        np.array(range(count) if ranks is None else ranks, np.int64),
        np.array([chunk.offsets for chunk in chunks], np.int64).reshape(count, ndim),
        np.array([chunk.shape for chunk in chunks], np.int64).reshape(count, ndim),
        np.array([0] * count if starts is None else starts, np.int64),
        np.ones(count, np.bool_),
    )


def elements(chunk: Chunk) -> np.ndarray:
    """A chunk's elements of the tensor 0, 1, 2, …"""
    whole = np.arange(prod(chunk.tensor_shape)).reshape(chunk.global_shape)
    return whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.shape, strict=True))]


def filled(rows: ChunkRows, stored: list[Chunk], target: Chunk, memory_strides: tuple[int, ...], reader: int):
    """The target's memory after all parts were copied, and how often each element was."""
    found = parts_of(rows, target, memory_strides, reader=reader)
    reach = (
        1 + sum((n - 1) * s for n, s in zip(target.shape, memory_strides, strict=True)) if target.nelem else 0
    )
    memory, times = np.full(reach, UNTOUCHED), np.zeros(reach, int)
    for part in found.parts:
        (row,) = np.flatnonzero(rows.rank == part.rank)[:1]
        shard = np.ascontiguousarray(elements(stored[row])).reshape(-1)
        at, odd = divmod(part.start - int(rows.start[row]), ITEMSIZE)
        assert not odd
        source = _strided(shard, at, part.shape, part.source)
        _strided(memory, part.offset, part.shape, part.target)[...] = source
        _strided(times, part.offset, part.shape, part.target)[...] += 1
    return (
        found,
        _strided(memory, 0, target.shape, memory_strides),
        _strided(times, 0, target.shape, memory_strides),
    )


def _strided(flat: np.ndarray, at: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    if 0 in shape:
        return np.zeros(shape, flat.dtype)
    last = at + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    assert 0 <= at <= last < len(flat), "outside the memory"
    return np.lib.stride_tricks.as_strided(flat[at:], shape, [8 * s for s in strides])


@st.composite
def spans(draw: st.DrawFn, size: int) -> tuple[int, int]:
    start = draw(st.integers(0, size))
    return start, draw(st.integers(0, size - start))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Chunk:
    pairs = [draw(spans(size)) for size in shape]
    return Chunk(shape, tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))


@st.composite
def ranges(draw: st.DrawFn, shape: tuple[int, ...]) -> Chunk:
    start, length = draw(spans(prod(shape)))
    return Chunk((prod(shape),), (start,), (length,), shape)


def cut(size: int, points: list[int]) -> list[tuple[int, int]]:
    edges = [0, *sorted(points), size]
    return [(a, b - a) for a, b in pairwise(edges)]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Chunk]:
    """Chunks that cover all: a mesh with uneven and empty shards, or flat ranges; some of them twice."""
    if draw(st.booleans()):
        numel = prod(shape)
        points = draw(st.lists(st.integers(0, numel), max_size=5))
        chunks = [Chunk((numel,), (at,), (n,), shape) for at, n in cut(numel, points)]
    else:
        chunks = [Chunk(shape, (), ())]
        for dim, size in enumerate(shape):
            points = draw(st.lists(st.integers(0, size), max_size=2 if dim < 2 else 0))
            chunks = [
                Chunk(shape, (*c.offsets, at), (*c.shape, n)) for c in chunks for at, n in cut(size, points)
            ]
    again = draw(st.lists(st.sampled_from(chunks), max_size=3))
    return draw(st.permutations([*chunks, *again]))


@st.composite
def memory_strides(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a dense tensor in any order of its dimensions, or of a part of a larger one."""
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), draw(st.integers(1, 2))
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1) + draw(st.integers(0, 1))
    return tuple(strides)


shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple) | st.sampled_from([(0, 3), (40,), (1, 7), (6, 1)])


@usual
@given(st.data())
def test_a_target_gets_each_of_its_elements_once(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    stored = data.draw(layouts(shape))
    target = data.draw(boxes(shape) | ranges(shape) | st.just(Chunk.whole(shape)))
    strides = data.draw(memory_strides(target.shape))
    few, reshard.FEW = reshard.FEW, data.draw(st.sampled_from([0, 2, 16]))
    try:
        found, memory, times = filled(rows_of(stored), stored, target, strides, data.draw(st.integers(0, 5)))
    finally:
        reshard.FEW = few
    assert found.gap is None
    assert np.array_equal(memory, elements(target))
    assert (times == 1).all()


@usual
@given(st.data())
def test_chunks_that_overlap_are_each_read_where_no_other_is(data: st.DataObject) -> None:
    """Also where they are not equal, and where together they do not make up the tensor."""
    shape = data.draw(shapes)
    kind = data.draw(st.sampled_from([boxes, ranges]))
    stored = data.draw(st.lists(kind(shape), min_size=1, max_size=6))
    target = data.draw(boxes(shape) | ranges(shape))
    held = np.zeros(prod(shape), bool)
    for chunk in stored:
        held[elements(chunk).reshape(-1)] = True
    wanted = elements(target).reshape(-1)
    few, reshard.FEW = reshard.FEW, data.draw(st.sampled_from([0, 16]))
    try:
        strides = c_strides(target.shape)
        found, memory, times = filled(rows_of(stored), stored, target, strides, 0)
    finally:
        reshard.FEW = few
    assert (found.gap is None) == bool(held[wanted].all())
    if found.gap is None:
        assert np.array_equal(memory, elements(target))
        assert (times == 1).all()
        return
    missing = np.arange(prod(shape)).reshape((-1,) if found.flat else shape)
    missing = missing[tuple(slice(lo, hi) for lo, hi in found.gap)].reshape(-1)
    assert missing.size
    assert not held[missing].any()
    assert np.isin(missing, wanted).all()


@usual
@given(st.data())
def test_a_range_is_made_of_few_boxes(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    lo, length = data.draw(spans(prod(shape)))
    whole = np.arange(prod(shape)).reshape(shape)
    found = list(boxes_of_range(lo, lo + length, shape))
    inside = [whole[tuple(slice(a, b) for a, b in box)].reshape(-1) for box in found]
    assert np.array_equal(np.concatenate([*inside, []]), np.arange(lo, lo + length))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@usual
@given(st.data())
@example(data=None)
def test_a_stored_chunk_may_lie_in_any_order(data: st.DataObject | None) -> None:
    """A view that is not in C order in its shard."""
    shape = (4, 6) if data is None else data.draw(shapes)
    assume(prod(shape))
    strides = (1, 4) if data is None else data.draw(memory_strides(shape))
    target = Chunk(shape, (1, 2), (3, 2)) if data is None else data.draw(boxes(shape))
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    shard = np.full(reach, UNTOUCHED)
    _strided(shard, 0, shape, strides)[...] = elements(Chunk.whole(shape))
    plain = rows_of([Chunk.whole(shape)], starts=[80])
    rows = ChunkRows(*(getattr(plain, name) for name in plain.__slots__[:-1]), {0: strides})
    got = np.full(target.shape, UNTOUCHED).reshape(-1)
    for part in parts_of(rows, target).parts:
        source = _strided(shard, (part.start - 80) // ITEMSIZE, part.shape, part.source)
        _strided(got, part.offset, part.shape, part.target)[...] = source
    assert np.array_equal(got.reshape(target.shape), elements(target))


def test_what_lies_together_is_one_run() -> None:
    stored = rows_of([Chunk((8, 3, 5), (4 * i, 0, 0), (4, 3, 5)) for i in range(2)])
    (first, second) = parts_of(stored, Chunk((8, 3, 5), (2, 0, 0), (4, 3, 5))).parts
    assert (first.rank, first.start, first.shape, first.source, first.target) == (0, 240, (30,), (1,), (1,))
    assert (second.rank, second.start, second.offset, second.shape) == (1, 0, 30, (30,))


def test_rows_of_columns_are_one_part() -> None:
    """Thousands of short runs cost no more than a few."""
    stored = rows_of([Chunk((4000, 8), (0, 4 * i), (4000, 4)) for i in range(2)])
    parts = parts_of(stored, Chunk((4000, 8), (1000, 0), (1000, 8))).parts
    assert [(part.rank, part.shape, part.source, part.target) for part in parts] == [
        (0, (1000, 4), (4, 1), (8, 1)),
        (1, (1000, 4), (4, 1), (8, 1)),
    ]


@pytest.mark.parametrize("count", [3, 40])
def test_readers_take_turns_among_equal_chunks(count: int) -> None:
    chunks = [Chunk((6,), (3 * (i % 2),), (3,)) for i in range(2 * count)]
    taken = [
        {part.rank for part in parts_of(rows_of(chunks), Chunk.whole((6,)), reader=reader).parts}
        for reader in range(count)
    ]
    assert all(len(ranks) == 2 for ranks in taken)
    assert set.union(*taken) == set(range(2 * count))


def test_chunks_of_another_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="different tensors"):
        parts_of(rows_of([Chunk.whole((3,))]), Chunk.whole((4,)))
