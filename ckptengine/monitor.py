"""Drives saves, staged or still being staged, to their outcome, in order, from one thread of the trainer.

The writer process does the work and reports on the arena's status page, which costs a memory read to look at.
What the writer cannot report, its own death or silence, is seen here, and told to the other ranks by
`ckptengine.giving_up`. One save is with the writer at a time: retries then come before later saves on every
rank, so ranks never wait for each other in a circle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace

import msgspec

from ckptengine.adapters import worker
from ckptengine.adapters.nvrx import WriterProcess
from ckptengine.comm.failure import Failure
from ckptengine.comm.group import COORDINATOR
from ckptengine.comm.transport import Transport
from ckptengine.errors import CheckpointError, CommitTimeoutError, SaveFailedError
from ckptengine.format.names import AttemptId
from ckptengine.giving_up import ABORT_POLL_S, GivingUp
from ckptengine.handle import SaveHandle
from ckptengine.info import CommitInfo
from ckptengine.run import Run
from ckptengine.snapshot import Staging
from ckptengine.staging.arena import Arena
from ckptengine.staging.pool import ArenaPool
from ckptengine.storage.failures import HINTS, OUT_OF_FILES
from ckptengine.storage.store import Store
from ckptengine.tracing import recorder
from ckptengine.watch import Around, Watch
from ckptengine.write.messages import Outcome, WriteTask
from ckptengine.write.reserve import check_room, needed_nbytes
from ckptengine.write.save import step_path

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 10.0
"""For a copy to stop between two pieces."""


@dataclass
class PendingSave:
    """A save that has not ended. `refused` is set instead of `staging` when this rank's call itself
    failed."""

    handle: SaveHandle
    attempt: AttemptId
    deadline: float
    """Unix seconds."""
    rank_nbytes: int = 0
    staging: Staging | None = None
    """The copy, which may go on while its beginning is written."""
    task: WriteTask | None = None
    """For the writer, once the copy has begun."""
    refused: BaseException | None = None
    repeats_earlier: bool = False
    """`refused` is the error of an earlier save, which all ranks were told of then."""


class Monitor:
    """Owns the writer process and the arenas of the saves under way."""

    def __init__(self, run: Run, store: Store, pool: ArenaPool, transport: Transport) -> None:
        self._run = run
        self._pool = pool
        self._giving_up = GivingUp(run, store, transport, lambda: self._abort is not None)
        self._pending: deque[PendingSave] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._abort: str | None = None
        self._writer: WriterProcess | None = None
        # Both threads start it.
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="ckpt-monitor", daemon=True)
        self._thread.start()

    # -- the training thread --

    def start_writer(self) -> None:
        """Start the writer process if there is none; costs a few milliseconds, its imports run beside the
        training. `SaveFailedError` if it cannot be started, or there is no memory for it."""
        with self._starting:
            if self._writer is not None:
                return
            check_room(needed_nbytes(self._run.config, None), self._run.rank)
            try:
                writer = WriterProcess(self._run.rank, worker.run, worker.warm_up)
                writer.start()
            except OSError as error:
                raise SaveFailedError(
                    f"the writer process cannot be started: {error}",
                    rank=self._run.rank,
                    hint=HINTS[error.errno]
                    if error.errno in OUT_OF_FILES
                    else "raise the limit on processes or on memory",
                ) from error
            self._writer = writer

    def needed_nbytes(self) -> int:
        """Memory that the next save's writer process will yet take (see `ckptengine.write.reserve`)."""
        writer = self._writer
        if writer is None or writer.exitcode is not None:
            return needed_nbytes(self._run.config, None)
        return needed_nbytes(self._run.config, writer.pid, warm=writer.warm)

    @property
    def writer_pid(self) -> int | None:
        """The writer's process id, for health checks; None before the first save."""
        return None if self._writer is None else self._writer.pid

    def add(self, pending: PendingSave) -> None:
        with self._changed:
            self._pending.append(pending)
            self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no save is under way; False if `timeout_s` passes first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def close(self, timeout_s: float | None, reason: str) -> None:
        """End everything: saves under way get `timeout_s`, then they fail with `reason`."""
        if not self.wait(timeout_s):
            self._abort = reason
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._writer is not None:
            self._writer.close(abort=self._abort is not None)

    def kill(self, reason: str) -> None:
        """Like `close`, but wait for nothing; for a thread that must not wait any more."""
        with self._changed:
            self._abort = reason
            self._closing = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.kill()

    # -- the monitor thread --

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                pending = self._pending[0]
            try:
                self._drive(pending)
            except BaseException as error:
                logger.exception("step %d: the save monitor failed", pending.handle.step)
                # It may be reading the arena, which the next save fills.
                self._drop_writer()
                self._end(pending, Outcome(committed=False, failure=Failure.of(error, self._run.rank)))
            with self._changed:
                self._pending.popleft()
                self._changed.notify_all()

    def _drive(self, pending: PendingSave) -> None:
        if pending.refused is not None:
            self._refuse(pending, pending.refused)
            return
        staging = pending.staging
        assert staging is not None
        if error := self._await_begin(pending, staging):
            self._refuse(pending, error)
            self._end(pending, Outcome(committed=False, failure=Failure.of(error, self._run.rank)))
            return
        assert staging.arena is not None
        pending.task = staging.task
        while True:
            with recorder.span(
                "save", "whole", {"step": pending.handle.step, "attempt": str(pending.attempt)}
            ):
                outcome = self._attempt(pending, staging, staging.arena)
            recorder.flush()
            if outcome.committed or not outcome.retry or self._abort is not None:
                break
            logger.warning(
                "step %d: attempt %s failed (%s), trying again",
                pending.handle.step,
                pending.attempt,
                outcome.failure.message if outcome.failure else "",
            )
            _next_attempt(pending, staging.arena)
        self._end(pending, outcome)

    def _await_begin(self, pending: PendingSave, staging: Staging) -> BaseException | None:
        """Wait until the snapshot has its arena; returns why it never will have one."""
        while not staging.begun.wait(ABORT_POLL_S):
            error: CheckpointError
            if self._abort is not None:
                error = SaveFailedError(f"step {pending.handle.step}: {self._abort}", rank=self._run.rank)
            elif time.monotonic() > pending.deadline:
                error = CommitTimeoutError(
                    f"step {pending.handle.step}: not committed within "
                    f"{self._run.config.commit_timeout_s:g} s, this rank's state was not captured",
                    rank=self._run.rank,
                )
            else:
                continue
            return error
        # An error that came later is the writer's to report: it waits for the rest of the snapshot.
        return staging.error if staging.task is None else None

    def _attempt(self, pending: PendingSave, staging: Staging, arena: Arena) -> Outcome:
        assert pending.task is not None
        config = self._run.config
        retries_left = config.retries - pending.attempt.retry
        task = msgspec.structs.replace(pending.task, may_retry=retries_left > 0)
        try:
            self._submit(task)
        except SaveFailedError as error:
            return self._give_up(task, error)
        except Exception as cause:
            return self._give_up(
                task, SaveFailedError(f"step {task.step}: no writer process: {cause}", rank=task.rank)
            )
        watch = Watch(task, arena.status, config, pending.deadline, pending.handle)
        while True:
            writer = self._writer
            found = watch.look(
                Around(
                    exitcode=None if writer is None else writer.exitcode,
                    warm=writer is not None and writer.warm,
                    copying=not staging.done.is_set(),
                    abort=self._abort,
                )
            )
            if isinstance(found, Outcome):
                if writer is not None:
                    writer.finalize_async_save()
                return found
            if found is not None:
                return self._give_up(task, found)
            recorder.flush_if_due()
            watch.pause()

    def _submit(self, task: WriteTask) -> None:
        if self._abort is not None:
            raise SaveFailedError(f"step {task.step}: {self._abort}", rank=task.rank)
        if self._writer is not None and self._writer.exitcode is not None:
            self._drop_writer()
        if self._writer is None:
            self.start_writer()
        else:
            # The training may have taken memory since the arena was made.
            check_room(self.needed_nbytes(), self._run.rank)
        assert self._writer is not None
        self._writer.async_save(msgspec.msgpack.encode(task))

    def _drop_writer(self) -> None:
        if self._writer is not None:
            self._writer.kill()
            self._writer = None

    def _give_up(self, task: WriteTask, error: CheckpointError) -> Outcome:
        """This rank's writer cannot finish the attempt: end it for good, and let all ranks agree on the
        outcome."""
        return self._giving_up.settle(task, error, self._drop_writer)

    def _refuse(self, pending: PendingSave, error: BaseException) -> None:
        self._giving_up.refuse(str(pending.attempt), pending.handle.step, error, pending.repeats_earlier)

    def _let_go(self, pending: PendingSave, outcome: Outcome) -> None:
        """Give the arena back, once nobody copies into it any more."""
        staging = pending.staging
        if staging is None:
            return
        stopped = True
        if not staging.done.is_set():
            # The save has ended without it, so that it need not go on.
            staging.cancel(_why(outcome))
            stopped = staging.done.wait(CANCEL_TIMEOUT_S)
        arena, staging.arena = staging.arena, None
        if arena is not None and stopped:
            self._pool.release(arena)
        elif arena is not None:
            self._pool.discard(arena)

    def _end(self, pending: PendingSave, outcome: Outcome) -> None:
        handle = pending.handle
        self._let_go(pending, outcome)
        if outcome.committed and pending.task is not None:
            handle._note(committed=outcome.committed_at)
            handle._info = CommitInfo(
                step=handle.step,
                path=step_path(pending.task),
                attempt=str(pending.attempt),
                fingerprint=outcome.fingerprint,
                nbytes=outcome.nbytes,
                rank_nbytes=pending.rank_nbytes,
                times=handle.times,
                notes=outcome.notes,
            )
        else:
            handle._error = _why(outcome)
            # Else this rank's next call would raise it, refuse its own save for it, and the ranks would go on
            # failing each other's saves in turn.
            handle._observed = outcome.failure is not None and outcome.failure.repeated
            logger.warning("step %d is not saved: %s", handle.step, handle._error)
        handle._end()


def _why(outcome: Outcome) -> CheckpointError:
    failure = outcome.failure or Failure(kind="SaveFailedError", message="no reason given", rank=COORDINATOR)
    return failure.to_error(SaveFailedError)


def _next_attempt(pending: PendingSave, arena: Arena) -> None:
    """Give the staged bytes a fresh attempt id, in the task and in the header that is already in the
    arena."""
    assert pending.task is not None
    old = pending.attempt
    new = replace(old, retry=old.retry + 1)
    task = pending.task
    header = bytes(arena.payload[: task.header_nbytes])
    # Same width: Config.retries has one digit.
    arena.payload[: task.header_nbytes] = header.replace(str(old).encode(), str(new).encode())
    pending.attempt = new
    pending.task = msgspec.structs.replace(task, attempt=str(new))
