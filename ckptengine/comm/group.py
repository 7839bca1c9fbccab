"""The ranks of one job, as far as checkpoints need them: who am I, how many are we, and do we agree?

Built on a `Transport`, not on collectives: a wait has a deadline of its own and names the ranks that are
missing, works alike under gloo and NCCL, and touches neither the device nor the job's communication order.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from ckptengine.comm.failure import MAX_FAILURE_TEXT, Failure, PeerLostError, StoppedByPeerError
from ckptengine.comm.neighbours import Neighbours
from ckptengine.comm.transport import Transport, wait_for
from ckptengine.errors import CheckpointError, CommitTimeoutError
from ckptengine.tracing.recorder import span

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""So often a rank that waits looks whether one has ended or left."""

GRACE_S = 10.0
"""So much longer than the coordinator the others wait. All have the same deadline, and who gives up first
says why: it is to be the coordinator, which knows who is missing."""

COORDINATOR = 0
"""The rank that lists steps, makes directories and commits."""


class _Report(msgspec.Struct):
    value: bytes | None = None
    failure: Failure | None = None


_Answer = Callable[[list[_Report]], list[_Report]]


@dataclass
class Group:
    """`world_size` ranks on one transport. All ranks make the same calls in the same order, from their main
    thread."""

    rank: int
    world_size: int
    transport: Transport
    prefix: str
    timeout_s: float
    neighbours: Neighbours | None = None
    """Of whose end this rank hears from the kernel."""
    _calls: int = field(default=0)
    _past: list[str] = field(default_factory=list)
    """Calls whose values are still there; the coordinator's."""
    _answered: bool = field(default=True)
    """Have the others been told what came of the last call? The coordinator's."""
    _scattered: str | None = field(default=None)
    """The last call, if it was a `scatter` that succeeded; the coordinator's."""

    @property
    def is_coordinator(self) -> bool:
        return self.rank == COORDINATOR

    def key(self, what: str) -> str:
        """A prefix for keys that all ranks have, and only between this call and the next one."""
        return f"{self.prefix}/{what}-{self._calls}"

    def gather_all(
        self,
        value: bytes | None,
        failure: Failure | None = None,
        *,
        what: str,
        timeout_s: float | None = None,
    ) -> list[bytes]:
        """Every rank gives its value, or its failure; every rank gets all values in rank order.

        If any rank failed, its error is raised on all of them; if a rank does not report in time,
        `CommitTimeoutError` names it. `what` says in that message what the ranks were doing.
        """
        return self._gather(_Report(value, failure), what, timeout_s, lambda reports: reports)

    def agree(self, failure: Failure | None = None, *, what: str, timeout_s: float | None = None) -> None:
        """Every rank says that it succeeded, or how it failed; if any failed, the lowest one's error is
        raised on all. As `gather_all`, but what a rank hears does not grow with the world."""
        self._gather(_Report(failure=failure), what, timeout_s, _first_failure)

    def summarise(
        self,
        value: bytes,
        summary: Callable[[list[bytes]], bytes],
        failure: Failure | None = None,
        *,
        what: str,
        timeout_s: float | None = None,
    ) -> bytes:
        """As `agree`, and every rank gives a value; all get what the coordinator's `summary` makes of all the
        values, in rank order, so that what a rank hears does not grow with the world here either."""

        def answer(reports: list[_Report]) -> list[_Report]:
            failed = _first_failure(reports)
            if failed:
                return failed
            try:
                return [_Report(summary([report.value or b"" for report in reports]))]
            except Exception as error:  # or the other ranks would wait for their deadline
                return [_Report(failure=msgspec.structs.replace(Failure.of(error, self.rank), met_by=None))]

        return self._gather(_Report(value, failure), what, timeout_s, answer)[0]

    def leave(self, error: BaseException, *, what: str) -> None:
        """This rank does not come to the next call, as `error` ended `what` here: the others do not wait for
        it, but hear of that, at the latest after `LOOK_S`. Waits for nobody. It counts as the call, so that
        all ranks can go on together afterwards."""
        if self.world_size == 1:
            return
        if isinstance(error, Exception):
            failure = msgspec.structs.replace(Failure.of(error, self.rank), lost=True)
        else:
            text = f"this rank left {what} by {_said(error)}"[:MAX_FAILURE_TEXT]
            failure = Failure(
                kind="CheckpointError", message=text, rank=self.rank, met_by=self.rank, lost=True
            )
        told = msgspec.msgpack.encode(_Report(failure=failure))
        # Cut short in a call that all others wait in, the coordinator answers that one.
        answers = self.is_coordinator and not self._answered
        key = f"{self.prefix}/{self._calls}" if answers else self._next_key()
        try:
            self.transport.set_if_absent(f"{key}/lost", told)
            if not self.is_coordinator:
                self.transport.set_if_absent(f"{key}/{self.rank}", told)
                return
            self._answered = True
            self._past.append(key)
            self.transport.set_if_absent(f"{key}/all", msgspec.msgpack.encode([_Report(failure=failure)]))
            for rank in range(self.world_size):  # the call may be a scatter
                self.transport.set_if_absent(f"{key}/{rank}", told)
        except ConnectionError as silence:
            logger.warning("the other ranks do not hear that this one left %s: %s", what, silence)

    @contextlib.contextmanager
    def told_if_left(self, what: str) -> Iterator[None]:
        """Around what tells all ranks of every `Exception`: of what ends this one (`SystemExit`,
        `KeyboardInterrupt`) they hear as well."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self.leave(error, what=what)
            raise

    def _gather(self, report: _Report, what: str, timeout_s: float | None, answer: _Answer) -> list[bytes]:
        key = self._next_key()
        if self.world_size == 1:
            return _values(answer([report]))
        with _connection_named(what), span("wait for all ranks", "wait", {"while": what}):
            return self._exchange(
                key, report, what, self.timeout_s if timeout_s is None else timeout_s, answer
            )

    def _exchange(
        self, key: str, report: _Report, what: str, timeout_s: float, answer: _Answer
    ) -> list[bytes]:
        """answer: what the coordinator tells all ranks of what they reported."""
        told = msgspec.msgpack.encode(report)
        if report.failure is not None and report.failure.lost:
            self.transport.set_if_absent(f"{key}/lost", told)
        self.transport.set(f"{key}/{self.rank}", told)
        if self.is_coordinator:
            reports, missing = self._collect(key, what, timeout_s)
            complete = not missing and len(reports) == self.world_size
            if missing:
                failure = Failure(
                    kind="CommitTimeoutError",
                    message=f"{ranks_named(missing)} did not report within {timeout_s:g} s while {what}",
                    rank=missing[0],
                )
                reports = [_Report(failure=failure)]
            elif complete:
                reports = answer(reports)
            self.transport.set(f"{key}/all", msgspec.msgpack.encode(reports))
            self._answered, self._scattered = True, None
            if complete:
                # A rank that has reported to this call has read all of those before it.
                self._forget(self._past)
            self._past.append(key)
        else:
            reports = msgspec.msgpack.decode(self._answer(key, what, timeout_s), type=list[_Report])
        return _values(reports)

    def _answer(self, key: str, what: str, timeout_s: float) -> bytes:
        """What the coordinator says to a call. It has its deadline from when it has come itself; where it
        has not come, but another rank is known to be lost, that is what is wrong."""
        deadline = time.monotonic() + timeout_s + GRACE_S
        look_at = time.monotonic() + LOOK_S
        has_come, lost = False, None

        def peek() -> bytes | None:
            nonlocal deadline, look_at, has_come, lost
            value = self.transport.peek(f"{key}/all")
            now = time.monotonic()
            if value is not None or now < min(look_at, deadline):
                return value
            look_at = now + LOOK_S
            if not has_come and self.transport.peek(f"{key}/{COORDINATOR}") is not None:
                has_come = True
                deadline = now + timeout_s + GRACE_S
            if lost is None:
                lost = self._lost(key) or self._ended(key, what)
                if lost is not None:
                    deadline = now + GRACE_S
            if lost is not None and (lost.rank == COORDINATOR or now >= deadline):
                return self.transport.set_if_absent(
                    f"{key}/all", msgspec.msgpack.encode([_Report(failure=lost)])
                )
            if now >= deadline:
                raise CommitTimeoutError(
                    f"the coordinator did not answer within {timeout_s:g} s while {what}", rank=COORDINATOR
                )
            return None

        value = wait_for(peek, math.inf)
        assert value is not None
        return value

    def scatter(self, values: list[bytes] | None, failure: Failure | None = None, *, what: str) -> bytes:
        """The coordinator gives one value for each rank, or its failure; each rank gets its own and nothing
        else."""
        key = self._next_key()
        with _connection_named(what), span("wait for the coordinator", "wait", {"while": what}):
            return self._scatter(key, values, failure, what)

    def _scatter(self, key: str, values: list[bytes] | None, failure: Failure | None, what: str) -> bytes:
        if self.is_coordinator:
            if self.world_size > 1:
                self._past.append(key)
                lost = self.transport.peek(f"{key}/lost")
                if lost is not None:
                    values, failure = None, msgspec.msgpack.decode(lost, type=_Report).failure
                for rank in range(self.world_size):
                    report = _Report(failure=failure) if values is None else _Report(value=values[rank])
                    self.transport.set(f"{key}/{rank}", msgspec.msgpack.encode(report))
            self._answered, self._scattered = True, None if values is None else key
            if values is None:
                assert failure is not None
                raise failure.to_error()
            return values[COORDINATOR]
        deadline = time.monotonic() + self.timeout_s
        told = self._await(
            f"{key}/{self.rank}", deadline, lambda: self._ended(key, what, answer_to=self.rank)
        )
        if told is None:
            raise CommitTimeoutError(
                f"the coordinator did not answer within {self.timeout_s:g} s while {what}", rank=COORDINATOR
            )
        if isinstance(told, Failure):
            # Ranks of other hosts do not see the coordinator's end.
            for rank in range(self.world_size):
                self.transport.set_if_absent(f"{key}/{rank}", msgspec.msgpack.encode(_Report(failure=told)))
            raise told.to_error()
        return _values([msgspec.msgpack.decode(told, type=_Report)])[0]

    def among(self, members: Sequence[int], value: bytes, name: str, *, what: str) -> list[bytes]:
        """Some of the ranks, in the order given, tell each other a value after the last call of all ranks,
        which need not know. name: tells this apart from others since then. Raises `CommitTimeoutError` with
        the rank that gives none, `StoppedByPeerError` if one leaves meanwhile."""
        with _connection_named(what), span("wait for some ranks", "wait", {"while": what}):
            self.transport.set(self._among(name, self.rank), value)
            deadline = time.monotonic() + self.timeout_s
            then = f"{self.prefix}/{self._calls + 1}"
            values = []
            for rank in members:
                told = self._await(
                    self._among(name, rank), deadline, lambda: self._lost(then) or self._ended(then, what)
                )
                if told is None:
                    raise CommitTimeoutError(
                        f"rank {rank} did not report within {self.timeout_s:g} s while {what}", rank=rank
                    )
                if isinstance(told, Failure):
                    raise StoppedByPeerError(told.message, rank=told.rank)
                values.append(told)
            return values

    def forget_among(self, name: str, call: int) -> None:
        """Delete what this rank told, once the others have heard it. call: `calls` as it was."""
        self.transport.delete(f"{self.prefix}/{call}/{name}/{self.rank}")

    @property
    def calls(self) -> int:
        """How many calls all ranks have made."""
        return self._calls

    def _among(self, name: str, rank: int) -> str:
        return f"{self.prefix}/{self._calls}/{name}/{rank}"

    def _forget(self, keys: list[str]) -> None:
        for key in keys:
            for name in ("all", "lost", *map(str, range(self.world_size))):
                self.transport.delete(f"{key}/{name}")
        keys.clear()

    def _next_key(self) -> str:
        self._calls += 1
        self._answered = False
        return f"{self.prefix}/{self._calls}"

    def _collect(self, key: str, what: str, timeout_s: float) -> tuple[list[_Report], list[int]]:
        """All ranks' reports, and which ranks gave none. One that says that a rank is lost ends the wait."""
        deadline = time.monotonic() + timeout_s
        reports, missing = [], []
        for rank in range(self.world_size):
            told = self._await(
                f"{key}/{rank}",
                deadline,
                lambda: self._lost(key) or self._lost(self._scattered) or self._ended(key, what),
            )
            if isinstance(told, Failure):
                return [_Report(failure=told)], []
            if told is None:
                missing.append(rank)
            else:
                reports.append(msgspec.msgpack.decode(told, type=_Report))
                if reports[-1].failure is not None and reports[-1].failure.lost:
                    return [reports[-1]], []
        return reports, missing

    def _await(self, key: str, deadline: float, lost: Callable[[], Failure | None]) -> bytes | Failure | None:
        """The value of `key`, or what `lost` finds, which is asked now and then; None after the deadline."""
        while True:
            left = max(deadline - time.monotonic(), 0.001)
            try:
                return self.transport.get(key, min(left, LOOK_S))
            except TimeoutError:
                if left <= LOOK_S:
                    return None
                found = lost()
                if found is not None:
                    return found

    def _lost(self, key: str | None) -> Failure | None:
        """What is known of a rank that does not come to the call."""
        data = None if key is None else self.transport.peek(f"{key}/lost")
        return None if data is None else msgspec.msgpack.decode(data, type=_Report).failure

    def _ended(self, key: str, what: str, answer_to: int | None = None) -> Failure | None:
        """A rank whose process has ended before it has reported to the call; the others hear of it.
        answer_to: the coordinator, that is, before it has answered this rank."""
        for rank in [] if self.neighbours is None else self.neighbours.ended():
            if answer_to is not None and rank != COORDINATOR:
                continue
            if self.transport.peek(f"{key}/{rank if answer_to is None else answer_to}") is None:
                error = PeerLostError(f"the process of rank {rank} has ended while {what}", rank=rank)
                told = msgspec.msgpack.encode(_Report(failure=Failure.of(error, self.rank)))
                first = self.transport.set_if_absent(f"{key}/lost", told)
                return msgspec.msgpack.decode(first, type=_Report).failure
        return None


@contextlib.contextmanager
def _connection_named(what: str) -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise CheckpointError(
            f"the other ranks cannot be reached while {what}: {error}",
            hint="has a rank ended, or the process group been destroyed?",
        ) from error


def _first_failure(reports: list[_Report]) -> list[_Report]:
    """The lowest rank's, but not one that only follows another's."""
    failed = [report for report in reports if report.failure is not None]
    return sorted(failed, key=lambda report: report.failure is not None and report.failure.follows)[:1]


def _values(reports: list[_Report]) -> list[bytes]:
    for report in reports:
        if report.failure is not None:
            raise report.failure.to_error()
    return [report.value or b"" for report in reports]


def _said(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def ranks_named(ranks: Sequence[int]) -> str:
    """For a message: all of a few, else the first ones."""
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
