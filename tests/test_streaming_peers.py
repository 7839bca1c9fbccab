"""Does a rank that reads behind its training hear how it ends on the others, and they of it?"""

from __future__ import annotations

import threading

import pytest

from ckptengine import streaming_peers
from ckptengine.comm.failure import Failure, PeerLostError
from ckptengine.comm.rollcall import RollCall
from ckptengine.comm.transport import MemoryTransport
from ckptengine.errors import CheckpointError, CommitTimeoutError, CorruptCheckpointError
from ckptengine.read.arrivals import LOOK_S
from ckptengine.streaming_peers import Peers
from tests.comm.test_group import Clock, Ended


def peers(world_size: int, timeout_s: float = 60.0) -> list[Peers]:
    space = MemoryTransport()
    return [Peers(RollCall(rank, world_size, space, "s1"), rank, timeout_s) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_is_not_over_before_this_rank_has_read_all(world_size: int) -> None:
    ranks = peers(world_size)
    for one in ranks:
        assert one.look() is False
        one.done()
    assert [one.look() for one in ranks] == [True] * world_size


def test_the_error_that_counts_is_that_of_the_rank_that_failed_first() -> None:
    ranks = peers(3)
    first = CorruptCheckpointError("bad", path="/p", rank=1)
    assert ranks[1].fail(first, tell=True) is first
    heard = ranks[2].fail(ValueError("later"), tell=True)
    assert isinstance(heard, CorruptCheckpointError)
    assert heard.rank == 1
    assert [isinstance(one.look(), Failure) for one in ranks] == [True] * 3


def test_what_was_heard_is_not_told_again() -> None:
    ranks = peers(2)
    heard = CorruptCheckpointError("bad", path="/p", rank=1)
    assert ranks[0].fail(heard, tell=False) is heard
    assert ranks[1].look() is False


def test_a_transport_that_does_not_answer_is_an_error_that_says_so_and_hides_no_other() -> None:
    class Silent(RollCall):
        def fail(self, failure: Failure) -> Failure:
            raise ConnectionError("gone")

    one = Peers(Silent(0, 2, MemoryTransport(), "s1"), 0, 60.0)
    lost = ConnectionError("reset")
    told = one.fail(lost, tell=True)
    assert isinstance(told, CheckpointError)
    assert "the other ranks cannot be reached while the state is read: reset" in str(told)
    assert told.__cause__ is lost
    bad = CorruptCheckpointError("bad", path="/p", rank=0)
    assert one.fail(bad, tell=True) is bad


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = peers(3, timeout_s=0.0)
    ranks[0].done()
    ranks[1].done()
    assert ranks[0].look() is False
    with pytest.raises(CommitTimeoutError, match="rank 2 did not report within 0 s") as caught:
        ranks[0].pause(threading.Event())
    assert caught.value.rank == 2


def test_only_a_coordinator_gives_up_at_once() -> None:
    ranks = peers(2, timeout_s=0.0)
    ranks[1].done()
    ranks[1].pause(threading.Event())


def test_the_wait_for_this_rank_itself_ends_with_its_news() -> None:
    """It has no deadline here; reading has one."""
    (one, _) = peers(2, timeout_s=0.0)
    news = threading.Event()
    news.set()
    one.pause(news)


def test_a_coordinator_that_has_read_all_late_has_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({})
    monkeypatch.setattr(streaming_peers, "time", clock)
    news = threading.Event()
    coordinator, one = peers(2, timeout_s=30.0)
    one.done()
    clock.now += 39.0
    one.pause(news)
    coordinator.done()
    clock.now += 39.0
    assert one.look() is False
    one.pause(news)
    clock.now += 41.0
    with pytest.raises(CommitTimeoutError, match="rank 0 did not report"):
        one.pause(news)


@pytest.mark.parametrize("has_read", [False, True])
def test_a_rank_whose_process_has_ended_is_named_unless_it_had_read_all(
    monkeypatch: pytest.MonkeyPatch, has_read: bool
) -> None:
    clock = Clock({})
    monkeypatch.setattr(streaming_peers, "time", clock)
    space, neighbours = MemoryTransport(), Ended()
    one = Peers(RollCall(1, 3, space, "s1"), 1, 60.0, neighbours)
    if has_read:
        RollCall(2, 3, space, "s1").done()
    neighbours.ranks = [2]
    clock.now += LOOK_S
    if has_read:
        assert one.look() is False
    else:
        with pytest.raises(PeerLostError, match="the process of rank 2 has ended") as caught:
            one.look()
        assert caught.value.rank == 2
