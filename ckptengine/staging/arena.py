"""Where does a snapshot live between the copy and the disk? In memory that trainer and writer process share.

An arena is a memfd: not bounded by the size of `/dev/shm`, gone with its last user even after a SIGKILL,
mapped by the writer process through `/proc/<pid>/fd/<fd>`, and O_DIRECT writes straight from it. It is made
once, all its pages touched (fresh pages cost five to ten times the copy into them), in huge pages where the
machine has them (`_prefault`), and reused for every save.

Layout: `STATUS_NBYTES` of what trainer and writer tell each other, the last page of it the mark
(`ckptengine.staging.mark`), the rest the status page (`ckptengine.staging.status`); then `capacity` bytes of
payload, page-aligned.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from ckptengine.errors import SaveFailedError, StorageError
from ckptengine.format.limits import PAGE, round_up
from ckptengine.staging.mark import MARK_NBYTES, StagedMark
from ckptengine.staging.status import STATUS_NBYTES, StatusPage
from ckptengine.storage.direct import HUGE_PAGE
from ckptengine.storage.failures import HINTS, OUT_OF_FILES
from ckptengine.storage.headroom import available_memory, in_turn
from ckptengine.storage.linux import MADV_POPULATE_WRITE, collapse, madvise, map_shared, unmap
from ckptengine.storage.threads import in_threads

logger = logging.getLogger(__name__)

GRAIN = HUGE_PAGE
"""Capacities are rounded up to this, so that a state that grows a little still fits."""

_NAME = "ckptengine-arena"
_PREFAULT_PIECE = 64 << 20
# What huge pages may cost: as much as small ones at least do. So in the worst case, where it is given up, an
# arena takes the grace longer than one of small pages.
_COLLAPSE_S_PER_GIB = 0.4
_COLLAPSE_GRACE_S = 0.2
_COLLAPSE_TRIAL_NBYTES = 32 << 20
_NEARLY_ALL = 0.9
HINT = "free memory, raise the memory limit of the job, or use max_arenas=1"
# Sealed so that no process can shrink it under another one's mapping, which would end that one with SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """Shared, pre-faulted memory for one snapshot.

    capacity: payload bytes; rounded up to 2 MiB. `view` is the whole mapping from `address` on, `status_page`
    its first `STATUS_NBYTES`, `payload` the rest, from `payload_address` on.

    try_huge: False where it is not kept for long: huge pages may take a fifth of a second to come by, or not
    to. prefault: False where pages may come later, when they are written to. held_back: bytes that must stay
    available beside it, for the writer process; `SaveFailedError` if they would not. `huge` tells whether
    nearly all of it is in huge pages: physically contiguous, as devices like it.

    `close()` gives up the descriptor and this object's mapping. Memory that is still looked at, through a
    memoryview or a tensor made from one, stays mapped until the last of them is gone: unmapping it would
    crash them. Bare addresses keep nothing alive and must not be used after `close()`. `before_close` is for
    whoever has told someone else of the memory, such as CUDA, and must take that back first.
    """

    __slots__ = ("_mark", "_memory", "_status", "address", "before_close", "capacity", "fd", "huge")

    def __init__(
        self, capacity: int, *, try_huge: bool = True, prefault: bool = True, held_back: int = 0
    ) -> None:
        if capacity < 0:
            raise ValueError(f"an arena's capacity must not be negative, not {capacity}")
        capacity = round_up(capacity, GRAIN)
        nbytes = STATUS_NBYTES + capacity
        with in_turn(nbytes + held_back):
            self._make(nbytes, capacity, try_huge, prefault, held_back)

    def _make(self, nbytes: int, capacity: int, try_huge: bool, prefault: bool, held_back: int) -> None:
        available = available_memory()
        if available is not None and nbytes + held_back > available:
            beside = f", and {held_back} must be left for writer processes" if held_back else ""
            raise SaveFailedError(
                f"no memory for a snapshot of {capacity} bytes: {available} are available{beside}", hint=HINT
            )
        fd = -1
        try:
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._take(fd, capacity)
            if prefault:
                self.huge = _prefault(self.address, nbytes, try_huge)
        except BaseException as exc:
            if fd >= 0:
                os.close(fd)
            if isinstance(exc, OSError):
                raise _refused(exc, capacity) from exc
            raise

    def _take(self, fd: int, capacity: int) -> None:
        self.fd = fd
        self.capacity = capacity
        self.huge = False
        self.before_close: Callable[[], None] | None = None
        self._memory: ctypes.Array[ctypes.c_ubyte] | None = _map(fd, STATUS_NBYTES + capacity)
        self.address: int = ctypes.addressof(self._memory)
        head = self.view[:STATUS_NBYTES]
        self._status: StatusPage | None = StatusPage(head[:-MARK_NBYTES])
        self._mark: StagedMark | None = StagedMark(head[-MARK_NBYTES:])

    @property
    def view(self) -> memoryview:
        """All of it, writable."""
        if self._memory is None:
            raise ValueError("the arena is closed")
        return memoryview(self._memory).cast("B")

    @property
    def payload(self) -> memoryview:
        """The `capacity` bytes for the snapshot, writable."""
        return self.view[STATUS_NBYTES:]

    @property
    def payload_address(self) -> int:
        """Address of the first payload byte; a multiple of the page size."""
        return self.address + STATUS_NBYTES

    @property
    def status(self) -> StatusPage:
        """Where the writer process tells how far it is."""
        if self._status is None:
            raise ValueError("the arena is closed")
        return self._status

    @property
    def mark(self) -> StagedMark:
        """Where the trainer tells how much of the snapshot is there."""
        if self._mark is None:
            raise ValueError("the arena is closed")
        return self._mark

    def close(self) -> None:
        """Give up the memory (see the class). Idempotent."""
        if self._memory is None:
            return
        if self.before_close is not None:
            self.before_close()
        self._memory = self._status = self._mark = None
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def attach(pid: int, fd: int, capacity: int) -> Arena:
    """The arena that process `pid` has as descriptor `fd`, mapped here; both see the same bytes.

    capacity: the owner's `Arena.capacity`; only the owner knows of `huge`. `StorageError` if the process, the
    descriptor or its size is not what was announced: the owner may have died and its numbers been reused.
    """
    path = f"/proc/{pid}/fd/{fd}"
    mine = -1
    try:
        target = os.readlink(path)
        if not target.startswith(f"/memfd:{_NAME}"):
            raise StorageError(
                "that descriptor is not an arena", path=path, expected=f"/memfd:{_NAME}", actual=target
            )
        mine = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        size = os.fstat(mine).st_size
        if size != STATUS_NBYTES + capacity:
            raise StorageError(
                "the arena has another size", path=path, expected=STATUS_NBYTES + capacity, actual=size
            )
        arena = Arena.__new__(Arena)
        arena._take(mine, capacity)
        return arena
    except BaseException as exc:
        if mine >= 0:
            os.close(mine)
        if isinstance(exc, OSError) and not isinstance(exc, StorageError):
            raise StorageError(
                f"could not attach to the arena of process {pid}: {exc.strerror}",
                errno=exc.errno,
                path=path,
                hint="the process has ended, or runs as another user",
            ) from exc
        raise


def _refused(exc: OSError, capacity: int) -> SaveFailedError:
    """Not every call that fails does so for want of memory."""
    what, hint = "no memory for", HINT
    if exc.errno == errno.EFBIG:
        what = "the limit on file sizes does not allow"
        hint = "raise the job's limit on file sizes (ulimit -f), which holds for shared memory, too"
    elif exc.errno in OUT_OF_FILES:
        what, hint = "no file descriptor for", HINTS[exc.errno]
    return SaveFailedError(f"{what} a snapshot of {capacity} bytes: {exc.strerror}", hint=hint)


def _map(fd: int, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """The file's memory, unmapped once this and the last view of it are gone. At a huge page's boundary,
    without which the kernel puts none under it."""
    address = map_shared(fd, nbytes, HUGE_PAGE)
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit: a thread may still be copying then, and the process's end unmaps everything anyway.
    weakref.finalize(memory, unmap, address, nbytes).atexit = False
    return memory


def _prefault(address: int, nbytes: int, try_huge: bool) -> bool:
    """Give every page its memory, in parallel, and tell whether nearly all of it came in huge pages.

    Those are zeroed five times as fast, and what is written from them reaches the device in long segments. A
    shared mapping only gets them where the administrator has said so (`shmem_enabled`, which nobody sets), or
    where they are asked for one by one, of pages that are there already: so one small page of each is
    touched, and then collapsed into a huge one.
    """
    threads = min(len(os.sched_getaffinity(0)), 8)
    collapsing = _Collapsing(threads)

    def fill(piece: tuple[int, int], _: None) -> None:
        if try_huge:
            collapsing.try_all(*piece)
        _populate(*piece)

    pieces = [(address + at, min(_PREFAULT_PIECE, nbytes - at)) for at in range(0, nbytes, _PREFAULT_PIECE)]
    # Not an executor's threads: there are none once the interpreter is ending, and a save may be under way.
    in_threads(pieces, threads, lambda: None, fill)
    return collapsing.nbytes >= _NEARLY_ALL * nbytes


class _Collapsing:
    """Makes huge pages of a mapping's, as long as that does not take too long. Thread-safe.

    In fragmented memory the kernel has to move others' pages away first, at several seconds a GiB.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._tried_nbytes = 0
        self._seconds = 0.0
        self.nbytes = 0

    def try_all(self, address: int, nbytes: int) -> None:
        for at in range(address, address + nbytes - HUGE_PAGE + 1, HUGE_PAGE):
            if not self._worth_it():
                return
            began = time.perf_counter()
            _populate(at, PAGE)
            done = collapse(at, HUGE_PAGE)
            with self._lock:
                self._seconds += time.perf_counter() - began
                self._tried_nbytes += HUGE_PAGE
                self.nbytes += HUGE_PAGE if done else 0

    def _worth_it(self) -> bool:
        with self._lock:
            tried = self._tried_nbytes
            if tried >= _COLLAPSE_TRIAL_NBYTES and self.nbytes < _NEARLY_ALL * tried:
                return False
            allowed = _COLLAPSE_GRACE_S + _COLLAPSE_S_PER_GIB * tried / (1 << 30)
            return self._seconds / self._threads <= allowed


def _populate(address: int, nbytes: int) -> None:
    try:
        madvise(address, nbytes, MADV_POPULATE_WRITE)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # unlike touching, this reports a lack of memory instead of dying of it
            raise
        ctypes.memset(address, 0, nbytes)  # Linux before 5.14; the pages are new, so zero is what they hold
