"""The ranks of one job, as far as checkpoints need them: who am I, how many are we, and do we agree?

Built on a `Transport`, not on collectives: a wait has a deadline of its own and names the ranks that are
missing, works alike under gloo and NCCL, and touches neither the device nor the job's communication order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from ckptengine import errors
from ckptengine.comm.transport import Transport
from ckptengine.errors import CheckpointError, CommitTimeoutError, StateMismatchError, StorageError
from ckptengine.tracing.recorder import span

MAX_FAILURE_TEXT = 8000
"""Characters of an error's message that travel; a status page has room for no more."""

COORDINATOR = 0
"""The rank that lists steps, makes directories and commits."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception of one rank, in a form another rank can raise."""

    kind: str
    message: str
    rank: int
    path: str | None = None
    fqn: str | None = None
    offset: int | None = None
    hint: str | None = None
    errno: int | None = None
    retryable: bool = True
    repeated: bool = False
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()

    @staticmethod
    def of(error: BaseException, rank: int) -> Failure:
        """`rank` is the rank on which `error` happened, unless the error itself names one."""
        if not isinstance(error, CheckpointError):
            return Failure(
                kind=type(error).__name__,
                message=f"{type(error).__name__}: {error}"[:MAX_FAILURE_TEXT],
                rank=rank,
            )
        lists: dict[str, tuple[str, ...]] = {}
        if isinstance(error, StateMismatchError):
            lists = {"missing": error.missing, "unexpected": error.unexpected, "mismatched": error.mismatched}
        return Failure(
            kind=type(error).__name__,
            message=error.message[:MAX_FAILURE_TEXT],
            rank=rank if error.rank is None else error.rank,
            path=error.path,
            fqn=error.fqn,
            offset=error.offset,
            hint=error.hint,
            errno=error.errno if isinstance(error, OSError) else None,
            retryable=error.retryable,
            repeated=error.repeated,
            **lists,
        )

    def to_error(self, default: type[CheckpointError] = CheckpointError) -> CheckpointError:
        """The same class of error if it is one of ours, else `default`; its `rank` tells where it
        happened."""
        cls = getattr(errors, self.kind, default)
        if not (isinstance(cls, type) and issubclass(cls, CheckpointError)):
            cls = default
        error: CheckpointError = cls(self.message)
        error.rank, error.path, error.fqn, error.offset = self.rank, self.path, self.fqn, self.offset
        error.hint, error.retryable, error.repeated = self.hint, self.retryable, self.repeated
        if isinstance(error, StorageError):
            error.errno = self.errno
        if isinstance(error, StateMismatchError):
            error.missing, error.unexpected, error.mismatched = self.missing, self.unexpected, self.mismatched
        return error


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
    _calls: int = field(default=0)
    _past: list[str] = field(default_factory=list)
    """Calls whose values are still there; the coordinator's."""

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
        self._gather(
            _Report(failure=failure), what, timeout_s, lambda reports: [r for r in reports if r.failure][:1]
        )

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
            failed = [report for report in reports if report.failure]
            if failed:
                return failed[:1]
            try:
                return [_Report(summary([report.value or b"" for report in reports]))]
            except Exception as error:  # or the other ranks would wait for their deadline
                return [_Report(failure=Failure.of(error, self.rank))]

        return self._gather(_Report(value, failure), what, timeout_s, answer)[0]

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
        self.transport.set(f"{key}/{self.rank}", msgspec.msgpack.encode(report))
        if self.is_coordinator:
            reports, missing = self._collect(key, timeout_s)
            if missing:
                failure = Failure(
                    kind="CommitTimeoutError",
                    message=f"{_ranks(missing)} did not report within {timeout_s:g} s while {what}",
                    rank=missing[0],
                )
                reports = [_Report(failure=failure)]
            else:
                reports = answer(reports)
            self.transport.set(f"{key}/all", msgspec.msgpack.encode(reports))
            if not missing:
                # A rank that has reported to this call has read all of those before it.
                self._forget(self._past)
            self._past.append(key)
        else:
            try:
                # The coordinator may need the whole deadline itself before it can say who is missing.
                data = self.transport.get(f"{key}/all", timeout_s + 10.0)
            except TimeoutError:
                raise CommitTimeoutError(
                    f"the coordinator did not answer within {timeout_s:g} s while {what}", rank=COORDINATOR
                ) from None
            reports = msgspec.msgpack.decode(data, type=list[_Report])
        return _values(reports)

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
                for rank in range(self.world_size):
                    report = _Report(failure=failure) if values is None else _Report(value=values[rank])
                    self.transport.set(f"{key}/{rank}", msgspec.msgpack.encode(report))
            if values is None:
                assert failure is not None
                raise failure.to_error()
            return values[COORDINATOR]
        try:
            data = self.transport.get(f"{key}/{self.rank}", self.timeout_s)
        except TimeoutError:
            raise CommitTimeoutError(
                f"the coordinator did not answer within {self.timeout_s:g} s while {what}", rank=COORDINATOR
            ) from None
        return _values([msgspec.msgpack.decode(data, type=_Report)])[0]

    def _forget(self, keys: list[str]) -> None:
        for key in keys:
            for name in ("all", *map(str, range(self.world_size))):
                self.transport.delete(f"{key}/{name}")
        keys.clear()

    def _next_key(self) -> str:
        self._calls += 1
        return f"{self.prefix}/{self._calls}"

    def _collect(self, key: str, timeout_s: float) -> tuple[list[_Report], list[int]]:
        deadline = time.monotonic() + timeout_s
        reports, missing = [], []
        for rank in range(self.world_size):
            try:
                data = self.transport.get(f"{key}/{rank}", max(deadline - time.monotonic(), 0.001))
                reports.append(msgspec.msgpack.decode(data, type=_Report))
            except TimeoutError:
                missing.append(rank)
        return reports, missing


@contextlib.contextmanager
def _connection_named(what: str) -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise CheckpointError(
            f"the other ranks cannot be reached while {what}: {error}",
            hint="has a rank ended, or the process group been destroyed?",
        ) from error


def _values(reports: list[_Report]) -> list[bytes]:
    for report in reports:
        if report.failure is not None:
            raise report.failure.to_error()
    return [report.value or b"" for report in reports]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
