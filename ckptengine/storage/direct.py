"""When can a transfer bypass the page cache, and from which memory?

O_DIRECT wants file offset, length and memory address aligned. What the file system asks for is read with
statx where it tells (Linux 6.1), else a page is assumed, which every file system accepts. Lustre gets whole
pages whatever it tells: 2.15 takes nothing less, and what later versions do with less is copy it. A file
system may still refuse, at open or at the first transfer, with EINVAL: `DirectFile` then goes without for
good, unless direct I/O was demanded.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from typing import Literal, Protocol

from ckptengine.errors import StorageError
from ckptengine.format.limits import PAGE
from ckptengine.storage import lustre
from ckptengine.storage.failures import storage_error
from ckptengine.storage.linux import address_of, direct_io_alignment

DirectMode = Literal["auto", "on", "off"]

HUGE_PAGE = 2 << 20
# Of the machine: 64 KiB on some arm64 kernels.
_SYSTEM_PAGE = max(PAGE, os.sysconf("SC_PAGESIZE"))
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
_DEMANDED = 'direct_io="on" was asked for; use "auto" to go through the page cache here'


class DirectFile:
    """The O_DIRECT side of an already open file: opened on first use, given up for good when refused.

    Thread-safe. The owner closes it after its last transfer.
    """

    __slots__ = ("_fd", "_flags", "_lock", "_memory", "_mode", "_offset", "_path", "_peer_fd", "_usable")

    def __init__(self, path: str, peer_fd: int, flags: int, mode: DirectMode) -> None:
        self._path = path
        self._peer_fd = peer_fd
        self._flags = flags
        self._mode = mode
        self._lock = threading.Lock()
        self._fd = -1
        self._usable = mode != "off"
        self._memory = self._offset = _SYSTEM_PAGE

    @property
    def usable(self) -> bool:
        """Not refused so far."""
        return self._usable

    @property
    def fd(self) -> int:
        """The descriptor, or -1 where it was never needed."""
        return self._fd

    def open(self) -> int:
        """The O_DIRECT descriptor, or -1 where there is none; `StorageError` if it was demanded."""
        if not self._usable:
            return -1
        with self._lock:
            if self._fd >= 0 or not self._usable:
                return self._fd
            aligned = direct_io_alignment(self._peer_fd)
            if aligned is not None:
                self._memory, self._offset = aligned
            if 0 < min(self._memory, self._offset) < _SYSTEM_PAGE and lustre.is_lustre(self._peer_fd):
                self._memory, self._offset = max(self._memory, _SYSTEM_PAGE), max(self._offset, _SYSTEM_PAGE)
            if self._memory == 0 or self._offset == 0:
                self._refused(None)
                return -1
            try:
                fd = os.open(self._path, self._flags | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                # Removed since it was opened: the peer still reads it, and nothing can open it a second time.
                self._usable = False
                return -1
            except OSError as exc:
                if exc.errno not in _REFUSALS:
                    raise storage_error(exc, self._path, "open for direct I/O") from exc
                self._refused(exc)
                return -1
            if not os.path.samestat(os.fstat(fd), os.fstat(self._peer_fd)):
                os.close(fd)
                raise StorageError(
                    "the file was replaced while it was being opened", errno=errno.ESTALE, path=self._path
                )
            self._fd = fd
            return fd

    def for_transfer(self, offset: int, data: memoryview) -> int:
        """The descriptor to use for this transfer, or -1 if it has to go through the page cache."""
        if not self._usable or not data.nbytes:
            return -1
        fd = self._fd if self._fd >= 0 else self.open()
        if fd < 0 or offset % self._offset or data.nbytes % self._offset:
            return -1
        return fd if address_of(data) % self._memory == 0 else -1

    def refuse(self, exc: OSError) -> bool:
        """Whether a failed transfer may be repeated through the page cache; gives up direct I/O if so."""
        if exc.errno not in _REFUSALS:
            return False
        with self._lock:
            self._refused(exc)
        return True

    def _refused(self, exc: OSError | None) -> None:
        if self._mode == "on":
            raise StorageError(
                "the file system does not take direct I/O",
                errno=errno.EINVAL,
                path=self._path,
                hint=_DEMANDED,
            ) from exc
        self._usable = False


class Memory(Protocol):
    """Memory to transfer from or to."""

    @property
    def view(self) -> memoryview:
        """All of it, writable."""
        ...

    @property
    def address(self) -> int:
        """Of its first byte."""
        ...


class AlignedBuffer:
    """Page-aligned private memory for transfers, made once and reused.

    `view` is the whole of it, `address` its first byte. Huge pages are asked for: a direct transfer is handed
    to the device in physically contiguous segments, and some devices work segment by segment. On a virtual
    disk, transfers from and to scattered 4 KiB pages ran at 1.0 GiB/s, from and to huge pages at 2.6, to
    huge pages addressed 4 KiB here and there at 1.0 again. `close()` gives the memory back once the last view
    taken from it is gone; unmapping it under a view would crash whoever still reads there.
    """

    __slots__ = ("_map", "_start", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise ValueError(f"a buffer needs at least one byte, not {nbytes}")
        self.nbytes = nbytes
        # Only a whole, aligned huge page can be one; what lies around it is never touched and costs nothing.
        slack = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
        self._map: mmap.mmap | None = mmap.mmap(
            -1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if slack:
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel without transparent huge pages: nothing to ask for
                pass
        address = address_of(memoryview(self._map))
        self._start = -address % HUGE_PAGE if slack else 0
        self.address = address + self._start

    @property
    def view(self) -> memoryview:
        """All of the memory, writable."""
        if self._map is None:
            raise ValueError("the buffer is closed")
        return memoryview(self._map)[self._start : self._start + self.nbytes]

    def close(self) -> None:
        """Forget the memory; it is unmapped with the last view. Idempotent."""
        self._map = None

    def __enter__(self) -> AlignedBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
