from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.read.selection import select


@st.composite
def indices(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    count = draw(st.integers(0, len(shape)))
    items: list[Any] = []
    for size in shape[:count]:
        number = st.integers(-size, size - 1) if size else st.nothing()
        bound = st.none() | st.integers(-8, 8)
        steps = st.none() | st.integers(1, 4)
        items.append(draw(st.builds(slice, bound, bound, steps) | number))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(items)))
        # What follows an Ellipsis indexes the last dimensions, where an int may not fit.
        items = [*items[:at], Ellipsis, *(slice(None) for _ in items[at:])]
    if len(items) == 1 and draw(st.booleans()):
        return shape, items[0]
    return shape, tuple(items)


@given(indices(), st.sampled_from([1, 5000]))
def test_boxes_and_finish_give_what_numpy_selects(case: tuple[tuple[int, ...], Any], itemsize: int) -> None:
    shape, index = case
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    selection = select(index, shape)
    expected = array[index]
    assert selection.shape == expected.shape
    boxes = selection.boxes(itemsize)
    parts = []
    for offsets, sizes in boxes:
        assert all(0 <= at <= at + n <= size for at, n, size in zip(offsets, sizes, shape, strict=True))
        parts.append(array[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))])
    read = np.concatenate(parts) if len(parts) > 1 else parts[0]
    np.testing.assert_array_equal(read[selection.finish(itemsize)], expected)


def test_rows_that_a_step_skips_are_not_read() -> None:
    selection = select(slice(None, None, 10), (100, 4096))
    assert [offsets for offsets, _ in selection.boxes(4)] == [(i, 0) for i in range(0, 100, 10)]
    assert selection.boxes(4)[0][1] == (1, 4096)
    # Small rows share pages, and are read in one piece.
    assert len(select(slice(None, None, 10), (100, 4)).boxes(4)) == 1


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (5, IndexError),
        (-6, IndexError),
        ((0, 0, 0), IndexError),
        ((..., ...), IndexError),
        (slice(None, None, -1), ValueError),
        (slice(None, None, 0), ValueError),
        (None, TypeError),
        (True, TypeError),
        ([0, 1], TypeError),
        ("name", TypeError),
    ],
)
def test_other_indices_are_refused(index: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        select(index, (5, 3))


def test_numpy_ints_are_ints() -> None:
    assert select((np.int64(-1),), (5, 3)).starts == (4, 0)
