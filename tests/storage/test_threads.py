"""Threads that cannot be had: those there are do the work, and none outlives the call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from ckptengine.storage.threads import in_threads


def failing_start(error: BaseException, after: int) -> Callable[[threading.Thread], None]:
    """`Thread.start` that raises from the `after`th call on."""
    start, calls = threading.Thread.start, 0

    def patched(self: threading.Thread) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        start(self)

    return patched


@pytest.mark.parametrize("after", [0, 1, 2])
def test_the_work_is_done_by_the_threads_there_are(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    monkeypatch.setattr(
        threading.Thread, "start", failing_start(RuntimeError("can't start new thread"), after)
    )
    done: list[int] = []
    workers = set()

    def step(job: int, _: None) -> None:
        workers.add(threading.get_ident())
        time.sleep(0.005)
        done.append(job)

    in_threads(range(12), 4, lambda: None, step)
    assert sorted(done) == list(range(12))
    assert len(workers) == 1 + after


def test_no_thread_goes_on_after_an_interrupt_between_two_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", failing_start(KeyboardInterrupt(), 1))
    before = threading.active_count()
    begun: list[int] = []

    def step(job: int, _: None) -> None:
        begun.append(job)
        time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt):
        in_threads(range(100), 3, lambda: None, step)
    assert threading.active_count() <= before
    assert len(begun) <= 2
