"""Does every rank hear how it ended, whenever it looks?"""

from __future__ import annotations

import pytest

from ckptengine.comm.failure import Failure
from ckptengine.comm.rollcall import RollCall
from ckptengine.comm.transport import MemoryTransport
from ckptengine.errors import CorruptCheckpointError


def calls(world_size: int) -> tuple[MemoryTransport, list[RollCall]]:
    space = MemoryTransport()
    return space, [RollCall(rank, world_size, space, "s1") for rank in range(world_size)]


def failure(rank: int) -> Failure:
    return Failure.of(CorruptCheckpointError("bad", path="/p", rank=rank), rank)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_hear_that_all_are_done_once_the_last_is(order: tuple[int, ...]) -> None:
    _, ranks = calls(3)
    for rank in order:
        assert [one.look() for one in ranks] == [False] * 3
        ranks[rank].done()
    assert [one.look() for one in ranks] == [True] * 3


def test_the_coordinator_has_to_look_for_others_to_hear() -> None:
    _, ranks = calls(2)
    for one in ranks:
        one.done()
    assert ranks[1].look() is False
    assert ranks[0].look() is True
    assert ranks[1].look() is True


def test_the_first_failure_is_everybodys() -> None:
    _, ranks = calls(3)
    ranks[0].done()
    assert ranks[2].fail(failure(2)) == failure(2)
    assert ranks[1].fail(failure(1)) == failure(2)
    assert [one.look() for one in ranks] == [failure(2)] * 3


def test_a_rank_that_is_missing_is_named() -> None:
    _, ranks = calls(3)
    ranks[0].done()
    ranks[2].done()
    assert ranks[0].look() is False
    assert ranks[0].missing == 1
    assert ranks[2].missing == 0


def test_nothing_is_left() -> None:
    space, ranks = calls(3)
    for one in ranks:
        one.done()
    assert ranks[0].look() is True
    for one in ranks:
        one.forget()
    assert space._values == {}


def test_one_rank_needs_nobody() -> None:
    space, (one,) = calls(1)
    assert one.look() is True
    assert one.fail(failure(0)) == failure(0)
    assert space._values == {}
