"""How does a rank that reads behind its training hear how it ends on the others, and they of this one?"""

from __future__ import annotations

import logging
import threading
import time

from ckptengine.comm.failure import Failure, PeerLostError
from ckptengine.comm.group import COORDINATOR, GRACE_S
from ckptengine.comm.neighbours import Neighbours
from ckptengine.comm.rollcall import RollCall
from ckptengine.errors import CheckpointError, CommitTimeoutError
from ckptengine.read.arrivals import LOOK_S

logger = logging.getLogger(__name__)

POLL_FIRST_S = 0.002
POLL_LAST_S = 0.5


class Peers:
    """The other ranks of one streaming restore, as `rank` hears of them: `look` and `pause` in turns, in one
    thread; `done` or `fail` in any.

    timeout_s: for the slowest rank to have read all once this one has. neighbours: of whose end this rank
    hears from the kernel.
    """

    def __init__(
        self, rollcall: RollCall, rank: int, timeout_s: float, neighbours: Neighbours | None = None
    ) -> None:
        self._rollcall = rollcall
        self._rank = rank
        self._timeout_s = timeout_s
        self._neighbours = neighbours
        self._look_at = time.monotonic() + LOOK_S
        self._read_at: float | None = None
        self._coordinator_at: float | None = None

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
        """Have all ranks read all? Or the first failure.

        Raises `PeerLostError` with a rank whose process has ended before it had read all.
        """
        outcome = self._rollcall.look()
        if outcome is False and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            self._look_around()
        return outcome if isinstance(outcome, Failure) else outcome and self._read_at is not None

    def _look_around(self) -> None:
        """What need not be looked at as often."""
        for rank in [] if self._neighbours is None else self._neighbours.ended():
            if not self._rollcall.is_done(rank):
                raise PeerLostError(
                    f"the process of rank {rank} has ended while reading the shards", rank=rank
                )
        if self._read_at is not None and self._coordinator_at is None and self._rollcall.is_done(COORDINATOR):
            self._coordinator_at = time.monotonic()

    def pause(self, news: threading.Event) -> None:
        """Until it is worth looking again. news: this rank has read all, or has failed.

        Raises `CommitTimeoutError`, with the rank that is missing, once the others have had `timeout_s`.
        """
        read_at = self._read_at
        if read_at is None:
            news.wait(LOOK_S)
            return
        waited = time.monotonic() - read_at
        if self._is_over(read_at):
            missing = self._rollcall.missing
            raise CommitTimeoutError(
                f"rank {missing} did not report within {self._timeout_s:g} s while reading the shards",
                rank=missing,
            )
        time.sleep(min(max(waited / 20, POLL_FIRST_S), POLL_LAST_S))

    def _is_over(self, read_at: float) -> bool:
        """The coordinator knows who is missing, and gives up first: the others wait longer than it will,
        who has its deadline from when it has read all itself."""
        if self._rank == COORDINATOR:
            return time.monotonic() > read_at + self._timeout_s
        if time.monotonic() > read_at + self._timeout_s + GRACE_S and self._coordinator_at is None:
            self._look_around()
        since = read_at if self._coordinator_at is None else self._coordinator_at
        return time.monotonic() > since + self._timeout_s + GRACE_S

    def forget(self) -> None:
        """After a good end, of which all have heard."""
        self._rollcall.forget()
