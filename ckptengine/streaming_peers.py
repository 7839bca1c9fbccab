"""How does a rank that reads behind its training hear how it ends on the others, and they of this one?"""

from __future__ import annotations

import logging
import threading
import time

from ckptengine.comm.failure import Failure
from ckptengine.comm.group import COORDINATOR
from ckptengine.comm.rollcall import RollCall
from ckptengine.errors import CheckpointError, CommitTimeoutError
from ckptengine.read.arrivals import LOOK_S

logger = logging.getLogger(__name__)

POLL_FIRST_S = 0.002
POLL_LAST_S = 0.5
GRACE_S = 10.0
"""The coordinator may need the whole deadline itself before it can say who is missing."""


class Peers:
    """The other ranks of one streaming restore, as `rank` hears of them: `look` and `pause` in turns, in one
    thread; `done` or `fail` in any.

    timeout_s: for the slowest rank to have read all once this one has.
    """

    def __init__(self, rollcall: RollCall, rank: int, timeout_s: float) -> None:
        self._rollcall = rollcall
        self._rank = rank
        self._timeout_s = timeout_s
        self._read_at: float | None = None

    def done(self) -> None:
        """This rank has read all."""
        self._rollcall.done()
        self._read_at = time.monotonic()

    def fail(self, error: BaseException, *, tell: bool) -> BaseException:
        """This rank has failed. Returns the error that counts: the first rank's that did.

        tell: the others; not if it is them that this rank has it from.
        """
        if isinstance(error, ConnectionError):
            unreachable = CheckpointError(
                f"the other ranks cannot be reached while the state is read: {error}"
            )
            unreachable.__cause__ = error
            return unreachable
        if tell:
            try:
                first = self._rollcall.fail(Failure.of(error, self._rank))
                return error if first.rank == self._rank else first.to_error()
            except ConnectionError as silence:
                logger.warning("the other ranks do not hear of a failed restore: %s", silence)
        return error

    def look(self) -> Failure | bool:
        """Have all ranks read all? Or the first failure."""
        outcome = self._rollcall.look()
        return outcome if isinstance(outcome, Failure) else outcome and self._read_at is not None

    def pause(self, news: threading.Event) -> None:
        """Until it is worth looking again. news: this rank has read all, or has failed.

        Raises `CommitTimeoutError`, with the rank that is missing, once the others have had `timeout_s`.
        """
        read_at = self._read_at
        if read_at is None:
            news.wait(LOOK_S)
            return
        waited = time.monotonic() - read_at
        if waited > self._timeout_s + (0 if self._rank == COORDINATOR else GRACE_S):
            missing = self._rollcall.missing
            raise CommitTimeoutError(
                f"rank {missing} did not report within {self._timeout_s:g} s while reading the shards",
                rank=missing,
            )
        time.sleep(min(max(waited / 20, POLL_FIRST_S), POLL_LAST_S))

    def forget(self) -> None:
        """After a good end, of which all have heard."""
        self._rollcall.forget()
