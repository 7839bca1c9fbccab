"""What is it that is being restored, for an error that comes after everything has been compared?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptengine.errors import CheckpointError, StateMismatchError


@dataclass(frozen=True, slots=True)
class Origin:
    """step: which one is read. path: its directory, or this rank's shard. rank: the one that restores."""

    step: int | None = None
    path: str | None = None
    rank: int | None = None

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Whatever an object called `name` raises as it takes its state is told with what that means for the
        rest; the object's own error is its cause. What ends a process goes through as it is."""
        try:
            yield
        except Exception as error:
            kind = StateMismatchError if isinstance(error, StateMismatchError) else CheckpointError
            what = error.message if isinstance(error, CheckpointError) else str(error)
            whose = f"the object {name!r}" if name else "the object to restore into"
            step = "" if self.step is None else f" of step {self.step}"
            told = kind(
                f"{whose} could not take its state{step}: {type(error).__name__}: {what}. The restore target "
                "is partly written",
                path=self.path,
                rank=self.rank,
                hint="do not train with the state as it is: see to the cause, or leave the object out with "
                "exclude=…, and restore again",
            )
            if isinstance(error, StateMismatchError) and isinstance(told, StateMismatchError):
                told.missing, told.unexpected = error.missing, error.unexpected
                told.mismatched = error.mismatched
            raise told from error
