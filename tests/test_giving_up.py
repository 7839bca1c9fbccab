"""Whoever gives a save up, all ranks hear of one outcome: the manifest, if it stands, else the first word."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Timer
from typing import Any

import msgspec
import pytest

import ckptengine as ck
from ckptengine import giving_up
from ckptengine.comm.failure import Failure
from ckptengine.comm.transport import MemoryTransport
from ckptengine.format.names import AttemptId
from ckptengine.giving_up import GivingUp
from ckptengine.run import Run
from ckptengine.storage.posix import PosixStore
from ckptengine.write.fate import claim_commit, give_up
from ckptengine.write.messages import Outcome, Ready, Receipt, WriteTask, outcome_key, ready_key, receipt_key
from tests.helpers.checkpoints import read_manifest, write_checkpoint
from tests.write.test_save import staged

ERROR = ck.SaveFailedError("the writer process ended")


def nothing() -> None:
    """Ends no writer."""


def rank_of_two(rank: int, task: WriteTask, told: MemoryTransport, *, aborted: bool = False) -> GivingUp:
    run = Run(task.root, rank, 2, ck.Config(), AttemptId.parse(task.attempt).run, task.transport)
    return GivingUp(run, PosixStore(), told, lambda: aborted)


def said(told: MemoryTransport, key: str, kind: Any) -> Any:
    value = told.peek(key)
    return None if value is None else msgspec.msgpack.decode(value, type=kind)


@pytest.fixture
def told() -> MemoryTransport:
    return MemoryTransport()


@pytest.fixture
def task(tmp_path: Path) -> WriteTask:
    made, _ = staged(str(tmp_path), 1, 0, 1)
    return msgspec.structs.replace(made, may_retry=True)


def test_the_coordinators_word_reaches_those_that_wait_for_the_directory_too(
    task: WriteTask, told: MemoryTransport
) -> None:
    outcome = rank_of_two(0, task, told).settle(task, ERROR, nothing)
    assert (outcome.committed, outcome.retry) == (False, True)
    assert said(told, outcome_key(task.attempt), Outcome) == outcome
    assert said(told, ready_key(task.attempt), Ready).failure == outcome.failure


def test_a_trainer_that_wants_no_save_any_more_asks_for_no_other_attempt(
    task: WriteTask, told: MemoryTransport
) -> None:
    assert not rank_of_two(0, task, told, aborted=True).settle(task, ERROR, nothing).retry


def test_a_writer_that_had_published_has_committed(tmp_path: Path, told: MemoryTransport) -> None:
    manifest = read_manifest(write_checkpoint(tmp_path, 1, ranks=2))
    made, _ = staged(str(tmp_path), 1, 0, 1)
    task = msgspec.structs.replace(made, attempt=manifest.attempt)
    claim_commit(told, task.attempt)
    outcome = rank_of_two(0, task, told).settle(task, ERROR, nothing)
    assert (outcome.committed, outcome.fingerprint) == (True, manifest.fingerprint)
    assert said(told, outcome_key(task.attempt), Outcome) == outcome
    assert said(told, ready_key(task.attempt), Ready) is None
    assert not rank_of_two(0, made, told).settle(made, ERROR, nothing).committed, "that is another attempt's"


def test_the_first_word_stands(task: WriteTask, told: MemoryTransport) -> None:
    first = Outcome(committed=True, fingerprint="f")
    told.set(outcome_key(task.attempt), msgspec.msgpack.encode(first))
    assert rank_of_two(0, task, told).settle(task, ERROR, nothing) == first
    assert rank_of_two(1, task, told).settle(task, ERROR, nothing) == first


def test_another_rank_says_why_and_a_trainer_that_waits_for_nobody_takes_its_own_word(
    task: WriteTask, told: MemoryTransport
) -> None:
    outcome = rank_of_two(1, task, told, aborted=True).settle(task, ERROR, nothing)
    assert outcome == Outcome(committed=False, failure=Failure.of(ERROR, 1))
    assert said(told, receipt_key(task.attempt, 1), Receipt).failure == outcome.failure
    assert said(told, outcome_key(task.attempt), Outcome) is None, "the coordinator's to say"


def test_a_commit_that_is_being_made_is_not_given_up_but_ended_and_looked_for(
    tmp_path: Path, told: MemoryTransport
) -> None:
    """What the killed writer has still brought about counts."""
    made, _ = staged(str(tmp_path), 1, 0, 1)
    tasks = []

    def publish() -> None:
        manifest = read_manifest(write_checkpoint(tmp_path, 1, ranks=2))
        assert told.peek(outcome_key(task.attempt)) is None, "nothing is said before it has ended"
        tasks.append(manifest.attempt)

    attempt = read_manifest(write_checkpoint(tmp_path / "again", 1, ranks=2)).attempt
    task = msgspec.structs.replace(made, attempt=attempt)
    claim_commit(told, attempt)
    outcome = rank_of_two(0, task, told).settle(task, ERROR, publish)
    assert tasks == [attempt]
    assert outcome.committed
    assert said(told, outcome_key(attempt), Outcome) == outcome


def test_what_is_given_up_is_said_before_the_writer_has_ended_and_cannot_be_committed_any_more(
    task: WriteTask, told: MemoryTransport
) -> None:
    heard: list[Outcome] = []

    def end_writer() -> None:
        heard.append(said(told, outcome_key(task.attempt), Outcome))
        with pytest.raises(ck.SaveFailedError, match="the writer process ended"):
            claim_commit(told, task.attempt)

    outcome = rank_of_two(0, task, told).settle(task, ERROR, end_writer)
    assert heard == [outcome]
    assert not outcome.committed


def past_its_deadline(task: WriteTask, monkeypatch: pytest.MonkeyPatch) -> WriteTask:
    monkeypatch.setattr(giving_up, "OUTCOME_GRACE_S", 0.01)
    return msgspec.structs.replace(task, rank=1, deadline=time.monotonic() - 1)


def test_a_rank_that_has_waited_in_vain_keeps_the_others_from_committing(
    task: WriteTask, told: MemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = past_its_deadline(task, monkeypatch)
    outcome = rank_of_two(1, late, told).settle(late, ERROR, nothing)
    assert outcome == Outcome(committed=False, failure=Failure.of(ERROR, 1))
    with pytest.raises(ck.SaveFailedError, match="the writer process ended"):
        claim_commit(told, task.attempt)


@pytest.mark.parametrize("heard", [True, False])
def test_a_rank_that_gives_up_while_the_commit_is_made_waits_for_how_it_ends(
    task: WriteTask, told: MemoryTransport, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    late = past_its_deadline(task, monkeypatch)
    claim_commit(told, task.attempt)
    word = Outcome(committed=True, fingerprint="f")
    if heard:
        telling = Timer(0.3, told.set, (outcome_key(task.attempt), msgspec.msgpack.encode(word)))
        telling.start()
    else:
        monkeypatch.setattr(giving_up, "COMMIT_GRACE_S", 0.01)
    outcome = rank_of_two(1, late, told).settle(late, ERROR, nothing)
    if heard:
        telling.join()
        assert outcome == word
        return
    assert outcome.failure is not None
    assert outcome.failure.rank == 0
    assert "the coordinator was making the commit" in outcome.failure.message
    assert "may be committed" in (outcome.failure.hint or "")


def test_the_first_who_speaks_decides(told: MemoryTransport) -> None:
    failure = Failure.of(ERROR, 1)
    assert give_up(told, "a", failure)
    assert give_up(told, "a", Failure.of(ERROR, 2))
    claim_commit(told, "b")
    assert not give_up(told, "b", failure)
    claim_commit(told, "b")


@pytest.mark.parametrize("repeats_earlier", [False, True])
def test_a_call_that_failed_is_not_tried_again_and_says_if_it_only_repeats(
    task: WriteTask, told: MemoryTransport, repeats_earlier: bool
) -> None:
    rank_of_two(0, task, told).refuse(task.attempt, 7, ERROR, repeats_earlier)
    outcome = said(told, outcome_key(task.attempt), Outcome)
    assert (outcome.committed, outcome.retry, outcome.failure.retryable) == (False, False, False)
    assert outcome.failure.repeated == repeats_earlier
    assert (
        "step 7: refused, with the error of an earlier save" in outcome.failure.message
    ) == repeats_earlier
