"""A store that records what is asked of another one, and how long each answer took: for `Config(trace=…)`."""

from __future__ import annotations

import builtins
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager

from ckptengine.storage.passing import PassingReader
from ckptengine.storage.store import BlockReader, BlockWriter, Entry, ReadSource, Store
from ckptengine.tracing import recorder
from ckptengine.tracing.recorder import clock, span


class TracedStore:
    """Does what `inner` does, and tells the process's recorder. Files are named from `root` on."""

    def __init__(self, inner: Store, root: str) -> None:
        self.inner = inner
        self._prefix = os.path.join(root, "")

    def _name(self, path: str) -> dict[str, str]:
        return {"file": path.removeprefix(self._prefix)}

    def list(self, path: str) -> builtins.list[Entry]:
        with span("list", "io", self._name(path)):
            return self.inner.list(path)

    def size(self, path: str) -> int:
        with span("stat", "io", self._name(path)):
            return self.inner.size(path)

    def make_dirs(self, path: str) -> None:
        with span("make directory", "io", self._name(path)):
            self.inner.make_dirs(path)

    def expect_files(self, path: str, *, files: int, file_nbytes: int) -> str | None:
        with span("set layout", "io", self._name(path)):
            return self.inner.expect_files(path, files=files, file_nbytes=file_nbytes)

    def may_fit_elsewhere(self, path: str, *, nbytes: int) -> bool:
        return self.inner.may_fit_elsewhere(path, nbytes=nbytes)

    def read(self, path: str, *, limit: int) -> bytes:
        with span("read file", "io", self._name(path)):
            return self.inner.read(path, limit=limit)

    def create(self, path: str, *, nbytes: int) -> BlockWriter:
        with span("create", "io", {**self._name(path), "reserved": nbytes}):
            return TracedWriter(self.inner.create(path, nbytes=nbytes), self._name(path)["file"])

    def open(self, path: str) -> BlockReader:
        with span("open", "io", self._name(path)):
            return TracedReader(self.inner.open(path), self._name(path)["file"])

    def publish(self, path: str, data: bytes) -> None:
        with span("publish", "io", {**self._name(path), "bytes": len(data)}):
            self.inner.publish(path, data)

    def remove(self, path: str) -> None:
        with span("remove", "io", self._name(path)):
            self.inner.remove(path)

    def remove_tree(self, path: str) -> None:
        with span("remove directory", "io", self._name(path)):
            self.inner.remove_tree(path)

    def remove_dir(self, path: str) -> bool:
        with span("remove directory", "io", self._name(path)):
            return self.inner.remove_dir(path)

    def sync_dir(self, path: str) -> None:
        with span("fsync directory", "io", self._name(path)):
            self.inner.sync_dir(path)

    def lock_shared(self, path: str) -> AbstractContextManager[bool]:
        return self.inner.lock_shared(path)

    def try_lock_exclusive(self, path: str) -> AbstractContextManager[bool]:
        return self.inner.try_lock_exclusive(path)


class TracedWriter:
    """The `BlockWriter` of a `TracedStore`."""

    def __init__(self, inner: BlockWriter, file: str) -> None:
        self.inner = inner
        self._file = file

    @property
    def direct(self) -> bool:
        return self.inner.direct

    def pwrite(self, offset: int, data: memoryview) -> None:
        way = "direct" if self.inner.direct else "buffered"
        args = {"file": self._file, "offset": offset, "bytes": data.nbytes, "way": way}
        with span("write", "io", args):
            self.inner.pwrite(offset, data)

    def finish(self, nbytes: int | None = None) -> int:
        with span("fsync", "io", {"file": self._file}):
            return self.inner.finish(nbytes)

    def abort(self) -> None:
        with span("abort", "io", {"file": self._file}):
            self.inner.abort()


class TracedReader(PassingReader):
    """The `BlockReader` of a `TracedStore`."""

    def __init__(self, inner: BlockReader, file: str) -> None:
        super().__init__(inner)
        self._file = file

    def pread_into(self, offset: int, out: memoryview, source: ReadSource | None = None) -> ReadSource:
        began = clock()
        found: ReadSource | None = None
        try:
            found = self.inner.pread_into(offset, out, source)
            return found
        finally:
            self._record(began, offset, out.nbytes, found)

    def preadv_into(
        self, offset: int, outs: Sequence[memoryview], source: ReadSource | None = None
    ) -> ReadSource:
        began = clock()
        found: ReadSource | None = None
        try:
            found = self.inner.preadv_into(offset, outs, source)
            return found
        finally:
            self._record(began, offset, sum([out.nbytes for out in outs]), found)

    def _record(self, began: int, offset: int, nbytes: int, found: ReadSource | None) -> None:
        trace = recorder.current
        if trace is not None:
            args = {"file": self._file, "offset": offset, "bytes": nbytes, "way": found or "failed"}
            trace.add("read", "io", began, clock(), args)
