"""How do all ranks come to one outcome of a save that this rank gives up?

The coordinator's word ends an attempt on all ranks. Its writer says it or, if that one is given up, its
trainer: committed, if the manifest stands, else failed. The trainer of another rank tells the coordinator why
it gives up, and waits for that word. What is given up while the coordinator may still commit it is decided
by who speaks first (`ckptengine.write.fate`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import msgspec

from ckptengine.catalog.catalog import read_manifest
from ckptengine.comm.failure import Failure
from ckptengine.comm.transport import Transport
from ckptengine.errors import CheckpointError
from ckptengine.format.manifest import Manifest
from ckptengine.run import Run
from ckptengine.storage.store import Store
from ckptengine.write.fate import COMMIT_GRACE_S, give_up
from ckptengine.write.messages import Outcome, Ready, WriteTask, outcome_key, ready_key
from ckptengine.write.save import committed_as, report_failure, step_path, undecided
from ckptengine.write.waiting import OUTCOME_GRACE_S

logger = logging.getLogger(__name__)

ABORT_POLL_S = 0.2
"""So often a wait looks whether the trainer wants no save any more."""
LOOK_TIMEOUT_S = 10.0
"""For the manifest to be looked at: a storage that hangs must not hold up the word that it does."""


class GivingUp:
    """What this rank's trainer tells the others in place of its writer. aborted: tells whether it wants no
    save any more, and so waits for nobody."""

    def __init__(self, run: Run, store: Store, transport: Transport, aborted: Callable[[], bool]) -> None:
        self._run = run
        self._store = store
        self._transport = transport
        self._aborted = aborted

    def settle(self, task: WriteTask, error: CheckpointError, end_writer: Callable[[], None]) -> Outcome:
        """How the attempt ends for all ranks, as this one's writer cannot finish it. end_writer: ends it for
        good, whatever it is at: one that is only slow must not publish what was reported as failed, nor read
        the arena while the next save fills it."""
        failure = Failure.of(error, self._run.rank)
        if not self._run.is_coordinator:
            end_writer()
            left_s = max(task.deadline - time.monotonic(), 0.001)
            return self._tell_failure(task.attempt, failure, left_s) or self._stop_waiting(task, failure)
        failed = Outcome(
            committed=False,
            failure=failure,
            retry=task.may_retry and failure.retryable and not self._aborted(),
        )
        if self._run.world_size == 1:
            end_writer()
            return self._manifest_outcome(task) or failed
        if self._give_up(task, failure):
            outcome = self._tell_outcome(task.attempt, failed)  # soon: to end a process that hangs takes time
            end_writer()
            return outcome
        end_writer()
        return self._tell_outcome(task.attempt, self._manifest_outcome(task) or failed)

    def refuse(self, attempt: str, step: int, error: BaseException, repeats_earlier: bool) -> None:
        """Tell the others that this rank's call of the save failed. repeats_earlier: with the error of an
        earlier save, which they know."""
        failure = msgspec.structs.replace(Failure.of(error, self._run.rank), retryable=False)
        if repeats_earlier:
            failure = Failure(
                kind="SaveFailedError",
                message=f"step {step}: refused, with the error of an earlier save: {error}",
                rank=self._run.rank,
                retryable=False,
                repeated=True,
            )
        if self._run.world_size > 1 and self._run.is_coordinator:
            self._tell_outcome(attempt, Outcome(committed=False, failure=failure))
        elif self._run.world_size > 1:
            self._tell_failure(attempt, failure, 0.0)

    def _manifest_outcome(self, task: WriteTask) -> Outcome | None:
        """The outcome if the writer died after it had published."""
        found: list[Manifest] = []

        def look() -> None:
            with contextlib.suppress(CheckpointError, OSError):
                found.append(read_manifest(self._store, step_path(task)))

        looking = threading.Thread(target=look, name="ckpt-look", daemon=True)
        looking.start()
        looking.join(LOOK_TIMEOUT_S)
        if looking.is_alive():
            logger.warning(
                "step %d: %s did not say within %g s whether the writer had committed it",
                task.step,
                step_path(task),
                LOOK_TIMEOUT_S,
            )
        if not found or found[0].attempt != task.attempt:
            return None
        return committed_as(found[0])

    def _tell_outcome(self, attempt: str, outcome: Outcome) -> Outcome:
        try:
            if not outcome.committed:
                # Writers that still wait for the directory must not wait for the deadline.
                self._transport.set(
                    ready_key(attempt), msgspec.msgpack.encode(Ready(failure=outcome.failure))
                )
            told = self._transport.set_if_absent(outcome_key(attempt), msgspec.msgpack.encode(outcome))
            return msgspec.msgpack.decode(told, type=Outcome)
        except ConnectionError as error:
            logger.warning("the other ranks could not be told of %s: %s", attempt, error)
            return msgspec.structs.replace(outcome, retry=False)

    def _tell_failure(self, attempt: str, failure: Failure, left_s: float) -> Outcome | None:
        """The coordinator's word; None if it does not come in time, or is not waited for."""
        try:
            report_failure(attempt, self._run.rank, failure, self._transport)
            return self._coordinators_word(attempt, left_s + OUTCOME_GRACE_S)
        except ConnectionError as error:
            logger.warning("the other ranks could not be told of %s: %s", attempt, error)
            return None

    def _coordinators_word(self, attempt: str, timeout_s: float) -> Outcome | None:
        deadline = time.monotonic() + timeout_s
        while not self._aborted() and (left := deadline - time.monotonic()) > 0:
            try:
                data = self._transport.get(outcome_key(attempt), min(left, ABORT_POLL_S))
                return msgspec.msgpack.decode(data, type=Outcome)
            except TimeoutError:
                pass
        return None

    def _stop_waiting(self, task: WriteTask, failure: Failure) -> Outcome:
        """Its writer may have been gone only after its shard was durable: the coordinator can commit it."""
        if self._give_up(task, failure):
            return Outcome(committed=False, failure=failure)
        with contextlib.suppress(ConnectionError):
            word = self._coordinators_word(task.attempt, COMMIT_GRACE_S)
            if word is not None:
                return word
        failure = Failure.of(undecided(task, failure.message), self._run.rank)
        return self._manifest_outcome(task) or Outcome(committed=False, failure=failure)

    def _give_up(self, task: WriteTask, failure: Failure) -> bool:
        try:
            return give_up(self._transport, task.attempt, failure)
        except ConnectionError as error:
            logger.warning("step %d may be committed after all, no rank is reached: %s", task.step, error)
            return True
