"""One rank fails: its writer dies, hangs or is refused its disk, its state cannot be stored, its trainer is
killed. Then all ranks hear of it, by its name and in time, the last commit stands, and the next save works.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import ckptengine as ck
from ckptengine.format.names import step_dirname
from tests.dist import cases, trap_cases
from tests.helpers.checkpoints import read_manifest
from tests.helpers.ranks import Init, Ranks, commands, wait_until
from tests.helpers.scripts import mounted_tmpfs

pytestmark = pytest.mark.dist

IN_TIME_S = 20.0
"""Far below the deadlines of a commit, far above what a busy machine needs."""


@pytest.fixture
def opened(pair: Ranks, root: str, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """The pair with a Checkpointer and one commit, step 1."""
    pair.call(trap_cases.open_kept, root, getattr(request, "param", {}))
    pair.call(trap_cases.save, 1)
    yield pair
    pair.call(trap_cases.close_kept)


def config(**options: Any) -> pytest.MarkDecorator:
    """Other settings for the `opened` Checkpointer."""
    return pytest.mark.parametrize("opened", [options], indirect=True, ids=[next(iter(options))])


both_ranks = pytest.mark.parametrize("rank", [0, 1])


def shards(root: str, step: int) -> list[str]:
    """Names of the shard files of a step, finished or not."""
    # Not Path.glob, which fails if an earlier attempt is removed while it looks.
    return sorted(map(os.path.basename, glob.glob(f"{root}/{step_dirname(step)}/*/shard-*")))


@contextlib.contextmanager
def in_the_middle(ranks: Ranks, root: str, step: int) -> Iterator[list[int]]:
    """From when the writers of all ranks, which are given, have stopped in the middle of their shards, after
    `begin_and_stop`. Those that are left at the end go on."""
    writers = ranks.call(trap_cases.writer_pid)
    wait_until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in writers))
    try:
        assert len(shards(root, step)) == ranks.world_size
        assert not Path(root, step_dirname(step), "MANIFEST.json").exists()
        yield writers
    finally:
        for pid in writers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def goes_on(ranks: Ranks, root: str, step: int, committed: list[int]) -> None:
    """The commits so far stand, and the next save works."""
    assert ranks.call(trap_cases.steps) == [committed] * 2
    assert [info.step for info in ranks.call(trap_cases.restore)] == [committed[-1]] * 2
    ranks.call(trap_cases.save, step)
    assert [info.step for info in ranks.call(trap_cases.restore)] == [step] * 2
    assert ck.verify(Path(root, step_dirname(step)), level="data").ok


# --- the writer ----------------------------------------------------------------------------------


@both_ranks
@config(**trap_cases.SLOW)
def test_a_writer_killed_in_the_middle_fails_the_save_on_all_ranks(
    opened: Ranks, root: str, rank: int
) -> None:
    opened.call(trap_cases.begin_and_stop, 2)
    with in_the_middle(opened, root, 2) as writers:
        os.kill(writers[rank], signal.SIGKILL)
    for error in opened.errors(trap_cases.finish, 2, timeout_s=IN_TIME_S):
        assert isinstance(error, ck.SaveFailedError)
        assert error.rank == rank
        assert "SIGKILL" in str(error)
    goes_on(opened, root, 3, [1])


@both_ranks
@config(retries=1, **trap_cases.SLOW)
def test_a_retry_writes_the_same_snapshot(opened: Ranks, root: str, rank: int) -> None:
    opened.call(trap_cases.begin_and_stop, 2)
    with in_the_middle(opened, root, 2) as writers:
        os.kill(writers[rank], signal.SIGKILL)
    infos = opened.call(trap_cases.finish, 2)
    assert [info.attempt.rpartition(".")[2] for info in infos] == ["1", "1"]
    # `begin` has changed the state since; what is restored is what was captured.
    assert [info.step for info in opened.call(trap_cases.restore)] == [2, 2]
    assert ck.verify(root, level="data").ok


def test_a_writer_killed_after_it_has_published_has_committed(pair: Ranks, root: str) -> None:
    infos = pair.call(trap_cases.save_with_a_writer_that_dies_when_it_has_published, root)
    assert infos[0].fingerprint == infos[1].fingerprint
    for step in (1, 2):
        assert ck.verify(Path(root, step_dirname(step)), level="data").ok
    assert infos[0].fingerprint == ck.verify(Path(root, step_dirname(1))).fingerprint


@both_ranks
@config(stall_timeout_s=3.0)
def test_a_writer_that_hangs_is_ended_and_named(opened: Ranks, root: str, rank: int) -> None:
    pid = opened.call(trap_cases.writer_pid)[rank]
    os.kill(pid, signal.SIGSTOP)
    opened.call(trap_cases.begin, 2)
    for error in opened.errors(trap_cases.finish, 2, timeout_s=IN_TIME_S):
        assert isinstance(error, ck.CommitTimeoutError)
        assert error.rank == rank
        assert "no progress for 3 s" in str(error)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    goes_on(opened, root, 3, [1])


@both_ranks
@config(stall_timeout_s=3.0)
def test_a_writer_that_hangs_while_it_waits_for_another_rank_is_ended_and_named(
    opened: Ranks, root: str, rank: int
) -> None:
    waiting = ["durable", "waiting"][rank]
    opened.call(trap_cases.begin, 2, ranks=[rank])
    wait_until(lambda: opened.call(trap_cases.reached, 2, ranks=[rank]) == [waiting])
    os.kill(opened.call(trap_cases.writer_pid)[rank], signal.SIGSTOP)
    opened.call(trap_cases.begin, 2, ranks=[1 - rank])
    for error in opened.errors(trap_cases.finish, 2, timeout_s=IN_TIME_S):
        assert isinstance(error, ck.CommitTimeoutError)
        assert error.rank == rank
        assert "no progress for 3 s while waiting for" in str(error)
    goes_on(opened, root, 3, [1])


@both_ranks
@config(stall_timeout_s=3.0)
def test_a_writer_that_waits_for_a_slow_rank_is_not_taken_for_one_that_hangs(
    opened: Ranks, root: str, rank: int
) -> None:
    pids = opened.call(trap_cases.writer_pid)
    opened.call(trap_cases.begin, 2, ranks=[rank])
    time.sleep(7)
    opened.call(trap_cases.begin, 2, ranks=[1 - rank])
    assert [info.step for info in opened.call(trap_cases.finish, 2)] == [2, 2]
    assert opened.call(trap_cases.writer_pid) == pids
    goes_on(opened, root, 3, [1, 2])


def test_a_writer_that_hangs_when_its_shard_is_reported_does_not_cost_the_commit(
    pair: Ranks, root: str
) -> None:
    infos = pair.call(trap_cases.save_with_a_writer_that_stops_when_it_waits_for_the_outcome, root)
    assert infos[0].fingerprint == infos[1].fingerprint
    assert ck.verify(root, level="data").ok


@pytest.mark.slow
@pytest.mark.sample
def test_a_job_that_is_suspended_as_a_whole_goes_on_when_it_is_resumed(root: str) -> None:
    with Ranks(1, init="none") as alone:
        alone.call(trap_cases.open_kept, root, {**trap_cases.SLOW, "stall_timeout_s": 3.0})
        alone.call(trap_cases.save, 1)
        alone.call(trap_cases.begin_and_stop, 2)
        with in_the_middle(alone, root, 2):
            os.killpg(alone.pid(0), signal.SIGSTOP)
            time.sleep(5)
            os.killpg(alone.pid(0), signal.SIGCONT)
        assert [info.step for info in alone.call(trap_cases.finish, 2)] == [2]
        alone.call(trap_cases.close_kept)


def test_a_full_disk_on_one_rank_fails_the_save_on_all(pair: Ranks, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "mount", "16m"):
        root = str(tmp_path / "mount" / "root")
        pair.call(trap_cases.open_kept, root)
        pair.call(trap_cases.save, 1)
        for error in pair.errors(trap_cases.save_values, 2, [3000, 3_000_000], timeout_s=IN_TIME_S):
            assert isinstance(error, ck.StorageError)
            assert error.rank == 1
            assert "No space left" in str(error)
        goes_on(pair, root, 3, [1])
        pair.call(trap_cases.close_kept)


@config(on_error="warn", stall_timeout_s=3.0)
def test_a_failed_save_can_be_a_warning(opened: Ranks, root: str) -> None:
    os.kill(opened.call(trap_cases.writer_pid)[1], signal.SIGSTOP)
    opened.call(trap_cases.begin, 2)
    # No rank asks for its result, and none of the calls raises.
    opened.call(trap_cases.begin, 3)
    opened.call(trap_cases.finish, 3)
    assert opened.call(trap_cases.steps) == [[1, 3]] * 2
    for rank in (0, 1):
        assert "step 2 is not saved" in opened.log(rank)


# --- the call ------------------------------------------------------------------------------------


@both_ranks
def test_a_state_that_cannot_be_stored_on_one_rank_is_an_error_on_all(
    opened: Ranks, root: str, rank: int
) -> None:
    calls = opened.start(trap_cases.save_what_cannot_be_saved_on, rank, 2)
    for error in calls.errors(IN_TIME_S):
        assert isinstance(error, ck.UnsupportedStateError)
        assert error.fqn is not None
        assert "made by" in error.fqn
    # In the call on the rank itself; the other is told whose it was.
    assert calls.errors()[1 - rank].rank == rank  # type: ignore[attr-defined]
    goes_on(opened, root, 3, [1])


def test_a_state_that_cannot_be_stored_on_any_rank_leaves_nothing_on_the_disk(pair: Ranks, root: str) -> None:
    pair.call(trap_cases.open_kept, root)
    for rank in (0, 1):
        pair.errors(trap_cases.save_what_cannot_be_saved_on, rank, 1, ranks=[rank], timeout_s=IN_TIME_S)
    pair.call(trap_cases.close_kept)
    assert os.listdir(root) == []


@both_ranks
def test_ranks_do_not_go_on_failing_each_others_saves(opened: Ranks, root: str, rank: int) -> None:
    """The rank that raised knows of the failure; the other hears of it in its next call. That one save is
    lost, too, and then all is well."""
    other = 1 - rank
    for step, (bad, raised) in enumerate(
        [
            (rank, {rank: ck.UnsupportedStateError, other: None}),
            (None, {rank: None, other: ck.UnsupportedStateError}),
            (None, {rank: None, other: None}),
            (None, {rank: None, other: None}),
        ],
        start=2,
    ):
        results = opened.call(trap_cases.save_unobserved, bad, step)
        assert results == [raised[0], raised[1]], step
    assert opened.call(trap_cases.steps) == [[1, 4, 5]] * 2


@both_ranks
def test_a_step_that_is_none_counts_as_a_save_on_its_rank(opened: Ranks, root: str, rank: int) -> None:
    bad = opened.start(trap_cases.save_at, "two", ranks=[rank])
    good = opened.start(trap_cases.save_at, 2, ranks=[1 - rank])
    assert isinstance(bad.errors(IN_TIME_S)[0], TypeError)
    assert good.errors(IN_TIME_S)[0].rank == rank  # type: ignore[attr-defined]
    goes_on(opened, root, 3, [1])


@both_ranks
def test_a_step_that_is_none_fails_the_restore_of_all_ranks(opened: Ranks, root: str, rank: int) -> None:
    steps: list[Any] = [1, 1]
    steps[rank] = True
    errors = opened.errors(trap_cases.restore_at, steps, timeout_s=IN_TIME_S)
    assert isinstance(errors[rank], TypeError)
    assert errors[1 - rank].rank == rank  # type: ignore[attr-defined]
    assert all("step must be an integer, not True" in str(error) for error in errors)
    goes_on(opened, root, 3, [1])


def test_ranks_that_save_different_steps_commit_neither(opened: Ranks, root: str) -> None:
    for error in opened.errors(trap_cases.save_at_own_step, 5, timeout_s=IN_TIME_S):
        assert isinstance(error, ck.CheckpointError)
        assert error.rank == 1
        assert "step 6" in str(error)
        assert "step 5" in str(error)
    goes_on(opened, root, 7, [1])


@config(commit_timeout_s=4.0)
def test_a_rank_that_does_not_save_is_named_at_the_deadline(opened: Ranks, root: str) -> None:
    started = time.monotonic()
    (error,) = opened.errors(trap_cases.save, 2, ranks=[0], timeout_s=IN_TIME_S)
    assert isinstance(error, ck.CommitTimeoutError)
    assert error.rank == 1
    assert time.monotonic() - started < 15
    # It comes too late, is told so, and then all are even again.
    (late,) = opened.errors(trap_cases.save, 2, ranks=[1], timeout_s=IN_TIME_S)
    assert isinstance(late, ck.CommitTimeoutError)
    goes_on(opened, root, 3, [1])


@config(arena_budget_nbytes=4 << 20)
def test_a_snapshot_that_has_no_room_on_one_rank_is_an_error_on_all(opened: Ranks, root: str) -> None:
    for error in opened.errors(trap_cases.save_values, 2, [3000, 300_000], timeout_s=IN_TIME_S):
        assert isinstance(error, ck.SaveFailedError)
        assert "arena_budget_nbytes" in str(error)
    goes_on(opened, root, 3, [1])


def test_an_exception_waits_for_the_save_under_way_and_no_longer(pair: Ranks, root: str) -> None:
    calls = pair.start(trap_cases.leave_with_an_error, root, trap_cases.SLOW, trap_cases.SLOW_VALUES)
    committed, left = calls.results(30)
    assert committed.error is None, committed.trace
    assert isinstance(left.error, ZeroDivisionError)
    assert ck.verify(root, level="data").ok


def test_an_exception_fails_a_save_that_the_others_have_not_begun(pair: Ranks, root: str) -> None:
    pair.call(trap_cases.open_kept, root)
    (left,) = pair.errors(trap_cases.leave_before_the_others_save, 1, ranks=[1], timeout_s=IN_TIME_S)
    assert isinstance(left, ZeroDivisionError)
    (told,) = pair.errors(trap_cases.save, 1, ranks=[0], timeout_s=IN_TIME_S)
    assert isinstance(told, ck.SaveFailedError)
    assert told.rank == 1
    assert "left by ZeroDivisionError" in str(told)
    pair.call(trap_cases.close_kept, ranks=[0])


# --- the trainer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "init"), [(0, "file"), (1, "agent")])
def test_a_trainer_killed_in_the_middle_of_a_save(pair: Ranks, root: str, rank: int, init: Init) -> None:
    """The others are told, no writer is left behind, the last commit stands, no later one mixes attempts."""
    with Ranks(2, init=init) as ranks:
        ranks.call(trap_cases.open_kept, root, trap_cases.SLOW)
        ranks.call(trap_cases.save, 1)
        ranks.call(trap_cases.begin_and_stop, 2)
        with in_the_middle(ranks, root, 2):
            assert ranks.others(rank)
            ranks.kill(rank)
        (error,) = ranks.errors(trap_cases.finish, 2, ranks=[1 - rank], timeout_s=IN_TIME_S)
        assert isinstance(error, ck.SaveFailedError)
        assert error.rank == rank
        assert "trainer process of rank" in str(error)
        wait_until(lambda: not ranks.others(rank), IN_TIME_S)
        # Nor does a later save of the rank that is left wait for the one that is gone.
        (later,) = ranks.errors(trap_cases.save, 3, ranks=[1 - rank], timeout_s=IN_TIME_S)
        assert later.rank == rank  # type: ignore[attr-defined]
        ranks.call(trap_cases.close_kept, ranks=[1 - rank], timeout_s=IN_TIME_S)
        wait_until(lambda: not [one for one in commands(ranks.others(1 - rank)) if "spawn_main" in one])
    left = list(Path(root).glob("step-*/*/shard-*"))
    assert len(left) >= 4, "both attempts were under way"
    manifests = [path.parent.name for path in Path(root).glob("step-*/MANIFEST.json")]
    assert manifests == [step_dirname(1)]
    assert ck.verify(root, level="data").ok
    # The job starts again: what was left is no obstacle, and goes with the next commit.
    pair.call(trap_cases.open_kept, root)
    assert [info.step for info in pair.call(trap_cases.restore)] == [1, 1]
    for step in (2, 3):
        pair.call(trap_cases.save, step)
    assert [info.step for info in pair.call(trap_cases.restore)] == [3, 3]
    pair.call(trap_cases.close_kept)
    for step in (1, 2, 3):
        path = Path(root, step_dirname(step))
        manifest = read_manifest(path)
        assert {Path(ref.path).parts[0] for ref in manifest.shards} == {manifest.attempt}
        assert [found.name for found in path.iterdir() if found.is_dir()] == [manifest.attempt]


# --- NVRx as it comes ----------------------------------------------------------------------------


def test_stock_nvrx_loses_its_worker_to_a_sharded_tensor(pair: Ranks, tmp_path: Path) -> None:
    exitcode, _ = pair.call(trap_cases.stock_with_a_sharded_tensor, str(tmp_path), timeout_s=90)
    assert exitcode == 1
    pair.call(cases.local_state_dicts, str(tmp_path / "root"))


def test_stock_nvrx_is_done_on_one_rank_and_waits_for_ever_on_the_other(pair: Ranks, tmp_path: Path) -> None:
    ended = pair.call(trap_cases.stock_with_one_dead_writer, str(tmp_path), timeout_s=90)
    assert ended == [(True, True), (False, False)]
