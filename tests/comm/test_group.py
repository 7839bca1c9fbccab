"""Ranks agree, hear of each other's failures, and never wait for ever. Ranks are threads here; the dist suite
has processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from ckptengine.comm import group as group_module
from ckptengine.comm import transport as transport_module
from ckptengine.comm.failure import Failure, PeerLostError, StoppedByPeerError
from ckptengine.comm.group import Group
from ckptengine.comm.neighbours import Neighbours
from ckptengine.comm.transport import MemoryTransport
from ckptengine.errors import CheckpointError, CommitTimeoutError, CorruptCheckpointError


def on_ranks(
    world_size: int, work: Callable[[Group], Any], timeout_s: float = 20.0, absent: tuple[int, ...] = ()
) -> list[Any]:
    """What `work` returns or raises on each rank."""
    space = MemoryTransport()

    def run(rank: int) -> Any:
        if rank in absent:
            return None
        try:
            return work(Group(rank, world_size, space, "g", timeout_s))
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def test_every_rank_gets_all_values_in_rank_order() -> None:
    results = on_ranks(4, lambda g: g.gather_all(b"%d" % g.rank, what="testing"))
    assert results == [[b"0", b"1", b"2", b"3"]] * 4


def test_calls_do_not_mix_and_leave_only_the_last_ones_values() -> None:
    spaces = []

    def work(group: Group) -> list[list[bytes]]:
        spaces.append(group.transport)
        gathered = []
        for i in range(20):
            group.scatter([b"x"] * group.world_size if group.is_coordinator else None, what="testing")
            gathered.append(group.gather_all(b"%d.%d" % (group.rank, i), what="testing"))
        return gathered

    for result in on_ranks(3, work):
        assert result == [[b"%d.%d" % (rank, i) for rank in range(3)] for i in range(20)]
    assert len(spaces[0]._values) == 4


def test_agreements_and_summaries_leave_only_the_last_ones_values_too() -> None:
    spaces = []

    def work(group: Group) -> None:
        spaces.append(group.transport)
        for _ in range(20):
            group.agree(what="testing")
            group.summarise(b"x", lambda values: b"".join(values), what="testing")
        group.agree(what="testing")

    assert on_ranks(3, work) == [None] * 3
    assert len(spaces[0]._values) == 4


def test_a_failure_is_raised_on_all_ranks_with_its_place() -> None:
    def work(group: Group) -> Any:
        failure = None
        if group.rank == 2:
            error = CorruptCheckpointError(
                "block differs", path="/ckpt/s", rank=2, fqn="w", offset=4096, hint="restore another"
            )
            failure = Failure.of(error, group.rank)
        return group.gather_all(b"", failure, what="testing")

    for error in on_ranks(3, work):
        assert isinstance(error, CorruptCheckpointError)
        assert (error.path, error.rank, error.fqn, error.offset) == ("/ckpt/s", 2, "w", 4096)
        assert "block differs" in str(error)
        assert "restore another" in str(error)


def test_agreement_raises_the_lowest_ranks_failure_on_all() -> None:
    def work(group: Group) -> Any:
        group.agree(what="testing")
        failure = None
        if group.rank in (1, 2):
            failure = Failure.of(CorruptCheckpointError(f"block of {group.rank}"), group.rank)
        return group.agree(failure, what="testing")

    for error in on_ranks(3, work):
        assert isinstance(error, CorruptCheckpointError)
        assert (error.rank, error.message) == (1, "block of 1")


def test_what_a_rank_hears_of_an_agreement_does_not_grow_with_the_world() -> None:
    def heard(world_size: int) -> int:
        space = MemoryTransport()
        for rank in range(2, world_size):
            space.set(f"g/1/{rank}", msgspec.msgpack.encode({"value": None, "failure": None}))
        with ThreadPoolExecutor(2) as pool:
            list(
                pool.map(
                    lambda rank: Group(rank, world_size, space, "g", 20.0).agree(what="testing"), range(2)
                )
            )
        return len(space._values["g/1/all"])

    assert heard(500) == heard(2)


def test_a_lost_connection_is_a_checkpoint_error_that_says_what_was_going_on() -> None:
    class Gone(MemoryTransport):
        def set(self, key: str, value: bytes) -> None:
            raise ConnectionError("no such host")

    for call in (
        lambda: Group(0, 2, Gone(), "g", 1.0).gather_all(b"", what="choosing a step"),
        lambda: Group(0, 2, Gone(), "g", 1.0).scatter([b"", b""], what="choosing a step"),
    ):
        with pytest.raises(CheckpointError, match="while choosing a step: no such host"):
            call()


@pytest.mark.parametrize("absent", [(1,), (0,), (1, 2)])
def test_a_missing_rank_is_named_on_all_others_in_time(
    monkeypatch: pytest.MonkeyPatch, absent: tuple[int, ...]
) -> None:
    if absent == (0,):
        monkeypatch.setattr(group_module, "GRACE_S", 0.3)
    results = on_ranks(3, lambda g: g.gather_all(b"", what="choosing a step"), timeout_s=0.3, absent=absent)
    results += on_ranks(3, lambda g: g.agree(what="choosing a step"), timeout_s=0.3, absent=absent)
    for rank, error in enumerate(results):
        if rank % 3 not in absent:
            assert isinstance(error, CommitTimeoutError)
            assert error.rank == absent[0]
            assert "choosing a step" in str(error)


def test_scatter_gives_each_rank_its_own() -> None:
    def work(group: Group) -> bytes:
        return group.scatter([b"a", b"b", b"c"] if group.is_coordinator else None, what="testing")

    assert on_ranks(3, work) == [b"a", b"b", b"c"]


def test_a_coordinator_that_cannot_scatter_fails_all() -> None:
    def work(group: Group) -> bytes:
        failure = Failure.of(CorruptCheckpointError("no manifest"), 0) if group.is_coordinator else None
        return group.scatter(None, failure, what="testing")

    assert [type(e) for e in on_ranks(3, work)] == [CorruptCheckpointError] * 3


def test_a_failure_that_only_follows_another_is_not_the_one_that_is_raised() -> None:
    def work(group: Group) -> None:
        failure = None
        if group.rank == 0:
            failure = Failure.of(StoppedByPeerError("it has stopped", rank=2), 0)
        if group.rank == 2:
            failure = Failure.of(CorruptCheckpointError("damaged", path="/x"), 2)
        group.agree(failure, what="testing")

    for error in on_ranks(3, work):
        assert isinstance(error, CorruptCheckpointError)
        assert error.rank == 2


@pytest.mark.parametrize("tells", [0, 2])
def test_a_rank_that_another_one_has_lost_is_not_waited_for(tells: int) -> None:
    def work(group: Group) -> None:
        failure = None
        if group.rank == tells:
            failure = Failure.of(PeerLostError("rank 1 ended", rank=1), group.rank)
        group.agree(failure, what="testing")

    results = on_ranks(3, work, timeout_s=600.0, absent=(1,))
    for error in (results[0], results[2]):
        assert isinstance(error, CommitTimeoutError)
        assert error.rank == 1


def test_some_ranks_tell_each_other_and_the_others_need_not_know() -> None:
    def work(group: Group) -> list[bytes]:
        told = []
        if group.rank in (1, 3):
            told = group.among((3, 1), b"%d" % group.rank, "some", what="testing")
        call = group.calls
        group.agree(what="testing")
        if told:
            group.forget_among("some", call)
            assert group.transport.peek(f"g/{call}/some/{group.rank}") is None
        return told

    assert on_ranks(4, work) == [[], [b"3", b"1"], [], [b"3", b"1"]]


def test_one_of_some_that_does_not_come_is_named() -> None:
    def work(group: Group) -> None:
        group.among((0, 1), b"", "some", what="testing")

    error, _ = on_ranks(2, work, timeout_s=0.2, absent=(1,))
    assert isinstance(error, CommitTimeoutError)
    assert error.rank == 1


# --- waiting -------------------------------------------------------------------------------------


class Clock:
    """Stands for `time` where nothing but waiting happens. at: what happens when."""

    def __init__(self, at: dict[float, Callable[[], object]]) -> None:
        self.now = 1000.0
        self._at = sorted((self.now + when, what) for when, what in at.items())

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self._at and self._at[0][0] <= self.now:
            self._at.pop(0)[1]()


class Ended(Neighbours):
    """Knows of what a test says."""

    def __init__(self) -> None:
        super().__init__(0, 1, MemoryTransport(), "at")
        self.ranks: list[int] = []

    def ended(self) -> list[int]:
        return self.ranks


def reported(failure: Failure | None = None) -> bytes:
    return msgspec.msgpack.encode({"value": None, "failure": failure})


def waits(
    monkeypatch: pytest.MonkeyPatch,
    space: MemoryTransport,
    at: dict[float, Callable[[], object]],
    neighbours: Neighbours | None = None,
) -> tuple[CheckpointError, float]:
    """What rank 1 of 3 raises, with a deadline of 30 s, and after how many seconds."""
    clock = Clock(at)
    monkeypatch.setattr(group_module, "time", clock)
    monkeypatch.setattr(transport_module, "time", clock)
    with pytest.raises(CheckpointError) as caught:
        Group(1, 3, space, "g", 30.0, neighbours).agree(what="testing")
    return caught.value, clock.now - 1000.0


def test_a_coordinator_that_comes_late_has_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    space = MemoryTransport()
    missing = [{"value": None, "failure": Failure.of(PeerLostError("rank 2 is missing", rank=2), 0)}]
    error, seconds = waits(
        monkeypatch,
        space,
        {
            39.0: lambda: space.set("g/1/0", reported()),
            69.0: lambda: space.set("g/1/all", msgspec.msgpack.encode(missing)),
        },
    )
    assert (error.rank, error.message) == (2, "rank 2 is missing")
    assert seconds < 70


@pytest.mark.parametrize(("comes", "until"), [(None, 40), (1.0, 42.5)])
def test_a_coordinator_that_says_nothing_is_given_up_a_grace_after_its_deadline(
    monkeypatch: pytest.MonkeyPatch, comes: float | None, until: float
) -> None:
    space = MemoryTransport()
    at = {} if comes is None else {comes: lambda: space.set("g/1/0", reported())}
    error, seconds = waits(monkeypatch, space, at)
    assert isinstance(error, CommitTimeoutError)
    assert (error.rank, "within 30 s while testing" in error.message) == (0, True)
    assert 39.9 < seconds < until + 1


def test_a_rank_that_has_ended_is_the_reason_though_the_coordinator_has_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space, neighbours = MemoryTransport(), Ended()
    error, seconds = waits(monkeypatch, space, {5.0: lambda: neighbours.ranks.append(2)}, neighbours)
    assert isinstance(error, CommitTimeoutError)
    assert (error.rank, error.message) == (2, "the process of rank 2 has ended while testing")
    assert seconds < 20
    # The coordinator hears the same, when it comes.
    assert outcome(lambda: Group(0, 3, space, "g", 0.0).agree(what="testing"))[2] == 2


def test_a_coordinator_that_has_ended_is_known_on_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    space, neighbours = MemoryTransport(), Ended()
    error, seconds = waits(monkeypatch, space, {5.0: lambda: neighbours.ranks.append(0)}, neighbours)
    assert (error.rank, seconds < 9) == (0, True)
    assert outcome(lambda: Group(2, 3, space, "g", 30.0).agree(what="testing"))[2] == 0


def test_a_rank_that_has_reported_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    space, neighbours = MemoryTransport(), Ended()
    neighbours.ranks = [0, 2]
    for rank in (0, 2):
        space.set(f"g/1/{rank}", reported())
    error, seconds = waits(monkeypatch, space, {}, neighbours)
    assert (error.rank, "did not answer" in error.message) == (0, True)
    assert seconds > 39


@pytest.mark.parametrize(
    ("kind", "victim"), [("agree", 0), ("agree", 1), ("scatter", 0), ("among", 0), ("among", 1)]
)
def test_all_hear_of_an_end_that_one_has_seen(
    monkeypatch: pytest.MonkeyPatch, kind: str, victim: int
) -> None:
    """The others are on other hosts."""
    monkeypatch.setattr(group_module, "LOOK_S", 0.05)

    def work(group: Group) -> Any:
        if group.rank == victim:
            return None
        if group.rank == 2:
            group.neighbours = Ended()
            group.neighbours.ranks = [victim]
        if kind == "agree":
            return outcome(lambda: group.agree(what="testing"))
        if kind == "scatter":
            return outcome(lambda: group.scatter([b""] * 3 if group.is_coordinator else None, what="testing"))
        return outcome(lambda: group.among([0, 1, 2], b"x", "cell", what="testing"))

    kinds = StoppedByPeerError if kind == "among" else CommitTimeoutError
    results = on_ranks(3, work, timeout_s=600.0)
    text = f"the process of rank {victim} has ended while testing"
    assert [one for one in results if one is not None] == [(kinds, text, victim)] * 2


# --- leaving -------------------------------------------------------------------------------------


def outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except CheckpointError as error:
        return type(error), error.message, error.rank


LEFT = (CheckpointError, "this rank left the test by SystemExit: 3", 1)


@pytest.mark.parametrize("leaver", [0, 1, 2])
@pytest.mark.parametrize("kind", ["agree", "scatter"])
def test_who_leaves_is_named_at_the_next_call_and_all_go_on_together(kind: str, leaver: int) -> None:
    def call(group: Group) -> Any:
        if kind == "agree":
            return group.agree(what="testing")
        return group.scatter([b"x"] * 3 if group.is_coordinator else None, what="testing")

    def work(group: Group) -> Any:
        group.agree(what="testing")
        first = None
        if group.rank == leaver:
            group.leave(SystemExit(3), what="the test")
        else:
            if group.is_coordinator:
                group.transport.get("g/2/lost", 20.0)
            first = outcome(lambda: call(group))
        return first, group.gather_all(b"%d" % group.rank, what="testing")

    for rank, (first, then) in enumerate(on_ranks(3, work)):
        assert then == [b"0", b"1", b"2"]
        assert first == (None if rank == leaver else (*LEFT[:2], leaver))


def test_who_leaves_after_the_coordinator_has_answered_is_named_at_the_call_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_module, "LOOK_S", 0.05)
    space = MemoryTransport()
    coordinator, other = (Group(rank, 2, space, "g", 20.0) for rank in range(2))
    coordinator.scatter([b"a", b"b"], what="testing")
    other.leave(SystemExit(3), what="the test")
    assert outcome(lambda: coordinator.agree(what="testing")) == LEFT
    # Told once, it is not told again of the call after that.
    coordinator.timeout_s = 0.3
    assert outcome(lambda: coordinator.agree(what="testing"))[0] is CommitTimeoutError


def test_an_error_keeps_its_class_where_a_rank_leaves_by_it() -> None:
    def work(group: Group) -> Any:
        if group.rank == 1:
            return group.leave(CorruptCheckpointError("block differs"), what="the test")
        return outcome(lambda: group.agree(what="testing"))

    assert on_ranks(2, work) == [(CorruptCheckpointError, "block differs", 1), None]


def test_some_ranks_hear_of_one_that_leaves_while_they_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "LOOK_S", 0.05)

    def work(group: Group) -> Any:
        if group.rank == 1:
            return group.leave(SystemExit(3), what="the test")
        return outcome(lambda: group.among([0, 1, 2], b"x", "cell", what="testing"))

    for result in (one for one in on_ranks(3, work) if one is not None):
        assert result == (StoppedByPeerError, *LEFT[1:])


def test_an_error_names_the_rank_that_met_it_beside_the_one_it_is_about() -> None:
    def work(group: Group) -> Any:
        error = CorruptCheckpointError("block differs", rank=0)
        return group.agree(Failure.of(error, 2) if group.rank == 2 else None, what="testing")

    for error in on_ranks(3, work):
        assert (error.rank, error.met_by) == (0, 2)
        assert str(error) == "block differs [rank 0, met by rank 2]"
        assert Failure.of(error, 1).met_by == 2
