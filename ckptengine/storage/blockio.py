"""How are a shard's blocks moved between memory and one file? The writer and reader of `PosixStore`.

Both hold two descriptors of the file, one through the page cache and one past it (O_DIRECT), and pick for
each transfer. Close happens when the last transfer has returned: a descriptor closed under a running thread
could be reused by another file, and the write would land there.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

from ckptengine.errors import StorageError
from ckptengine.storage.direct import DirectFile, DirectMode
from ckptengine.storage.failures import storage_error
from ckptengine.storage.residency import Residency
from ckptengine.storage.store import ReadSource


class _Descriptors:
    """A buffered and a direct descriptor with a count of transfers in flight; the last one out closes."""

    __slots__ = ("_closing", "_in_flight", "_lock", "direct", "fd")

    def __init__(self, fd: int, direct: DirectFile) -> None:
        self.fd = fd
        self.direct = direct
        self._lock = threading.Lock()
        self._in_flight = 0
        self._closing = False

    def enter(self) -> bool:
        """Begin a transfer; False if the file is closed."""
        with self._lock:
            if self._closing:
                return False
            self._in_flight += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._in_flight -= 1
            last = self._closing and self._in_flight == 0
        if last:
            try:
                self._close()
            except OSError:  # only after an abort or a reader's close: nothing depends on the file any more
                pass

    @property
    def busy(self) -> bool:
        return self._in_flight > 0

    def close(self) -> None:
        """Close now, or when the last transfer leaves. Raises what close reports, after closing both."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            now = self._in_flight == 0
        if now:
            self._close()

    def _close(self) -> None:
        try:
            if self.direct.fd >= 0:
                os.close(self.direct.fd)
        finally:
            os.close(self.fd)


class PosixWriter:
    """The `BlockWriter` of `PosixStore`."""

    __slots__ = ("_done", "_failure", "_files", "_path")

    def __init__(self, path: str, fd: int, mode: DirectMode) -> None:
        self._path = path
        self._files = _Descriptors(fd, DirectFile(path, fd, os.O_WRONLY, mode))
        self._failure: BaseException | None = None
        self._done = False
        # Opened now and not at the first write: a refused direct_io="on" should fail before anything is
        # written.
        self._files.direct.open()

    @property
    def direct(self) -> bool:
        return self._files.direct.fd >= 0 and self._files.direct.usable

    def pwrite(self, offset: int, data: memoryview) -> None:
        self._check_alive("write")
        if not self._files.enter():
            raise StorageError("the file is closed", errno=errno.EBADF, path=self._path, offset=offset)
        try:
            self._write(offset, data if data.format == "B" and data.ndim == 1 else data.cast("B"))
        except BaseException as exc:
            self._failure = self._failure or exc
            raise
        finally:
            self._files.leave()

    def _write(self, offset: int, data: memoryview) -> None:
        direct = self._files.direct
        while data.nbytes:
            fd = direct.for_transfer(offset, data)
            try:
                n = os.pwrite(fd if fd >= 0 else self._files.fd, data, offset)
            except OSError as exc:
                if fd >= 0 and direct.refuse(exc):
                    continue
                error = storage_error(exc, self._path, f"write {data.nbytes} bytes")
                error.offset = offset
                raise error from exc
            if n == 0:
                raise StorageError(
                    "the file system takes no more bytes", errno=errno.EIO, path=self._path, offset=offset
                )
            offset += n
            data = data[n:]

    def finish(self, nbytes: int | None = None) -> int:
        self._check_alive("finish")
        if self._files.busy:
            self._failure = StorageError("finish() was called while writes are under way", path=self._path)
            raise self._failure
        try:
            size = self._sync(nbytes)
        except BaseException as exc:
            self._failure = self._failure or exc
            raise
        self._done = True
        return size

    def _sync(self, nbytes: int | None) -> int:
        doing = "cut the file to its length"
        try:
            if nbytes is not None:
                os.ftruncate(self._files.fd, nbytes)
            doing = "fsync"
            # A lost write-back is reported once to each open descriptor, so both are asked. The direct one
            # has also bypassed the disk's own cache only on request: fsync flushes that, and writes the size.
            if self._files.direct.fd >= 0:
                os.fsync(self._files.direct.fd)
            os.fsync(self._files.fd)
            size = os.fstat(self._files.fd).st_size
            doing = "close"  # an evicted client has been seen to pass fsync and to fail only here
            self._files.close()
        except OSError as exc:
            raise storage_error(exc, self._path, doing) from exc
        return size

    def abort(self) -> None:
        if self._done:
            return
        self._failure = self._failure or StorageError(
            "the write was aborted", errno=errno.ECANCELED, path=self._path
        )
        for step in (self._files.close, lambda: os.unlink(self._path)):
            try:
                step()
            except OSError:  # best effort: retention removes what stays
                pass
        self._done = True

    def _check_alive(self, doing: str) -> None:
        failure = self._failure
        if failure is not None:
            code = failure.errno if isinstance(failure, OSError) else None
            raise StorageError(
                f"could not {doing}: an earlier operation on this file failed ({failure})",
                errno=code,
                path=self._path,
                hint="write the shard anew, into a fresh attempt",
            ) from failure
        if self._done:
            raise StorageError(f"could not {doing}: the file is finished", errno=errno.EBADF, path=self._path)


class PosixReader:
    """The `BlockReader` of `PosixStore`."""

    __slots__ = ("_files", "_path", "_residency", "_size")

    def __init__(self, path: str, fd: int, size: int, mode: DirectMode) -> None:
        self._path = path
        self._size = size
        self._files = _Descriptors(fd, DirectFile(path, fd, os.O_RDONLY, mode))
        self._residency = Residency(fd)

    @property
    def size(self) -> int:
        return self._size

    def source(self, offset: int, nbytes: int) -> ReadSource:
        self._enter(offset)
        try:
            return self._source(offset, nbytes)
        finally:
            self._files.leave()

    def pread_into(self, offset: int, out: memoryview, source: ReadSource | None = None) -> ReadSource:
        self._enter(offset)
        try:
            out = out if out.format == "B" and out.ndim == 1 else out.cast("B")
            return self._read(offset, out, source or self._source(offset, out.nbytes))
        finally:
            self._files.leave()

    def preadv_into(
        self, offset: int, outs: Sequence[memoryview], source: ReadSource | None = None
    ) -> ReadSource:
        self._enter(offset)
        try:
            nbytes = sum([out.nbytes for out in outs])
            source = source or self._source(offset, nbytes)
            if source != "direct":
                try:
                    done = os.preadv(self._files.fd, outs, offset)
                except OSError as exc:
                    raise self._error(exc, offset, nbytes) from exc
                if done == nbytes:
                    return source
            # Direct, whose rules each piece may keep or not; or cut short, and the rest tells why.
            for out in outs:
                source = self._read(offset, out, source)
                offset += out.nbytes
            return source
        finally:
            self._files.leave()

    def _error(self, exc: OSError, offset: int, nbytes: int) -> StorageError:
        error = storage_error(exc, self._path, f"read {nbytes} bytes")
        error.offset = offset
        return error

    def _enter(self, offset: int) -> None:
        if not self._files.enter():
            raise StorageError("the file is closed", errno=errno.EBADF, path=self._path, offset=offset)

    def _source(self, offset: int, nbytes: int) -> ReadSource:
        if self._residency.cached(offset, nbytes):
            return "cache"
        return "direct" if self._files.direct.open() >= 0 else "buffered"

    def _read(self, offset: int, out: memoryview, source: ReadSource) -> ReadSource:
        direct = self._files.direct
        wanted, start = out.nbytes, offset
        while out.nbytes:
            fd = direct.for_transfer(offset, out) if source == "direct" else -1
            if fd < 0 and source == "direct":
                source = "buffered"
            try:
                n = os.preadv(fd if fd >= 0 else self._files.fd, [out], offset)
            except OSError as exc:
                if fd >= 0 and direct.refuse(exc):
                    continue
                raise self._error(exc, offset, out.nbytes) from exc
            if n == 0:
                raise StorageError(
                    f"short read: the file ends at byte {offset}",
                    errno=errno.EIO,
                    path=self._path,
                    offset=start,
                    expected=f"{wanted} bytes",
                    actual=f"{offset - start} bytes",
                    hint="the file was truncated; restore an older step",
                )
            offset += n
            out = out[n:]
        return source

    def close(self) -> None:
        try:
            self._files.close()
        except OSError as exc:
            raise storage_error(exc, self._path, "close") from exc

    def __enter__(self) -> PosixReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
