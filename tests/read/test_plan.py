from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.format.blocks import BlockTable
from ckptengine.read.plan import BlockRead, Copy, Destination, plan_reads

PAGE = 4096


@st.composite
def plans(draw: st.DrawFn) -> tuple[BlockTable, list[Destination]]:
    pages = draw(st.integers(0, 9))
    blocks = BlockTable(pages * PAGE, draw(st.integers(1, 4)) * PAGE)
    destinations = []
    address = 1000
    for _ in range(draw(st.integers(0, 8))):
        start = draw(st.integers(0, blocks.data_nbytes))
        stop = draw(st.integers(start, blocks.data_nbytes))
        destinations.append(Destination(start, stop, address))
        address += stop - start + draw(st.sampled_from([0, 0, 64]))
    return blocks, draw(st.permutations(destinations))


@given(plans())
def test_every_wanted_byte_is_delivered_once_and_nothing_else(
    plan: tuple[BlockTable, list[Destination]],
) -> None:
    blocks, destinations = plan
    wanted = {d.address + i: d.start + i for d in destinations for i in range(d.stop - d.start)}
    delivered: dict[int, int] = {}
    for read in plan_reads(blocks, destinations):
        first, stop = blocks.span(read.block)
        for at, nbytes, address in read.copies:
            assert 0 <= at < at + nbytes <= stop - first
            for i in range(nbytes):
                assert address + i not in delivered
                delivered[address + i] = first + at + i
        assert read.nbytes_wanted == sum(nbytes for _, nbytes, _ in read.copies)
    assert delivered == wanted


@given(plans())
def test_blocks_are_read_in_order_and_only_if_a_byte_of_them_is_wanted(
    plan: tuple[BlockTable, list[Destination]],
) -> None:
    blocks, destinations = plan
    needed = {block for d in destinations for block in blocks.covering(d.start, d.stop)}
    assert [read.block for read in plan_reads(blocks, destinations)] == sorted(needed)


def test_neighbours_in_shard_and_memory_become_one_copy() -> None:
    blocks = BlockTable(4 * PAGE, 2 * PAGE)
    destinations = [Destination(i * 16, i * 16 + 16, 5000 + i * 16) for i in range(100)]
    assert plan_reads(blocks, destinations) == [BlockRead(0, (Copy(0, 1600, 5000),))]


def test_the_same_bytes_may_be_wanted_twice() -> None:
    blocks = BlockTable(PAGE, PAGE)
    reads = plan_reads(blocks, [Destination(0, 8, 100), Destination(0, 8, 200)])
    assert reads == [BlockRead(0, (Copy(0, 8, 100), Copy(0, 8, 200)))]


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (0, PAGE + 1), (8, 4)])
def test_a_destination_outside_the_data_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="destination"):
        plan_reads(BlockTable(PAGE, PAGE), [Destination(start, stop, 0)])
