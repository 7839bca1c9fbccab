"""What a writer process says when its trainer has ended, and what it keeps between saves."""

from __future__ import annotations

from threading import Timer
from typing import Any

import msgspec
import pytest

from ckptengine.adapters import worker
from ckptengine.comm.transport import MemoryTransport
from ckptengine.write.fate import claim_commit
from ckptengine.write.messages import Outcome, WriteTask, gone_key, outcome_key
from tests.write.test_save import staged


class Process(worker._Process):
    """One whose ranks are at hand."""

    def __init__(self, task: WriteTask) -> None:
        super().__init__()
        self.task, self.ended = task, False
        self.told = self._transports[task.transport] = MemoryTransport()

    def heard(self, key: str) -> Any:
        value = self.told.peek(key)
        return None if value is None else msgspec.msgpack.decode(value)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process(staged("/nowhere", 1, 0, 1)[0])
    monkeypatch.setattr(worker, "_process", process)
    return process


def test_a_coordinator_whose_trainer_has_ended_says_that_the_attempt_failed(process: Process) -> None:
    assert process.task is not None
    worker._last_word()
    assert not process.heard(outcome_key(process.task.attempt))["committed"]
    assert "has ended" in process.heard(gone_key(process.task.attempt))["message"]


def test_the_commit_that_is_being_made_when_the_trainer_ends_is_told_as_such(process: Process) -> None:
    task = process.task
    assert task is not None
    claim_commit(process.told, task.attempt)
    heard_before: list[Any] = []

    def commit() -> None:
        heard_before.append(process.heard(gone_key(task.attempt)))
        process.told.set_if_absent(outcome_key(task.attempt), msgspec.msgpack.encode(Outcome(committed=True)))
        process.ended = True

    publishing = Timer(0.3, commit)
    publishing.start()
    worker._last_word()
    publishing.join()
    assert process.heard(outcome_key(task.attempt))["committed"]
    assert heard_before == [None], "who waits for the outcome would hear nothing else"
    assert process.heard(gone_key(task.attempt)) is not None


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_grows_with_the_number_of_saves(process: Process, ranks: int) -> None:
    kept = []
    for save in range(1, 30):
        task, _ = staged("/nowhere", save, 0, save, ranks=ranks)
        claim_commit(process.told, task.attempt)
        process.tidy(task, process.told, Outcome(committed=True))
        kept.append((len(process.told._values), len(process._past_attempts)))
    assert kept[-1] == kept[2]
