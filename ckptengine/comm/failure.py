"""How does an error of one rank travel, so that the others raise the same one, with that rank's name?"""

from __future__ import annotations

import msgspec

from ckptengine import errors
from ckptengine.errors import CheckpointError, CommitTimeoutError, StateMismatchError, StorageError

MAX_FAILURE_TEXT = 8000
"""Characters of an error's message that travel; a status page has room for no more."""


class StoppedByPeerError(CheckpointError):
    """Another rank, `rank`, has failed, and will say why itself."""


class PeerLostError(CommitTimeoutError):
    """Another rank, `rank`, has ended or gone silent: it will say nothing, and need not be waited for."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception of one rank, in a form another rank can raise. met_by: the rank that met it. follows: it
    only follows from another's. lost: the rank it names will not report."""

    kind: str
    message: str
    rank: int
    met_by: int | None = None
    path: str | None = None
    fqn: str | None = None
    offset: int | None = None
    hint: str | None = None
    errno: int | None = None
    retryable: bool = True
    repeated: bool = False
    follows: bool = False
    lost: bool = False
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()

    @staticmethod
    def of(error: BaseException, rank: int) -> Failure:
        """`rank` is the rank on which `error` happened, unless the error itself names one."""
        if isinstance(error, PeerLostError):
            return Failure(kind="CommitTimeoutError", message=error.message, rank=error.rank or 0, lost=True)
        if not isinstance(error, CheckpointError):
            return Failure(
                kind=type(error).__name__,
                message=f"{type(error).__name__}: {error}"[:MAX_FAILURE_TEXT],
                rank=rank,
                met_by=rank,
            )
        lists: dict[str, tuple[str, ...]] = {}
        if isinstance(error, StateMismatchError):
            lists = {"missing": error.missing, "unexpected": error.unexpected, "mismatched": error.mismatched}
        return Failure(
            kind=type(error).__name__,
            message=error.message[:MAX_FAILURE_TEXT],
            rank=rank if error.rank is None else error.rank,
            met_by=rank if error.met_by is None else error.met_by,
            path=error.path,
            fqn=error.fqn,
            offset=error.offset,
            hint=error.hint,
            errno=error.errno if isinstance(error, OSError) else None,
            retryable=error.retryable,
            repeated=error.repeated,
            follows=isinstance(error, StoppedByPeerError),
            lost=False,
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
        error.met_by = self.met_by
        if isinstance(error, StorageError):
            error.errno = self.errno
        if isinstance(error, StateMismatchError):
            error.missing, error.unexpected, error.mismatched = self.missing, self.unexpected, self.mismatched
        return error
