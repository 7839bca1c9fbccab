"""When is a writer given up? In whatever state it falls silent, and in none while it speaks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch

import ckptengine as ck
from ckptengine import watch
from ckptengine.adapters import worker
from ckptengine.comm.group import Failure
from ckptengine.errors import CheckpointError
from ckptengine.staging.status import STATUS_NBYTES, StatusPage
from ckptengine.watch import Around, Watch
from ckptengine.write.messages import Outcome, SaveStatus, State
from ckptengine.write.waiting import OUTCOME_GRACE_S, WRITER_GRACE_S
from tests.helpers import writer_functions
from tests.write.test_save import staged

WELL = Around(exitcode=None, warm=True, copying=False, abort=None)
STATES = [None, *(state for state in get_args(State) if state != "ended")]
"""None: the writer has not begun with the save."""


class Watched:
    """A watch over a page that the test writes, by a clock that the test sets."""

    def __init__(self, rank: int, state: State | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now)
        self.task, _ = staged("/nowhere", 1, rank, 1, timeout_s=1e7)
        self.page = StatusPage(memoryview(bytearray(STATUS_NBYTES)))
        self.status = SaveStatus(attempt=self.task.attempt, state="waiting")
        config = ck.Config(stall_timeout_s=10)
        handle = ck.SaveHandle(1, time.time())
        self._watch = Watch(self.task, self.page, config, self.task.deadline, handle)
        if state is not None:
            self.says(state=state)

    def says(self, **changes: object) -> None:
        self.status = msgspec.structs.replace(self.status, words=self.status.words + 1, **changes)
        self.page.write(msgspec.msgpack.encode(self.status))

    def after(self, seconds: float, around: Around = WELL) -> Outcome | CheckpointError | None:
        """What is found after that time with a look every half second."""
        found = self._watch.look(around)
        until = self.now + seconds
        while found is None and self.now < until:
            self.now = min(self.now + 0.5, until)
            found = self._watch.look(around)
        return found

    def after_one_look(self, seconds: float) -> Outcome | CheckpointError | None:
        self.now += seconds
        return self._watch.look(WELL)


@pytest.mark.parametrize("copying", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("state", STATES)
def test_a_silent_writer_is_given_up_in_whatever_state_it_is(
    state: State | None, rank: int, copying: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(rank, state, monkeypatch)
    around = Around(exitcode=None, warm=True, copying=copying, abort=None)
    assert watched.after(10, around) is None
    found = watched.after(1, around)
    assert isinstance(found, ck.CommitTimeoutError)
    assert found.rank == rank
    assert "no progress for 10 s while " in str(found)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("state", STATES[1:])
def test_a_word_is_enough_to_be_waited_for(state: State, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(rank, state, monkeypatch)
    for _ in range(10):
        assert watched.after(9) is None
        watched.says()
    assert watched.after(9) is None
    watched.says(state="ended", outcome=Outcome(committed=True))
    assert watched.after(0) == Outcome(committed=True)


def test_a_new_writer_has_longer_until_its_imports_are_done_or_it_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starting = Around(exitcode=None, warm=False, copying=False, abort=None)
    watched = Watched(0, None, monkeypatch)
    assert watched.after(299, starting) is None
    assert watched.after(9) is None
    assert "beginning with it" in str(watched.after(2))
    watched = Watched(0, None, monkeypatch)
    assert "for 300 s while starting" in str(watched.after(301, starting))
    watched = Watched(0, "writing", monkeypatch)
    assert "for 10 s while writing" in str(watched.after(11, starting))


def test_a_trainer_that_was_suspended_does_not_blame_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(0, "writing", monkeypatch)
    assert watched.after_one_look(0) is None
    assert watched.after_one_look(1e6) is None
    assert watched.after(8) is None
    assert isinstance(watched.after(2), ck.CommitTimeoutError)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_writer_has_some_time_after_the_deadline_to_say_whom_it_waited_for(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(rank, "durable", monkeypatch)
    writers_own = watched.task.deadline + (OUTCOME_GRACE_S if rank else 0.0)
    assert watched.after_one_look(writers_own + 1.0 - watched.now) is None
    missing = Failure(kind="CommitTimeoutError", message="rank 7 did not come", rank=7)
    watched.says(state="ended", outcome=Outcome(committed=False, failure=missing))
    assert watched.after(0) == Outcome(committed=False, failure=missing)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_writer_that_speaks_is_given_up_all_the_same_soon_after_the_deadline(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(rank, "durable", monkeypatch)
    watched.says()
    ended = watched.task.deadline + WRITER_GRACE_S + (OUTCOME_GRACE_S if rank else 0.0)
    found = watched.after_one_look(ended + 0.1 - watched.now)
    assert isinstance(found, ck.CommitTimeoutError)
    assert "waiting for the " in str(found)


def test_a_clock_that_is_set_ends_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(0, "durable", monkeypatch)
    set_to = time.time() + 1e9
    monkeypatch.setattr(watch.time, "time", lambda: set_to)
    assert watched.after(1) is None


# --- a real writer, stopped at a known place -------------------------------------------------------

slow = [pytest.mark.slow, pytest.mark.sample]


@pytest.mark.parametrize(
    ("place", "doing"),
    [
        pytest.param("make_dirs", "making the attempt's directory", marks=slow),
        pytest.param("finish", "writing the shard", marks=slow),
        pytest.param("sync_dir", "making the commit", marks=slow),
        pytest.param("open", "making the commit", marks=slow),
        ("publish MANIFEST.json", "making the commit"),
    ],
)
def test_a_writer_that_stops_there_is_ended_and_the_next_save_works(
    tmp_path: Path, place: str, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ck.Config(stall_timeout_s=3.0, commit_timeout_s=600.0)
    state = {"weight": torch.arange(9.0)}
    with ck.Checkpointer(tmp_path, config=config) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(worker, "run", writer_functions.stop_at)
            patch.setenv(writer_functions.STOP_AT, place)
            handle = ckpt.async_save(1, state)
        with pytest.raises(ck.CommitTimeoutError, match=f"no progress for 3 s while {doing}"):
            handle.result(60)
        assert (handle.times.durable > 0) == (doing == "making the commit")
        assert ckpt.steps() == []
        ckpt.save(2, state)
        assert ckpt.steps() == [2]
    assert ck.verify(tmp_path).ok
