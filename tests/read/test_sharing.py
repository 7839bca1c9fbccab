"""Who reads what, and is every block that several need read by one of them?"""

from __future__ import annotations

from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptengine.read.sharing import MAX_MEMBERS, MAX_RANGES, Cell, Range, cells_of, joined, schedule

HOST = b"host"


def range_of(shard: int, first: int, count: int) -> Range:
    return shard, first, first + count


ranges = st.lists(
    st.builds(range_of, st.integers(0, 3), st.integers(0, 12), st.integers(0, 6)), max_size=6
).map(joined)
worlds = st.lists(ranges, min_size=1, max_size=6)


def blocks_of(some: tuple[Range, ...]) -> set[tuple[int, int]]:
    return {(shard, block) for shard, first, stop in some for block in range(first, stop)}


@given(st.lists(st.builds(range_of, st.integers(0, 2), st.integers(0, 12), st.integers(0, 6)), max_size=8))
def test_joined_ranges_hold_the_same_blocks_and_do_not_touch(some: list[Range]) -> None:
    made = joined(some)
    assert blocks_of(made) == blocks_of(tuple(some))
    assert all(a[0] < b[0] or a[2] < b[1] for a, b in pairwise(made))


def test_of_too_many_ranges_the_longest_are_told() -> None:
    made = joined([(0, 10 * i, 10 * i + 1 + (i % 2)) for i in range(2 * MAX_RANGES)])
    assert len(made) == MAX_RANGES
    assert all(stop - first == 2 for _, first, stop in made)


@given(worlds)
def test_each_block_that_two_ranks_need_is_read_by_one_of_them(needs: list[tuple[Range, ...]]) -> None:
    cells = cells_of(needs, [HOST] * len(needs))
    blocks = [blocks_of(mine) for mine in needs]
    shared = {one for one in chain(*blocks) if sum(one in mine for mine in blocks) > 1}
    turns = [(cell, turn) for cell in cells for turn in schedule(cell).turns.values()]
    assert sorted(turn.block for _, turn in turns) == sorted(shared)
    for cell, turn in turns:
        needing = [rank for rank, mine in enumerate(blocks) if turn.block in mine]
        assert [cell.members[member] for member in turn.members] == needing
        assert turn.reader in turn.members


@given(worlds)
def test_turns_are_in_one_order_and_numbered_for_each_reader(needs: list[tuple[Range, ...]]) -> None:
    for cell in cells_of(needs, [HOST] * len(needs)):
        turns = list(schedule(cell).turns.values())
        assert [turn.block for turn in turns] == sorted(turn.block for turn in turns)
        assert [turn.sequence for turn in turns] == list(range(len(turns)))
        for member in range(len(cell.members)):
            assert [turn.number for turn in turns if turn.reader == member] == list(
                range(sum(turn.reader == member for turn in turns))
            )


def test_members_take_turns() -> None:
    (cell,) = cells_of([[(0, 0, 12)]] * 3, [HOST] * 3)
    assert [turn.reader for turn in schedule(cell).turns.values()] == [0, 1, 2] * 4


def test_ranks_of_one_host_are_a_cell_of_their_own() -> None:
    cells = cells_of([[(0, 0, 4)]] * 5, [b"a", b"b", b"a", b"c", b"b"])
    assert [(cell.members, cell.local) for cell in cells] == [((0, 2), True), ((1, 4), True)]


def test_ranks_that_are_alone_on_their_hosts_are_a_cell() -> None:
    (cell,) = cells_of([[(0, 0, 4)]] * 3, [b"a", b"b", b"c"])
    assert (cell.members, cell.local) == ((0, 1, 2), False)


def test_a_cell_is_bounded() -> None:
    cells = cells_of([[(0, 0, 4)]] * 70, [bytes([rank]) for rank in range(70)])
    assert [len(cell.members) for cell in cells] == [MAX_MEMBERS, MAX_MEMBERS, 6]


def test_who_shares_nothing_is_in_no_cell() -> None:
    assert cells_of([[(rank, 0, 100)] for rank in range(100)], [HOST] * 100) == []


def test_thousands_of_ranks_find_their_cells() -> None:
    needs = [[(rank, 0, 600), (rank % 64, 600, 700)] for rank in range(4096)]
    cells = cells_of(needs, [bytes([rank // 8 % 256, rank // 2048]) for rank in range(4096)])
    assert sum(len(cell.members) for cell in cells) == 4096


def test_a_schedule_of_none() -> None:
    assert schedule(Cell((0, 1), ((),), (0, 0), True)).turns == {}
