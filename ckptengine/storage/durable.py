"""How does a small file appear under its name, whole and for good? The only place that renames anything."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Collection

from ckptengine.errors import StorageError
from ckptengine.storage.failures import translated

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")
# What a file system answers that has no fsync for directories (some FUSE ones): its names are as durable as
# they get.
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


def publish(path: str, data: bytes) -> None:
    """Put `data` at `path` so that readers see the old file or the new one, and a crash after the return
    keeps the new.

    Idempotent. A temporary file that a crash leaves behind is never read; `is_temporary` knows it.
    """
    directory, name = os.path.split(path)
    directory = directory or "."
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(8)}.tmp")
    with translated(temporary, "create the temporary file"):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    renamed = False
    try:
        try:
            with translated(temporary, "write"):
                write_all(fd, data, temporary)
            with translated(temporary, "fsync"):
                # Before the rename: a name must never be durable while the bytes behind it are not.
                os.fsync(fd)
            with translated(path, "rename the temporary file"):
                os.rename(temporary, path)
            renamed = True
            with translated(path, "fsync after the rename"):
                # Lustre from 2.16 on ignores fsync of a directory; a changed inode, synced, carries the
                # rename preceding it to the metadata server.
                os.utime(fd)
                os.fsync(fd)
        finally:
            with translated(path, "close"):  # some network file systems report a lost write only here
                os.close(fd)
    except BaseException:
        if not renamed:
            try:
                os.unlink(temporary)
            except OSError:
                pass  # the first error matters; a temporary file is never read
        raise
    # After the rename: without it a crash may bring the old name back although the caller was told it is
    # committed.
    sync_dir(directory)


def is_temporary(name: str, *, of: Collection[str]) -> bool:
    """Whether a file name is that of a temporary file which was to become one of the names `of`."""
    match = _TEMPORARY.fullmatch(name)
    return match is not None and match[1] in of


def write_all(fd: int, data: bytes, path: str) -> None:
    """Write every byte; the system may take fewer than offered."""
    rest = memoryview(data)
    while rest:
        n = os.write(fd, rest)
        if n == 0:
            raise StorageError("the file system takes no more bytes", errno=errno.EIO, path=path)
        rest = rest[n:]


def sync_dir(path: str) -> None:
    """Make durable which names are in the directory."""
    with translated(path, "fsync the directory"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # A new, renamed or removed name lives in the directory's own blocks, which no fsync of the file
            # covers.
            os.fsync(fd)
        except OSError as exc:
            if exc.errno not in _NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(fd)
