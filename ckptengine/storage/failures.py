"""How does an errno become an error that says what to do next?"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckptengine.errors import CheckpointError, StorageError

_EVICTED = "the file system's client lost its server; check the mount, then save into a fresh attempt"

HINTS: dict[int, str] = {
    errno.ENOSPC: "free space, or keep fewer steps; on a striped file system one full target is enough",
    errno.EDQUOT: "the quota is used up: raise it, or keep fewer steps",
    errno.EIO: "the disk or file server failed; see the kernel log, then save into a fresh attempt",
    errno.ESTALE: "the file was removed or the mount lost its server; remount and retry",
    errno.ENOTCONN: _EVICTED,
    errno.ESHUTDOWN: _EVICTED,
    errno.ETIMEDOUT: _EVICTED,
    errno.EROFS: "the file system is mounted read-only",
    errno.EACCES: "check the owner and mode of the directory",
    errno.EPERM: "check the owner and mode of the directory",
    errno.EMFILE: "raise the job's limit on open files (ulimit -n)",
    errno.ENFILE: "the machine has no more open files to give: raise fs.file-max, or end what holds them",
    errno.EEXIST: "every attempt writes under its own name; choose another",
    errno.EFBIG: "the file system or ulimit -f does not allow a file of this size",
}


OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE})
"""Whatever the descriptor was for, memory and processes included: what to do is the same."""


def storage_error(exc: OSError, path: str, doing: str) -> StorageError:
    """The `StorageError` for a failed system call; `doing` is what was tried ("write", "fsync")."""
    code = exc.errno
    reason = os.strerror(code) if code is not None else str(exc)
    hint = HINTS.get(code) if code is not None else None
    return StorageError(f"could not {doing}: {reason}", errno=code, path=path, hint=hint)


@contextmanager
def translated(path: str, doing: str) -> Iterator[None]:
    """Turn an `OSError` into a `StorageError`; a missing file and this package's errors pass as they are."""
    try:
        yield
    except (FileNotFoundError, CheckpointError):
        raise
    except OSError as exc:
        raise storage_error(exc, path, doing) from exc
