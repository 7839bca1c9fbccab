"""A writer waits for bytes, not longer than its deadline, and not for what will never be there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from ckptengine.errors import CheckpointError, CommitTimeoutError, CorruptCheckpointError, SaveFailedError
from ckptengine.staging.arena import Arena
from ckptengine.staging.mark import StagedMark
from ckptengine.write.staged import refusal, waiting_for
from tests.write.test_save import staged


@pytest.fixture
def mark() -> Iterator[StagedMark]:
    with Arena(1) as arena:
        yield arena.mark


def test_it_returns_when_the_bytes_are_there(mark: StagedMark) -> None:
    task, _ = staged("/nowhere", 1, 0, 1, ranks=1)
    wait = waiting_for(mark, task)
    mark.reach(10)
    wait(10)
    passed: list[int | None] = []

    def follow() -> None:
        for nbytes in (20, 30, None):
            wait(nbytes)
            passed.append(nbytes)

    thread = threading.Thread(target=follow)
    thread.start()
    mark.reach(25)
    while passed != [20]:
        time.sleep(0.001)
    mark.complete()
    thread.join(30)
    assert passed == [20, 30, None]


def test_the_deadline_ends_the_wait(mark: StagedMark) -> None:
    task, _ = staged("/nowhere", 7, 0, 1, ranks=1, timeout_s=0.01)
    with pytest.raises(CommitTimeoutError, match="step 7: the state was still being copied"):
        waiting_for(mark, task)(1)


@pytest.mark.parametrize("length", [5, 100_000])
@pytest.mark.parametrize("kind", [SaveFailedError, CorruptCheckpointError, KeyError])
def test_a_refusal_is_raised_with_its_words_and_rank(
    mark: StagedMark, kind: type[Exception], length: int
) -> None:
    task, _ = staged("/nowhere", 1, 3, 1, ranks=4)
    mark.refuse(refusal(kind("why " + "é" * length), 3))
    with pytest.raises(CheckpointError, match="why é") as caught:
        waiting_for(mark, task)(1)
    assert caught.value.rank == 3
    if issubclass(kind, CheckpointError):
        assert type(caught.value) is kind
