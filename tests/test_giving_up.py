"""Whoever gives a save up, all ranks hear of one outcome: the manifest, if it stands, else the first word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import ckptengine as ck
from ckptengine.comm.failure import Failure
from ckptengine.comm.transport import MemoryTransport
from ckptengine.format.names import AttemptId
from ckptengine.giving_up import GivingUp
from ckptengine.run import Run
from ckptengine.storage.posix import PosixStore
from ckptengine.write.messages import Outcome, Ready, Receipt, WriteTask, outcome_key, ready_key, receipt_key
from tests.helpers.checkpoints import read_manifest, write_checkpoint
from tests.write.test_save import staged

ERROR = ck.SaveFailedError("the writer process ended")


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
    outcome = rank_of_two(0, task, told).settle(task, ERROR)
    assert (outcome.committed, outcome.retry) == (False, True)
    assert said(told, outcome_key(task.attempt), Outcome) == outcome
    assert said(told, ready_key(task.attempt), Ready).failure == outcome.failure


def test_a_trainer_that_wants_no_save_any_more_asks_for_no_other_attempt(
    task: WriteTask, told: MemoryTransport
) -> None:
    assert not rank_of_two(0, task, told, aborted=True).settle(task, ERROR).retry


def test_a_writer_that_had_published_has_committed(tmp_path: Path, told: MemoryTransport) -> None:
    manifest = read_manifest(write_checkpoint(tmp_path, 1, ranks=2))
    made, _ = staged(str(tmp_path), 1, 0, 1)
    task = msgspec.structs.replace(made, attempt=manifest.attempt)
    outcome = rank_of_two(0, task, told).settle(task, ERROR)
    assert (outcome.committed, outcome.fingerprint) == (True, manifest.fingerprint)
    assert said(told, outcome_key(task.attempt), Outcome) == outcome
    assert said(told, ready_key(task.attempt), Ready) is None
    assert not rank_of_two(0, made, told).settle(made, ERROR).committed, "that is another attempt's"


def test_the_first_word_stands(task: WriteTask, told: MemoryTransport) -> None:
    first = Outcome(committed=True, fingerprint="f")
    told.set(outcome_key(task.attempt), msgspec.msgpack.encode(first))
    assert rank_of_two(0, task, told).settle(task, ERROR) == first
    assert rank_of_two(1, task, told).settle(task, ERROR) == first


def test_another_rank_says_why_and_a_trainer_that_waits_for_nobody_takes_its_own_word(
    task: WriteTask, told: MemoryTransport
) -> None:
    outcome = rank_of_two(1, task, told, aborted=True).settle(task, ERROR)
    assert outcome == Outcome(committed=False, failure=Failure.of(ERROR, 1))
    assert said(told, receipt_key(task.attempt, 1), Receipt).failure == outcome.failure
    assert said(told, outcome_key(task.attempt), Outcome) is None, "the coordinator's to say"


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
