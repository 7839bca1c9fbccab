"""How does the writer wait for bytes that are still being copied into the arena?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from ckptengine.comm.failure import Failure
from ckptengine.errors import CommitTimeoutError, SaveFailedError
from ckptengine.staging.mark import REASON_NBYTES, StagedMark
from ckptengine.tracing.recorder import span
from ckptengine.write.messages import WriteTask
from ckptengine.write.reporting import Beat, unheard

POLL_S = 0.001
"""A look costs a microsecond; a block of 16 MiB takes two milliseconds to copy."""

Staged = Callable[["int | None"], None]
"""Returns when the first so many bytes of the data are there; None: when the snapshot is complete."""

_MESSAGE_LENGTH = 500


def waiting_for(mark: StagedMark, task: WriteTask, beat: Beat = unheard) -> Staged:
    """Waits until the task's deadline, then raises `CommitTimeoutError`; the trainer's error if the snapshot
    is refused. There are beats meanwhile: it is the trainer who is slow."""

    looking = threading.Lock()

    def look_until(nbytes: int | None) -> None:
        while not mark.has(nbytes):
            reason = mark.refusal
            if reason is not None:
                raise msgspec.msgpack.decode(reason, type=Failure).to_error(SaveFailedError)
            if time.monotonic() > task.deadline:
                raise CommitTimeoutError(
                    f"step {task.step}: the state was still being copied at the deadline", rank=task.rank
                )
            beat()
            time.sleep(POLL_S)

    def wait(nbytes: int | None) -> None:
        if not mark.has(nbytes):
            # One thread looks for all: each look takes time from the copy that they wait for.
            with span("wait for the copy", "wait"), looking:
                look_until(nbytes)

    return wait


def refusal(error: BaseException, rank: int) -> bytes:
    """What to put on the mark for the other side to raise."""
    failure = msgspec.structs.replace(Failure.of(error, rank), retryable=False)
    reason = msgspec.msgpack.encode(failure)
    if len(reason) > REASON_NBYTES:
        message = f"{failure.message[:_MESSAGE_LENGTH]}…"
        reason = msgspec.msgpack.encode(
            Failure(kind=failure.kind, message=message, rank=rank, retryable=False)
        )
    return reason
