"""What does a protocol do when the Nth I/O fails, for every N?

Count once, then fail each::

    store = FaultyStore(PosixStore())
    protocol(store)
    for n in range(1, len(store.operations) + 1):
        store = FaultyStore(PosixStore(), fail_at=n, error=errno.ENOSPC)
        protocol(store)                     # must fail cleanly, or succeed nevertheless
        check(store.failed)                 # "publish MANIFEST.json", also in the log

The order of operations of several threads is not fixed; with them, the Nth differs between runs, and `failed`
tells.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, TypeVar

from ckptengine.errors import StorageError
from ckptengine.storage.failures import storage_error
from ckptengine.storage.passing import PassingReader
from ckptengine.storage.store import BlockReader, BlockWriter, Entry, ReadSource, Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

Fault = Literal["short write", "lost write", "short read", "bit flip"]
# Only these operations are counted for such a fault; an errno can hit any.
_WHERE: dict[str, frozenset[str]] = {
    "short write": frozenset({"pwrite"}),
    "lost write": frozenset({"pwrite"}),
    "short read": frozenset({"pread_into"}),
    "bit flip": frozenset({"pread_into", "read"}),
}


class FaultyStore:
    """A `Store` that hands everything on to `inner`, except the `fail_at`th operation (from 1).

    error: an errno (`EIO`, `ENOSPC`, `EDQUOT`, `ESTALE`, …) raised as `StorageError`; or `"short write"`
    (part of the bytes, then an error), `"lost write"` (success is reported, nothing is written), `"short
    read"` (part of the bytes, then an error), `"bit flip"` (one bit of what is read differs, silently).
    after: the errno is raised although the operation was done: the answer got lost, not the request.
    sticky: all later operations fail as well, as on a mount that has lost its server.
    only: names of the methods to count; None for all.
    seed: chooses the part and the bit.
    """

    def __init__(
        self,
        inner: Store,
        *,
        fail_at: int | None = None,
        error: int | Fault = errno.EIO,
        after: bool = False,
        sticky: bool = False,
        only: frozenset[str] | set[str] | None = None,
        seed: int = 0,
    ) -> None:
        self.inner = inner
        self.fail_at = fail_at
        self.error = error
        self.after = after
        self.sticky = sticky
        self.only = _WHERE[error] if isinstance(error, str) else only
        self.operations: list[str] = []  # those counted so far
        self.failed: str | None = None  # the first that failed
        self._random = random.Random(seed)
        self._mutex = threading.Lock()

    def list(self, path: str) -> builtins.list[Entry]:
        return self._run("list", path, lambda: self.inner.list(path))

    def size(self, path: str) -> int:
        return self._run("size", path, lambda: self.inner.size(path))

    def make_dirs(self, path: str) -> None:
        self._run("make_dirs", path, lambda: self.inner.make_dirs(path))

    def expect_files(self, path: str, *, files: int, file_nbytes: int) -> str | None:
        return self.inner.expect_files(path, files=files, file_nbytes=file_nbytes)  # never fails

    def may_fit_elsewhere(self, path: str, *, nbytes: int) -> bool:
        return self.inner.may_fit_elsewhere(path, nbytes=nbytes)

    def read(self, path: str, *, limit: int) -> bytes:
        fault = self._due("read", path)
        if isinstance(fault, str):
            data = bytearray(self.inner.read(path, limit=limit))
            self._flip(memoryview(data))
            return bytes(data)
        return self._do(fault, path, "read", lambda: self.inner.read(path, limit=limit))

    def create(self, path: str, *, nbytes: int) -> BlockWriter:
        fault = self._due("create", path)
        if fault is not None:
            if self.after:  # done and undone: the contract leaves no file behind a create that failed
                self.inner.create(path, nbytes=nbytes).abort()
            raise self._error(fault, path, "create")
        return _FaultyWriter(self, path, self.inner.create(path, nbytes=nbytes))

    def open(self, path: str) -> BlockReader:
        fault = self._due("open", path)
        if fault is not None and not self.after:
            raise self._error(fault, path, "open")
        reader = self.inner.open(path)
        if fault is not None:
            reader.close()
            raise self._error(fault, path, "open")
        return _FaultyReader(self, path, reader)

    def publish(self, path: str, data: bytes) -> None:
        self._run("publish", path, lambda: self.inner.publish(path, data))

    def remove(self, path: str) -> None:
        self._run("remove", path, lambda: self.inner.remove(path))

    def remove_tree(self, path: str) -> None:
        self._run("remove_tree", path, lambda: self.inner.remove_tree(path))

    def remove_dir(self, path: str) -> bool:
        return self._run("remove_dir", path, lambda: self.inner.remove_dir(path))

    def sync_dir(self, path: str) -> None:
        self._run("sync_dir", path, lambda: self.inner.sync_dir(path))

    def lock_shared(self, path: str) -> AbstractContextManager[bool]:
        return self._lock("lock_shared", path, self.inner.lock_shared)

    def try_lock_exclusive(self, path: str) -> AbstractContextManager[bool]:
        return self._lock("try_lock_exclusive", path, self.inner.try_lock_exclusive)

    @contextmanager
    def _lock(
        self, name: str, path: str, take: Callable[[str], AbstractContextManager[bool]]
    ) -> Iterator[bool]:
        fault = self._due(name, path)
        if fault is not None:
            raise self._error(fault, path, name)
        with take(path) as held:
            yield held

    def _due(self, name: str, path: str) -> int | Fault | None:
        """Count an operation; the fault it is to have, if any."""
        if self.only is not None and name not in self.only:
            return None
        with self._mutex:
            what = f"{name} {path}"
            self.operations.append(what)
            number = len(self.operations)
            if self.fail_at is None or number < self.fail_at or (number > self.fail_at and not self.sticky):
                return None
            if self.failed is None:
                self.failed = what
                when = "after it was done" if self.after else "before it was done"
                reason = self.error if isinstance(self.error, str) else errno.errorcode.get(self.error)
                logger.warning("failing operation %d, %s: %s, %s", number, what, reason, when)
            return self.error

    def _run(self, name: str, path: str, do: Callable[[], T]) -> T:
        return self._do(self._due(name, path), path, name, do)

    def _do(self, fault: int | Fault | None, path: str, name: str, do: Callable[[], T]) -> T:
        if fault is None:
            return do()
        if self.after:
            do()
        raise self._error(fault, path, name)

    def _error(self, fault: int | Fault, path: str, doing: str) -> StorageError:
        code = errno.EIO if isinstance(fault, str) else fault
        return storage_error(OSError(code, os.strerror(code)), path, f"{doing} (injected)")

    def _part(self, nbytes: int) -> int:
        with self._mutex:
            return self._random.randrange(max(1, nbytes))

    def _flip(self, data: memoryview) -> None:
        if data.nbytes:
            bit = self._part(8 * data.nbytes)
            data[bit // 8] ^= 1 << bit % 8


class _FaultyWriter:
    """A `BlockWriter` whose operations the store counts and fails; a failure poisons it."""

    def __init__(self, store: FaultyStore, path: str, inner: BlockWriter) -> None:
        self._store = store
        self._path = path
        self._inner = inner
        self._poisoned = self._finished = False

    @property
    def direct(self) -> bool:
        return self._inner.direct

    def pwrite(self, offset: int, data: memoryview) -> None:
        self._check("write")
        fault = self._store._due("pwrite", f"{self._path} at {offset}, {data.nbytes} bytes")
        if fault == "lost write":
            return
        if fault is None:
            self._inner.pwrite(offset, data)
            return
        self._poisoned = True
        if fault == "short write":
            part = self._store._part(data.nbytes)
            self._inner.pwrite(offset, data.cast("B")[:part])
        self._store._do(fault, self._path, "pwrite", lambda: self._inner.pwrite(offset, data))

    def finish(self, nbytes: int | None = None) -> int:
        self._check("finish")
        fault = self._store._due("finish", self._path)
        self._poisoned = fault is not None
        size = self._store._do(fault, self._path, "finish", lambda: self._inner.finish(nbytes))
        self._finished = True
        return size

    def abort(self) -> None:
        if self._finished:
            return
        self._inner.abort()
        if self._poisoned:  # the inner one may have finished and believe that all is well
            try:
                self._store.inner.remove(self._path)
            except (StorageError, FileNotFoundError):
                pass
        self._poisoned = True

    def _check(self, doing: str) -> None:
        if self._poisoned:
            raise StorageError(
                f"could not {doing}: an earlier operation on this file failed",
                errno=errno.EIO,
                path=self._path,
            )


class _FaultyReader(PassingReader):
    """A `BlockReader` whose reads the store counts and fails."""

    def __init__(self, store: FaultyStore, path: str, inner: BlockReader) -> None:
        super().__init__(inner)
        self._store = store
        self._path = path

    def pread_into(self, offset: int, out: memoryview, source: ReadSource | None = None) -> ReadSource:
        fault = self._store._due("pread_into", f"{self._path} at {offset}, {out.nbytes} bytes")
        if fault == "bit flip":
            found = self.inner.pread_into(offset, out, source)
            self._store._flip(out.cast("B"))
            return found
        if fault == "short read":
            self.inner.pread_into(offset, out.cast("B")[: self._store._part(out.nbytes)], source)
        return self._store._do(
            fault, self._path, "pread_into", lambda: self.inner.pread_into(offset, out, source)
        )
