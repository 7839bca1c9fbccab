"""Do tensors lie aligned and without a hole, and are blocks where they should be?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.format.blocks import BlockTable, stored_offsets
from ckptengine.format.layout import lay_out
from ckptengine.format.limits import PAGE
from tests.format.strategies import usual

items = st.lists(st.tuples(st.integers(0, 10000), st.sampled_from([1, 2, 4, 8, 16])), max_size=12).map(
    lambda sizes: [(f"t{i}", nbytes, alignment) for i, (nbytes, alignment) in enumerate(sizes)]
)


@usual
@given(items)
def test_layout_is_aligned_ordered_and_without_a_hole(items: list[tuple[str, int, int]]) -> None:
    placed, data_nbytes = lay_out(items)
    assert data_nbytes % PAGE == 0
    at = 0
    for _, start, stop in placed:
        assert start == at
        at = stop
    assert at == data_nbytes
    pads = [(name, start, stop) for name, start, stop in placed if name.startswith("__pad__.")]
    assert [name for name, *_ in pads] == [f"__pad__.{i}" for i in range(len(pads))]
    assert all(0 < stop - start < PAGE for _, start, stop in pads)
    tensors = [entry for entry in placed if entry not in pads]
    assert [(name, stop - start) for name, start, stop in tensors] == [(name, n) for name, n, _ in items]
    for (_, start, _), (_, _, alignment) in zip(tensors, items, strict=True):
        assert start % alignment == 0


def test_nothing_has_no_data() -> None:
    assert lay_out([]) == ([], 0)
    assert lay_out([("empty", 0, 8)]) == ([("empty", 0, 0)], 0)


def test_pads_are_only_where_needed() -> None:
    placed, data_nbytes = lay_out([("a", 3, 1), ("b", 8, 8), ("c", PAGE - 16, 16)])
    assert placed == [("a", 0, 3), ("__pad__.0", 3, 8), ("b", 8, 16), ("c", 16, PAGE)]
    assert data_nbytes == PAGE


@usual
@given(st.integers(0, 20), st.integers(1, 5), st.data())
def test_blocks_cut_the_data_and_cover_every_range(pages: int, block_pages: int, data: st.DataObject) -> None:
    table = BlockTable(pages * PAGE, block_pages * PAGE)
    spans = [table.span(i) for i in range(table.count)]
    assert [start for start, _ in spans] == list(range(0, table.data_nbytes, table.block_nbytes))
    assert [stop for _, stop in spans][-1:] == [table.data_nbytes][: table.count]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, table.data_nbytes)] * 2)))
    touched = [i for i, (a, b) in enumerate(spans) if a < stop and start < b and start < stop]
    assert list(table.covering(start, stop)) == touched


def test_block_table_refuses_what_is_not_there() -> None:
    table = BlockTable(3 * PAGE, 2 * PAGE)
    for i in (-1, 2):
        with pytest.raises(IndexError):
            table.span(i)
    for start, stop in ((-1, 0), (2, 1), (0, 3 * PAGE + 1)):
        with pytest.raises(ValueError):
            table.covering(start, stop)
    for data_nbytes, block_nbytes in ((1, PAGE), (-PAGE, PAGE), (PAGE, 0), (PAGE, 1), (PAGE, -PAGE)):
        with pytest.raises(ValueError):
            BlockTable(data_nbytes, block_nbytes)


def test_stored_blocks_fill_whole_pages() -> None:
    assert stored_offsets([1, PAGE, PAGE + 1, 7]) == (0, PAGE, 2 * PAGE, 4 * PAGE)
    assert stored_offsets([]) == ()
