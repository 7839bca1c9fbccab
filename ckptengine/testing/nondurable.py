"""What does a protocol leave on the disk when the power goes at the worst moment?

`NonDurableStore` is a file system in memory that keeps two truths: what processes see, and what is on the
disk. Bytes reach the disk with `finish`, names with `sync_dir` of their directory, both with `publish`, and
directories with `make_dirs`: exactly what the `Store` contract promises and no more. `crash()` forgets the
first truth.

To try every moment, count once and then crash at each::

    store = NonDurableStore()
    protocol(store)
    for n in range(1, store.moments + 1):
        store = NonDurableStore(crash_at=n)
        with pytest.raises(SimulatedCrash):
            protocol(store)
        store.crash()                       # or crash(random.Random(seed)): some of what was not durable
        survives check(store)
"""

from __future__ import annotations

import builtins
import errno
import os
import posixpath
import random
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from ckptengine.errors import CorruptCheckpointError, StorageError
from ckptengine.storage.failures import storage_error
from ckptengine.storage.store import BlockReader, BlockWriter, Entry, ReadSource

_PAGE = 4096


class SimulatedCrash(BaseException):
    """The machine lost its power. No `Exception`: nothing that runs on the machine can handle it."""


@dataclass(eq=False)
class _File:
    data: bytearray
    durable: bytes | None = None  # None: no byte of it was ever made durable


@dataclass(eq=False)
class _Dir:
    names: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)


_Node = _File | _Dir


class NonDurableStore:
    """A `Store` in memory whose `crash()` drops everything that was not made durable.

    crash_at: raise `SimulatedCrash` at this moment (from 1), and from every call after it until `crash()`.
    `moments` counts the moments so far: one before each change of the disk or of what is visible.
    """

    def __init__(self, *, crash_at: int | None = None) -> None:
        self.moments = 0
        self.crash_at = crash_at
        self._down = False
        self._root = _Dir()
        self._mutex = threading.RLock()
        self._shared: dict[str, int] = {}
        self._exclusive: set[str] = set()

    def crash(self, rng: random.Random | None = None) -> None:
        """Lose the power and start again: only what was durable is left, and no lock.

        rng: with one, each change not yet durable (a name, a page, a size) survives or not by its choice: a
        real file system writes back what it likes, in the order it likes.
        """
        with self._mutex:
            _lose(self._root, rng)
            self._shared.clear()
            self._exclusive.clear()
            self.crash_at = None
            self._down = False

    def list(self, path: str) -> builtins.list[Entry]:
        with self._running():
            directory = self._dir(path, "list the directory")
            return sorted(Entry(name, isinstance(node, _Dir)) for name, node in directory.names.items())

    def size(self, path: str) -> int:
        with self._running():
            return len(self._file(path).data)

    def make_dirs(self, path: str) -> None:
        with self._running():
            path = posixpath.normpath(path)
            parts = [part for part in path.split("/") if part]
            at, changed = self._root, []
            for index, part in enumerate(parts):
                node = at.names.get(part)
                if isinstance(node, _File):
                    raise _error(errno.EEXIST, path, "make the directory")
                if node is None or index >= len(parts) - 2:  # the last two levels in any case
                    changed.append(at)
                if node is None:
                    self._moment()
                    node = at.names[part] = _Dir()
                at = node
            for directory in changed:
                self._sync(directory)

    def expect_files(self, path: str, *, files: int, file_nbytes: int) -> str | None:
        return None

    def may_fit_elsewhere(self, path: str, *, nbytes: int) -> bool:
        return False

    def read(self, path: str, *, limit: int) -> bytes:
        with self._running():
            data = self._file(path).data
            if len(data) > limit:
                raise CorruptCheckpointError(
                    "the file is too large", path=path, expected=f"at most {limit}", actual=len(data)
                )
            return bytes(data)

    def create(self, path: str, *, nbytes: int) -> BlockWriter:
        with self._running():
            directory, name = self._parent(path)
            if name in directory.names:
                raise _error(errno.EEXIST, path, "create the file")
            self._moment()
            file = directory.names[name] = _File(bytearray(nbytes))
            return _Writer(self, path, file)

    def open(self, path: str) -> BlockReader:
        with self._running():
            return _Reader(self, path, self._file(path))

    def publish(self, path: str, data: bytes) -> None:
        with self._running():
            directory, name = self._parent(path)
            if isinstance(directory.names.get(name), _Dir):
                raise _error(errno.EISDIR, path, "rename the temporary file")
            temporary = f".{name}.{secrets.token_hex(8)}.tmp"
            self._moment()
            file = directory.names[temporary] = _File(bytearray())
            self._moment()
            file.data[:] = data
            self._moment()
            file.durable = bytes(data)
            self._moment()
            directory.names[name] = directory.names.pop(temporary)
            self._sync(directory)

    def remove(self, path: str) -> None:
        with self._running():
            directory, name = self._parent(path)
            node = directory.names.get(name)
            if isinstance(node, _Dir):
                raise _error(errno.EISDIR, path, "remove")
            if node is not None:
                self._moment()
                del directory.names[name]

    def remove_tree(self, path: str) -> None:
        with self._running():
            try:
                directory, name = self._parent(path)
            except FileNotFoundError:
                return
            node = directory.names.get(name)
            if node is None:
                return
            if isinstance(node, _File):
                raise _error(errno.ENOTDIR, path, "remove the directory")
            self._empty(node)
            self._moment()
            del directory.names[name]

    def remove_dir(self, path: str) -> bool:
        with self._running():
            try:
                directory, name = self._parent(path)
            except FileNotFoundError:
                return True
            node = directory.names.get(name)
            if node is None:
                return True
            if isinstance(node, _File):
                raise _error(errno.ENOTDIR, path, "remove the directory")
            if node.names:
                return False
            self._moment()
            del directory.names[name]
            return True

    def sync_dir(self, path: str) -> None:
        with self._running():
            self._sync(self._dir(path, "fsync the directory"))

    def lock_shared(self, path: str) -> AbstractContextManager[bool]:
        return self._lock(path, exclusive=False)

    def try_lock_exclusive(self, path: str) -> AbstractContextManager[bool]:
        return self._lock(path, exclusive=True)

    @contextmanager
    def _lock(self, path: str, *, exclusive: bool) -> Iterator[bool]:
        path = posixpath.normpath(path)
        with self._running():
            self._node(path)
            held = path not in self._exclusive and not (exclusive and self._shared.get(path))
            if held and exclusive:
                self._exclusive.add(path)
            elif held:
                self._shared[path] = self._shared.get(path, 0) + 1
        try:
            yield held
        finally:
            with self._mutex:
                if held and exclusive:
                    self._exclusive.discard(path)
                elif held and self._shared.get(path):
                    self._shared[path] -= 1

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self._mutex:
            if self._down:
                raise SimulatedCrash("the machine is down")
            yield

    def _moment(self) -> None:
        self.moments += 1
        if self.moments == self.crash_at:
            self._down = True
            raise SimulatedCrash(f"at moment {self.moments}")

    def _sync(self, directory: _Dir) -> None:
        self._moment()
        directory.durable = dict(directory.names)

    def _empty(self, directory: _Dir) -> None:
        for name, node in list(directory.names.items()):
            if isinstance(node, _Dir):
                self._empty(node)
            self._moment()
            del directory.names[name]

    def _node(self, path: str) -> _Node:
        node: _Node = self._root
        for part in posixpath.normpath(path).split("/"):
            if part in ("", "."):
                continue
            if isinstance(node, _File):
                raise _error(errno.ENOTDIR, path, "look up")
            if part not in node.names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = node.names[part]
        return node

    def _dir(self, path: str, doing: str) -> _Dir:
        node = self._node(path)
        if isinstance(node, _File):
            raise _error(errno.ENOTDIR, path, doing)
        return node

    def _file(self, path: str) -> _File:
        node = self._node(path)
        if isinstance(node, _Dir):
            raise CorruptCheckpointError(
                "not a regular file", path=path, expected="a regular file", actual="a directory"
            )
        return node

    def _parent(self, path: str) -> tuple[_Dir, str]:
        parent, name = posixpath.split(posixpath.normpath(path))
        return self._dir(parent, "open the directory"), name


class _Writer:
    """The `BlockWriter` of `NonDurableStore`."""

    direct = False

    def __init__(self, store: NonDurableStore, path: str, file: _File) -> None:
        self._store = store
        self._path = path
        self._file = file
        self._done = False

    def pwrite(self, offset: int, data: memoryview) -> None:
        with self._store._running():
            self._check_open("write")
            self._store._moment()
            content = bytes(data)
            end = offset + len(content)
            if end > len(self._file.data):
                self._file.data.extend(bytes(end - len(self._file.data)))
            self._file.data[offset:end] = content

    def finish(self, nbytes: int | None = None) -> int:
        with self._store._running():
            self._check_open("finish")
            self._store._moment()
            self._done = True
            if nbytes is not None:
                del self._file.data[nbytes:]
                self._file.data.extend(bytes(nbytes - len(self._file.data)))
            self._file.durable = bytes(self._file.data)
            return len(self._file.data)

    def abort(self) -> None:
        try:
            if not self._done:
                self._done = True
                self._store.remove(self._path)
        except (OSError, SimulatedCrash):  # as far as possible
            pass

    def _check_open(self, doing: str) -> None:
        if self._done:
            raise StorageError(f"could not {doing}: the file is closed", errno=errno.EBADF, path=self._path)


class _Reader:
    """The `BlockReader` of `NonDurableStore`."""

    def __init__(self, store: NonDurableStore, path: str, file: _File) -> None:
        self._store = store
        self._path = path
        self._file = file
        self._open = True
        self.size = len(file.data)

    def source(self, offset: int, nbytes: int) -> ReadSource:
        return "cache"

    def pread_into(self, offset: int, out: memoryview, source: ReadSource | None = None) -> ReadSource:
        with self._store._running():
            if not self._open:
                raise StorageError("the file is closed", errno=errno.EBADF, path=self._path)
            data = self._file.data[offset : offset + out.nbytes]
            if len(data) < out.nbytes:
                raise StorageError(
                    f"short read: the file ends at byte {len(self._file.data)}",
                    errno=errno.EIO,
                    path=self._path,
                    offset=offset,
                    expected=f"{out.nbytes} bytes",
                    actual=f"{len(data)} bytes",
                )
            out.cast("B")[:] = data
            return "buffered"

    def preadv_into(
        self, offset: int, outs: Sequence[memoryview], source: ReadSource | None = None
    ) -> ReadSource:
        for out in outs:
            self.pread_into(offset, out, source)
            offset += out.nbytes
        return "buffered"

    def close(self) -> None:
        self._open = False

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _error(code: int, path: str, doing: str) -> StorageError:
    return storage_error(OSError(code, os.strerror(code)), path, doing)


def _lose(directory: _Dir, rng: random.Random | None) -> None:
    kept = dict(directory.durable)
    if rng is not None:
        for name in sorted({*directory.names, *directory.durable}):
            if directory.names.get(name) is not directory.durable.get(name) and rng.random() < 0.5:
                kept.pop(name, None)
                if name in directory.names:
                    kept[name] = directory.names[name]
    directory.names, directory.durable = kept, dict(kept)
    for node in kept.values():
        if isinstance(node, _Dir):
            _lose(node, rng)
        else:
            node.durable = _torn(node, rng)
            node.data = bytearray(node.durable)


def _torn(file: _File, rng: random.Random | None) -> bytes:
    """What a file holds after a crash: its durable bytes; `rng` mixes in pages and size of newer ones."""
    old, new = file.durable or b"", bytes(file.data)
    if rng is None or old == new:
        return old
    size = len(rng.choice((old, new)))
    pages = []
    for at in range(0, size, _PAGE):
        page = rng.choice((old, new))[at : at + _PAGE]
        pages.append(page.ljust(min(_PAGE, size - at), b"\0")[: size - at])
    return b"".join(pages)
