"""How does a mounted file system (a local disk, Lustre, NFS) keep the `Store` contract?"""

from __future__ import annotations

import builtins
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar

from ckptengine.errors import CorruptCheckpointError, StorageError
from ckptengine.storage import durable, lustre
from ckptengine.storage.blockio import PosixReader, PosixWriter
from ckptengine.storage.direct import DirectMode
from ckptengine.storage.failures import HINTS, storage_error, translated
from ckptengine.storage.linux import fallocate
from ckptengine.storage.lustre_policy import BY_POLICY, Striping
from ckptengine.storage.store import BlockReader, BlockWriter, Entry

logger = logging.getLogger(__name__)

# Errors that say "no locks here" and not "someone holds it": Lustre mounted without flock (ENOSYS), NFS
# directories (EBADF, EINVAL: it emulates flock with record locks, which need a file open for writing).
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL})
# Others may remove an empty parent while we descend; after so many times something else is wrong.
_MAKE_DIRS_TRIES = 10
_LOOKS = 3

T = TypeVar("T")


class PosixStore:
    """A `Store` on a mounted file system.

    direct_io: `"auto"` bypasses the page cache where the file system and the alignment allow it, `"on"` makes
    a file system that cannot an error, `"off"` never does.
    striping: how new files are striped on Lustre.
    """

    def __init__(self, direct_io: DirectMode = "auto", striping: Striping = BY_POLICY) -> None:
        self.direct_io: DirectMode = direct_io
        self.striping = striping

    def __repr__(self) -> str:
        return f"PosixStore(direct_io={self.direct_io!r})"

    def list(self, path: str) -> builtins.list[Entry]:
        def entries() -> builtins.list[Entry]:
            with os.scandir(path) as found:
                return sorted(Entry(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found)

        with translated(path, "list the directory"):
            return _by_name(entries)

    def size(self, path: str) -> int:
        with translated(path, "stat"):
            status = _by_name(lambda: os.lstat(path))
        _check_regular(path, status.st_mode)
        return status.st_size

    def make_dirs(self, path: str) -> None:
        path = os.path.normpath(path)
        parent = os.path.dirname(path)
        changed: builtins.list[str] = []
        for tries_left in reversed(range(_MAKE_DIRS_TRIES)):
            try:
                _make_missing(path, changed)
                break
            except FileNotFoundError as exc:  # another process removed a directory on the way, being empty
                if not tries_left:
                    raise storage_error(exc, path, "make the directory") from exc
        # A new directory's name is lost in a crash unless its parent is synced. Whoever made one that exists
        # may have died before that, so the last two levels (step and attempt) are synced in any case.
        for directory in dict.fromkeys((*changed, os.path.dirname(parent) or ".", parent or ".")):
            try:
                durable.sync_dir(directory)
            except StorageError as exc:
                # A parent we may not open is one we made nothing in; EACCES there says nothing about our own.
                if directory in changed or exc.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise

    def expect_files(self, path: str, *, files: int, file_nbytes: int) -> str | None:
        return lustre.set_default(path, self.striping, files=files, file_nbytes=file_nbytes)

    def may_fit_elsewhere(self, path: str, *, nbytes: int) -> bool:
        return lustre.has_room(path, nbytes)

    def read(self, path: str, *, limit: int) -> bytes:
        fd, size = _open_regular(path)
        try:
            if size > limit:
                raise CorruptCheckpointError(
                    "the file is too large", path=path, expected=f"at most {limit}", actual=size
                )
            parts = []
            # One byte more than allowed: the file may be growing, and what fstat said is then already wrong.
            left = limit + 1
            with translated(path, "read"):
                while left and (part := os.read(fd, min(left, max(size + 1, 1 << 16)))):
                    parts.append(part)
                    left -= len(part)
            if not left:
                raise CorruptCheckpointError("the file is too large", path=path, expected=f"at most {limit}")
            return b"".join(parts)
        finally:
            os.close(fd)

    def create(self, path: str, *, nbytes: int) -> BlockWriter:
        with translated(path, "create the file"):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            if nbytes:
                _reserve(fd, nbytes, path)
            with translated(path, "open for direct I/O"):
                return PosixWriter(path, fd, self.direct_io)
        except BaseException:
            with suppress(OSError):
                os.close(fd)
            with suppress(OSError):
                os.unlink(path)
            raise

    def open(self, path: str) -> BlockReader:
        fd, size = _open_regular(path)
        if size and lustre.is_released(fd):
            logger.warning("%s is in the archive only: reading it waits until Lustre has fetched it", path)
        return PosixReader(path, fd, size, self.direct_io)

    def publish(self, path: str, data: bytes) -> None:
        durable.publish(path, data)

    def remove(self, path: str) -> None:
        with translated(path, "remove"), suppress(FileNotFoundError):
            os.unlink(path)

    def remove_tree(self, path: str) -> None:
        with translated(path, "remove the directory"):
            _remove_tree(path, None)

    def remove_dir(self, path: str) -> bool:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return True
        except OSError as exc:
            if exc.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise storage_error(exc, path, "remove the directory") from exc
        return True

    def sync_dir(self, path: str) -> None:
        durable.sync_dir(path)

    def lock_shared(self, path: str) -> AbstractContextManager[bool]:
        return _flock(path, fcntl.LOCK_SH)

    def try_lock_exclusive(self, path: str) -> AbstractContextManager[bool]:
        return _flock(path, fcntl.LOCK_EX)


def _by_name(look: Callable[[], T]) -> T:
    """What `look` finds by a name; it looks again where what the name stood for is gone.

    Network file systems and FUSE look a name up and then ask for what it stood for. If another client
    removes that in between, as retention does while a job opens the root, the answer is ESTALE; the next look
    finds that there is nothing, or what is there now. A mount that lost its server gives ESTALE again.
    """
    for _ in range(_LOOKS - 1):
        try:
            return look()
        except OSError as exc:
            if exc.errno != errno.ESTALE:
                raise
    return look()


def _check_regular(path: str, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kind = (
        "a directory" if stat.S_ISDIR(mode) else "a symbolic link" if stat.S_ISLNK(mode) else "a special file"
    )
    raise CorruptCheckpointError("not a regular file", path=path, expected="a regular file", actual=kind)


def _open_regular(path: str) -> tuple[int, int]:
    """(descriptor, size). O_NONBLOCK: opening a FIFO someone put there must not wait for its other end."""
    try:
        fd = _by_name(lambda: os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    except FileNotFoundError:
        raise
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, a socket
            _check_regular(path, stat.S_IFLNK if exc.errno == errno.ELOOP else stat.S_IFSOCK)
        raise storage_error(exc, path, "open") from exc
    try:
        with translated(path, "stat"):
            status = os.fstat(fd)
        _check_regular(path, status.st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd, status.st_size


def _make_missing(path: str, changed: list[str]) -> None:
    """Make `path` and its missing parents, adding to `changed` each directory that got a new name."""
    missing = []
    at = path
    while at and not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError as exc:
            if not os.path.isdir(directory):
                raise StorageError(
                    "could not make the directory: a file of that name exists",
                    errno=errno.EEXIST,
                    path=directory,
                    hint="give another directory, or move the file away",
                ) from exc
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise storage_error(exc, directory, "make the directory") from exc
        parent = os.path.dirname(directory) or "."
        if parent not in changed:
            changed.append(parent)


def _reserve(fd: int, nbytes: int, path: str) -> None:
    """Allocate now: a full disk shows before the first block, and no write has to change the size."""
    try:
        fallocate(fd, nbytes)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS):
            raise StorageError(
                f"could not reserve {nbytes} bytes: {os.strerror(exc.errno or 0)}",
                errno=exc.errno,
                path=path,
                hint=HINTS.get(exc.errno or 0),
            ) from exc


def _remove_tree(name: str, parent_fd: int | None) -> None:
    """Remove a directory through descriptors, so that no symbolic link put in its place is ever followed."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    except FileNotFoundError:
        return
    try:
        with os.scandir(fd) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for child, is_dir in found:
            if is_dir:
                _remove_tree(child, fd)
            else:
                with suppress(FileNotFoundError):
                    os.unlink(child, dir_fd=fd)
    finally:
        os.close(fd)
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=parent_fd)


@contextmanager
def _flock(path: str, kind: int) -> Iterator[bool]:
    with translated(path, "open to lock"):
        fd = _by_name(lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    try:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as exc:
            if exc.errno not in _NO_LOCKS:
                raise storage_error(exc, path, "lock") from exc
            yield True
            return
        try:
            yield True
        finally:
            # Not left to close: a forked child shares the lock and would keep it.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
