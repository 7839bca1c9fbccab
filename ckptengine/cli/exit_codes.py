"""With which code does a command end?"""

from __future__ import annotations

from ckptengine.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotCommittedError,
    UnsupportedFormatError,
)

GOOD = 0
FAILED = 1
USAGE = 2
DAMAGED = 3
NOT_COMMITTED = 4
NOT_FOUND = 5
UNSUPPORTED_FORMAT = 6
INTERRUPTED = 130
BROKEN_PIPE = 141

MEANINGS = (
    (GOOD, "good"),
    (FAILED, "failed (the message says why)"),
    (USAGE, "wrong usage"),
    (DAMAGED, "damaged"),
    (NOT_COMMITTED, "not committed"),
    (NOT_FOUND, "not found"),
    (UNSUPPORTED_FORMAT, "unsupported format"),
)
"""For the help; the last two codes above are the shell's own, 128 + the signal's number."""

_BY_ERROR: tuple[tuple[type[BaseException], int], ...] = (
    (CorruptCheckpointError, DAMAGED),
    (NotCommittedError, NOT_COMMITTED),
    (UnsupportedFormatError, UNSUPPORTED_FORMAT),
    (CheckpointNotFoundError, NOT_FOUND),
    (FileNotFoundError, NOT_FOUND),
    (NotADirectoryError, NOT_FOUND),
    (BrokenPipeError, BROKEN_PIPE),
    (KeyboardInterrupt, INTERRUPTED),
)


def code_for(error: BaseException) -> int:
    """The exit code for an error that ended a command."""
    for kind, code in _BY_ERROR:
        if isinstance(error, kind):
            return code
    return FAILED


def kind_of(code: int) -> str:
    """The code's name in JSON: `"not_committed"`."""
    names = {
        GOOD: "good",
        USAGE: "usage",
        DAMAGED: "damaged",
        NOT_COMMITTED: "not_committed",
        NOT_FOUND: "not_found",
        UNSUPPORTED_FORMAT: "unsupported_format",
        INTERRUPTED: "interrupted",
    }
    return names.get(code, "failed")
