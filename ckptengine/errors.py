"""What can go wrong, as one tree of exceptions.

::

    CheckpointError
    ├── CheckpointNotFoundError   (also FileNotFoundError)  there is nothing at that path
    ├── NotCommittedError         a step without a manifest: it was never finished
    ├── CorruptCheckpointError    bytes differ from what was committed, or the file is malformed
    ├── UnsupportedFormatError    written by a newer version, or with a feature this one lacks
    ├── StateMismatchError        the target's keys, shapes or dtypes are not the checkpoint's
    ├── UnsupportedStateError     the state holds something that cannot be stored
    ├── StorageError              the file system failed (also OSError, with its errno)
    ├── SaveFailedError           a save did not reach its commit
    └── CommitTimeoutError        a deadline passed (also TimeoutError)

A message says what happened, where, and what to do next; the same facts are attributes, `None` where they do
not apply.
"""

from __future__ import annotations

import errno
from typing import Any

_LOCAL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM})


class CheckpointError(Exception):
    """Base of every error of this package.

    Attributes: `path`, `rank`, `fqn`, `offset` (bytes into the file), `expected`, `actual`, `hint` (what to
    do next), `met_by` (the rank on which another rank's error was raised first; `rank` may be the one whose
    shard it was reading), and `retryable`: whether another attempt from the same snapshot could succeed.
    """

    met_by: int | None = None

    retryable = True
    repeated = False
    """It only says again, for a later save, what all ranks were told of an earlier one."""

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        rank: int | None = None,
        fqn: str | None = None,
        offset: int | None = None,
        expected: Any = None,
        actual: Any = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.rank = rank
        self.fqn = fqn
        self.offset = offset
        self.expected = expected
        self.actual = actual
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError's own would lose errno, which it keeps outside the instance's dictionary.
        outside = {"errno": self.errno} if isinstance(self, OSError) else {}
        return _rebuilt, (type(self), {**self.__dict__, **outside})

    def __str__(self) -> str:
        where = [
            f"{label} {value}"
            for label, value in (
                ("path", self.path),
                ("rank", self.rank),
                ("met by rank", self.met_by if self.met_by != self.rank else None),
                ("tensor", self.fqn),
                ("offset", self.offset),
                ("expected", self.expected),
                ("actual", self.actual),
            )
            if value is not None
        ]
        text = self.message
        if where:
            text += f" [{', '.join(where)}]"
        if self.hint:
            text += f"; {self.hint}"
        return text


def _rebuilt(cls: type[CheckpointError], attributes: dict[str, Any]) -> CheckpointError:
    error = cls(attributes["message"])
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path."""


class NotCommittedError(CheckpointError):
    """The step exists but has no manifest: its save never committed, so it is not a checkpoint."""


class CorruptCheckpointError(CheckpointError):
    """Bytes differ from what was committed, or a file does not follow the format."""


class UnsupportedFormatError(CheckpointError):
    """The checkpoint needs a newer version of this package."""


class StateMismatchError(CheckpointError):
    """The restore target does not match the checkpoint.

    `missing`: in the target only; `unexpected`: in the checkpoint only; `mismatched`: one line for each entry
    whose shape, dtype or kind differs. All differences are listed at once and the target is untouched.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        mismatched: tuple[str, ...] = (),
        path: str | None = None,
        rank: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, path=path, rank=rank, hint=hint)
        self.missing = missing
        self.unexpected = unexpected
        self.mismatched = mismatched


class UnsupportedStateError(CheckpointError, TypeError):
    """The state holds a value that cannot be stored; `fqn` is its key path."""

    retryable = False


class StorageError(CheckpointError, OSError):
    """The file system refused or failed an operation; `errno` as the system gave it."""

    def __init__(self, message: str, *, errno: int | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.errno = errno

    @property
    def is_local(self) -> bool:
        """Whether this process's own limits or permissions are to blame: the file may well be whole."""
        return self.errno in _LOCAL


class SaveFailedError(CheckpointError):
    """A save did not reach its commit; `rank` is the rank that failed. The previous checkpoint stands."""


class CommitTimeoutError(CheckpointError, TimeoutError):
    """A deadline passed while waiting for a rank, a writer or a commit."""
