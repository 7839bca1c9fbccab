"""Do a restore's phases add up, and do all ranks hear which of them was the slowest?"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ckptengine.comm.failure import Failure
from ckptengine.comm.group import Group
from ckptengine.comm.transport import MemoryTransport
from ckptengine.errors import CheckpointError, StorageError
from ckptengine.info import CommitInfo, RestoreInfo, SaveTimes
from ckptengine.phases import Phase, RankPhases, Ranks, RestorePhases, Stopwatch
from ckptengine.read.spent import Spent, parts


def test_a_phase_inside_another_is_not_counted_twice() -> None:
    watch = Stopwatch()
    began = time.perf_counter()
    with watch.measure("plan"):
        time.sleep(0.01)
        with watch.measure("metadata"):
            time.sleep(0.02)
        watch.add("metadata", Phase(nbytes=7))
    whole = time.perf_counter() - began
    phases = watch.phases()
    assert phases.metadata.seconds >= 0.02
    assert phases.metadata.nbytes == 7
    assert phases.plan.seconds >= 0.01
    assert phases.seconds <= whole


def test_a_phase_is_measured_when_it_fails_too() -> None:
    watch = Stopwatch()
    with pytest.raises(KeyError), watch.measure("plan"):
        raise KeyError
    assert watch.phases().plan.seconds > 0


def test_threads_side_by_side_share_the_wall_time() -> None:
    one, other = Spent(), Spent()
    one.read_ns, one.verify_ns, one.scattered_nbytes = 2_000_000_000, 500_000_000, 30
    other.read_ns, other.scatter_ns, other.scattered_nbytes = 1_000_000_000, 250_000_000, 12
    found = parts([one, other], read_nbytes=6_000_000_000, decompressed_nbytes=0, verified_nbytes=99)
    assert found["read"] == Phase(1.5, 6_000_000_000, 3.0)
    assert found["read"].gbps == pytest.approx(4.0)
    assert found["verify"] == Phase(0.25, 99, 0.5)
    assert found["scatter"] == Phase(0.125, 42, 0.25)
    assert found["decompress"] == Phase()
    assert parts([], read_nbytes=0, decompressed_nbytes=0, verified_nbytes=0)["read"].gbps == 0.0


def busy(rank: int, seconds: float) -> RestorePhases:
    # Who waits longest for others is not the slowest.
    return RestorePhases(agree=Phase(9.0 - seconds), read=Phase(seconds, 1000, seconds * 2), plan=Phase(0.1))


def on_ranks(seconds: list[float], failing: int | None = None) -> list[Ranks | CheckpointError]:
    space = MemoryTransport()

    def run(rank: int) -> Ranks | CheckpointError:
        watch = Stopwatch()
        for name, phase in busy(rank, seconds[rank]).items():
            watch.add(name, phase)
        ranks = Ranks(rank, watch)
        group = Group(rank, len(seconds), space, "g", 20.0)
        failure = Failure.of(StorageError("gone"), rank) if rank == failing else None
        try:
            ranks.learn(group.summarise(ranks.own(), ranks.summary, failure, what="testing"))
        except CheckpointError as error:
            return error
        return ranks

    with ThreadPoolExecutor(len(seconds)) as pool:
        return list(pool.map(run, range(len(seconds))))


@pytest.mark.parametrize("seconds", [[1.0, 3.0, 2.0], [1.0]])
def test_all_ranks_hear_of_the_slowest_and_the_coordinator_of_all(seconds: list[float]) -> None:
    found = on_ranks(seconds)
    slowest = max(range(len(seconds)), key=lambda rank: seconds[rank])
    for rank, ranks in enumerate(found):
        assert isinstance(ranks, Ranks)
        assert ranks.slowest == RankPhases(slowest, busy(slowest, seconds[slowest]))
        assert ranks.slowest.phase == "read"
        assert len(ranks.all) == (len(seconds) if rank == 0 else 0)
    assert isinstance(found[0], Ranks)
    assert [one.phases for one in found[0].all] == [busy(r, s) for r, s in enumerate(seconds)]


def test_a_rank_that_fails_is_raised_on_all_instead() -> None:
    for found in on_ranks([1.0, 2.0, 3.0], failing=1):
        assert isinstance(found, StorageError)
        assert found.rank == 1


def test_a_summary_that_cannot_be_made_is_an_error_on_all_ranks_not_a_wait() -> None:
    space = MemoryTransport()

    def refuse(values: list[bytes]) -> bytes:
        raise ValueError(f"{len(values)} values")

    def run(rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            Group(rank, 2, space, "g", 20.0).summarise(b"", refuse, what="testing")
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        for text in pool.map(run, range(2)):
            assert "2 values" in text


INFO = RestoreInfo(
    step=7,
    path="/root/step-7",
    nbytes=4_000_000_000,
    seconds=2.5,
    read_seconds=2.0,
    rank=1,
    phases=RestorePhases(agree=Phase(0.1), read=Phase(1.5, 4_000_000_000, 6.0), verify=Phase(0.3)),
    slowest=RankPhases(3, RestorePhases(plan=Phase(2.4))),
    limit_gbps=4.0,
)


def test_the_share_of_the_limit_is_of_what_the_storage_gave() -> None:
    assert INFO.limit_share == pytest.approx(0.5)
    assert replace(INFO, from_cache_nbytes=40_000_000).limit_share == pytest.approx(0.495)
    assert replace(INFO, from_cache_nbytes=40_000_001).limit_share is None
    assert replace(INFO, limit_gbps=None).limit_share is None
    assert replace(INFO, phases=RestorePhases()).limit_share is None


def test_the_summary_names_phases_rest_limit_and_slowest_rank() -> None:
    text = INFO.summary()
    lines = [line.split() for line in text.splitlines()]
    assert ["read", "1.5000", "60.0%", "4,000,000,000", "2.67"] in lines
    assert "read at 50% of the storage's 4 GB/s" in text
    assert ["other", "0.6000", "24.0%", "-", "-"] in lines
    assert "slowest: rank 3, busy for 2.400 s, most of it plan" in text
    assert "exchange" not in text
    alone = replace(INFO, rank=3, limit_gbps=None)
    assert "slowest" not in alone.summary()
    assert "limit" not in alone.summary()


def test_a_restore_that_took_no_time_has_a_summary_too() -> None:
    empty = RestoreInfo(step=1, path="", nbytes=0, seconds=0.0, read_seconds=0.0)
    assert "step 1" in empty.summary()


def test_reports_are_json() -> None:
    found = json.loads(json.dumps(INFO.to_dict()))
    assert found["phases"]["read"] == {
        "seconds": 1.5,
        "nbytes": 4_000_000_000,
        "thread_seconds": 6.0,
        "gbps": pytest.approx(2.667, abs=0.001),
    }
    assert found["slowest"]["phase"] == "plan"
    assert found["limit_share"] == pytest.approx(0.5)
    assert found["ranks"] == []


def test_a_saves_phases_lie_between_its_moments() -> None:
    times = SaveTimes(requested=10.0, returned=10.5, staged=10.5, written=12.5, durable=13.0, committed=13.25)
    info = CommitInfo(1, "/p", "a", "f", 5_000_000_000, 4_000_000_000, times)
    assert {name: phase.seconds for name, phase in info.phases.items()} == {
        "stage": 0.5,
        "write": 2.0,
        "sync": 0.5,
        "commit": 0.25,
    }
    assert info.phases["write"].gbps == pytest.approx(2.0)
    assert "committed in 3.250 s, 0.5000 s of them in the way of training" in info.summary()
    assert json.loads(json.dumps(info.to_dict()))["phases"]["sync"]["seconds"] == 0.5


def test_a_coordinators_clock_that_is_behind_gives_no_negative_time() -> None:
    times = SaveTimes(requested=10.0, returned=10.1, staged=12.0, written=11.0, durable=13.0, committed=12.0)
    info = CommitInfo(1, "/p", "a", "f", 1, 1, times)
    assert all(phase.seconds >= 0 for phase in info.phases.values())
    assert sum(phase.seconds for phase in info.phases.values()) == pytest.approx(3.0)
