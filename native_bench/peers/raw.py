"""What Python threads reach without a checkpoint format: one file, the tensors' bytes end to end, no
metadata.

It knows everything in advance, checks nothing and could not say what it has written: a limit, not a peer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ckptengine.format.limits import PAGE, round_up
from native_bench.peers.base import Place, SaveSeconds, Tensors, Traits

BLOCK = 8 << 20
THREADS = 4

_Piece = tuple[int, int, int]
"""Offset in the file, address in memory, number of bytes."""


class Raw:
    traits = Traits(
        name="raw",
        title="raw (Python threads)",
        how="copy into a warm buffer, `pwrite` with `O_DIRECT` from it, `fsync`; "
        "`preadv` into the tensors if the page cache has them, else `O_DIRECT` into small buffers "
        "and copied from there",
        fsyncs=True,
        limit=True,
    )

    def missing(self) -> str | None:
        return None

    def open(self, place: Place) -> None:
        self._rank = place.rank
        self._pool = ThreadPoolExecutor(THREADS)
        self._buffer = mmap.mmap(-1, 1)
        self._bounces = [mmap.mmap(-1, BLOCK) for _ in range(THREADS)]
        for bounce in self._bounces:
            bounce.write(bytes(BLOCK))

    def save(self, directory: str, step: int, state: Tensors) -> SaveSeconds:
        ends = _pieces(state)
        size = round_up(_size(state), PAGE)
        if len(self._buffer) != size:
            self._buffer = mmap.mmap(-1, size)
            ctypes.memset(_address(self._buffer), 0, size)
        base = _address(self._buffer)
        start = time.perf_counter()

        def copy(group: list[_Piece]) -> None:
            for offset, address, nbytes in group:
                ctypes.memmove(base + offset, address, nbytes)

        self._each(copy, ends)
        stall_s = time.perf_counter() - start
        fd = _open(os.path.join(directory, f"rank{self._rank}.raw"), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(fd, 0, size)
            view = memoryview(self._buffer)
            blocks = [(at, min(BLOCK, size - at)) for at in range(0, size, BLOCK)]
            list(self._pool.map(lambda block: _write(fd, view[block[0] : sum(block)], block[0]), blocks))
            os.fsync(fd)
        finally:
            os.close(fd)
        seconds = time.perf_counter() - start
        view.release()
        # Other systems need the memory. It is made anew before the next save is timed.
        self._buffer = mmap.mmap(-1, 1)
        return SaveSeconds(stall_s, seconds, {"memcpy_s": stall_s})

    def restore(self, directory: str, target: Tensors) -> None:
        path = os.path.join(directory, f"rank{self._rank}.raw")
        plain = os.open(path, os.O_RDONLY)
        direct = _open(path, os.O_RDONLY)
        try:
            if self._cached(plain):
                self._each(lambda group: _read_group(plain, group), _pieces(target))
            else:
                self._read_direct(direct, _pieces(target), os.fstat(plain).st_size)
        finally:
            os.close(plain)
            os.close(direct)

    def _cached(self, fd: int) -> bool:
        try:
            return os.preadv(fd, [bytearray(1)], os.fstat(fd).st_size // 2, os.RWF_NOWAIT) == 1
        except OSError:
            return False

    def _read_direct(self, fd: int, pieces: list[_Piece], size: int) -> None:
        """Blocks go round the threads; each copies what it has read to the tensors that lie in it."""
        starts = [offset for offset, _, _ in pieces]

        def read(thread: int) -> None:
            from bisect import bisect_right

            bounce = memoryview(self._bounces[thread])
            base = _address(self._bounces[thread])
            for at in range(thread * BLOCK, size, THREADS * BLOCK):
                n = os.preadv(fd, [bounce[: min(BLOCK, round_up(size - at, PAGE))]], at)
                end = at + n
                i = bisect_right(starts, at) - 1
                while i < len(pieces) and pieces[i][0] < end:
                    offset, address, nbytes = pieces[i]
                    first, last = max(offset, at), min(offset + nbytes, end)
                    if first < last:
                        ctypes.memmove(address + first - offset, base + first - at, last - first)
                    i += 1

        list(self._pool.map(read, range(THREADS)))

    def _each(self, do: Callable[[list[_Piece]], None], pieces: list[_Piece]) -> None:
        """Give the threads groups of pieces of about a block each."""
        groups: list[list[_Piece]] = [[]]
        room = BLOCK
        for offset, address, nbytes in pieces:
            for at in range(0, nbytes, BLOCK):
                n = min(BLOCK, nbytes - at)
                if room < n:
                    groups.append([])
                    room = BLOCK
                groups[-1].append((offset + at, address + at, n))
                room -= n
        list(self._pool.map(do, groups))

    def close(self) -> None:
        self._pool.shutdown()


def _pieces(tensors: Tensors) -> list[_Piece]:
    found = []
    offset = 0
    for tensor in tensors.values():
        nbytes = tensor.numel() * tensor.element_size()
        found.append((offset, tensor.data_ptr(), nbytes))
        offset += nbytes
    return found


def _size(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:  # tmpfs before Linux 6.6
        return os.open(path, flags, 0o644)


def _write(fd: int, view: memoryview, offset: int) -> None:
    if os.pwrite(fd, view, offset) != len(view):
        raise OSError("short write")


_IOV_MAX = 1024


def _read_group(fd: int, group: list[_Piece]) -> None:
    """The pieces of a group follow each other in the file, so one call reads up to 1,024 of them."""
    for i in range(0, len(group), _IOV_MAX):
        part = group[i : i + _IOV_MAX]
        views = [(ctypes.c_char * nbytes).from_address(address) for _, address, nbytes in part]
        if os.preadv(fd, views, part[0][0]) != sum(nbytes for _, _, nbytes in part):
            raise OSError("short read")
