"""A store that notes what is asked of it: which files are opened, which bytes read, which directories
listed."""

from __future__ import annotations

import builtins
import os
import threading
from collections import Counter

from ckptengine.storage.passing import PassingReader
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import BlockReader, Entry, ReadSource


class CountingStore(PosixStore):
    """opened: the files opened or read, by name. nbytes: read from them, also by name. calls: by method."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.lock = threading.Lock()

    def list(self, path: str) -> builtins.list[Entry]:
        self.calls["list"] += 1
        return super().list(path)

    def size(self, path: str) -> int:
        self.calls["size"] += 1
        return super().size(path)

    def read(self, path: str, *, limit: int) -> bytes:
        data = super().read(path, limit=limit)
        self.opened[os.path.basename(path)] += 1
        self.note(path, len(data))
        return data

    def open(self, path: str) -> BlockReader:
        self.opened[os.path.basename(path)] += 1
        return _CountingReader(super().open(path), self, path)

    def note(self, path: str, nbytes: int) -> None:
        with self.lock:
            self.nbytes[os.path.basename(path)] += nbytes


class _CountingReader(PassingReader):
    def __init__(self, inner: BlockReader, store: CountingStore, path: str) -> None:
        super().__init__(inner)
        self._store = store
        self._path = path

    def pread_into(self, offset: int, out: memoryview, source: ReadSource | None = None) -> ReadSource:
        self._store.note(self._path, out.nbytes)
        return super().pread_into(offset, out, source)
