"""Which Linux calls does the engine need that `os` and `mmap` lack? All release the GIL."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from ckptengine.format.limits import round_up

MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_SYS_CACHESTAT = 451  # the same number on every architecture

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
_libc.syscall.restype = ctypes.c_long
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)
_has_statx = hasattr(_libc, "statx")
if _has_statx:
    _libc.statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)


class _PyBuffer(ctypes.Structure):
    """CPython's `Py_buffer`."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# Not ctypes.pythonapi, whose functions are everybody's, with the argument types that were set last.
_python = ctypes.PyDLL(None)
_get_buffer = _python.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = _python.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)


def address_of(view: memoryview) -> int:
    """The address of a contiguous view's first byte; the caller keeps the view alive.

    `ctypes.c_char.from_buffer` would refuse read-only memory, which is fine to write from.
    """
    buffer = _PyBuffer()
    _get_buffer(view, ctypes.byref(buffer), 0)  # PyBUF_SIMPLE: contiguous bytes, read-only allowed
    address = buffer.buf or 0
    _release_buffer(ctypes.byref(buffer))
    return address


def _raise_errno(doing: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"{doing}: {os.strerror(code)}")


def madvise(address: int, nbytes: int, advice: int) -> None:
    """madvise(2). `mmap.madvise` does the same, but holds the GIL while it populates."""
    while _libc.madvise(address, nbytes, advice) != 0:
        if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
            _raise_errno("madvise")


def collapse(address: int, nbytes: int) -> bool:
    """madvise(2), MADV_COLLAPSE: have huge pages under this memory, whatever the system's settings; False
    where that cannot be (no such pages free, Linux before 6.1)."""
    while _libc.madvise(address, nbytes, _MADV_COLLAPSE) != 0:
        if ctypes.get_errno() != errno.EINTR:
            return False
    return True


def map_shared(fd: int, nbytes: int, alignment: int) -> int:
    """mmap(2) of a file from its beginning, shared and writable, at an address that is a multiple of
    `alignment` bytes, itself one of the page size. The address is the caller's to `unmap`."""
    nbytes = round_up(nbytes, mmap.PAGESIZE)
    # Only the kernel knows which addresses are free, and it aligns to nothing but pages: take more than
    # enough, map inside it, and give the rest back.
    spare = _mmap(None, nbytes + alignment, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = round_up(spare, alignment)
    try:
        _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        unmap(spare, nbytes + alignment)
        raise
    unmap(spare, address - spare)
    unmap(address + nbytes, spare + alignment - address)
    return address


def unmap(address: int, nbytes: int) -> None:
    """munmap(2); nothing for no bytes."""
    if nbytes and _libc.munmap(address, nbytes) != 0:
        _raise_errno("munmap")


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if mapped in (None, ctypes.c_void_p(-1).value):
        _raise_errno("mmap")
    return int(mapped)


def fallocate(fd: int, nbytes: int) -> None:
    """fallocate(2), which also sets the size.

    Not `os.posix_fallocate`: where the file system cannot (Lustre on ZFS, NFS 3), the C library imitates it
    by writing a byte into every 4 KiB, which costs more than the checkpoint. This one says EOPNOTSUPP.
    """
    while _libc.fallocate(fd, 0, 0, nbytes) != 0:
        if ctypes.get_errno() != errno.EINTR:
            _raise_errno("fallocate")


def direct_io_alignment(fd: int) -> tuple[int, int] | None:
    """(memory, offset and length) alignment O_DIRECT needs here; (0, 0): not possible; None: not told."""
    if not _has_statx:
        return None
    result = (ctypes.c_uint32 * 64)()  # struct statx, 256 bytes
    if _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, result) != 0:
        return None
    if not result[0] & _STATX_DIOALIGN:
        return None
    return int(result[38]), int(result[39])  # stx_dio_mem_align at byte 152, stx_dio_offset_align at 156


def file_system_type(fd: int) -> int:
    """fstatfs(2): the file system's magic number, which `os.fstatvfs` leaves out."""
    result = (ctypes.c_ulong * 32)()  # struct statfs, 120 bytes: f_type is the first, a long
    while _libc.fstatfs(fd, result) != 0:
        if ctypes.get_errno() != errno.EINTR:
            _raise_errno("fstatfs")
    return int(result[0]) & 0xFFFF_FFFF


def resident_pages(fd: int, offset: int, nbytes: int) -> int:
    """cachestat(2): how many pages of the range are cached. `OSError` if the kernel does not tell."""
    where = (ctypes.c_uint64 * 2)(offset, nbytes)
    counts = (ctypes.c_uint64 * 5)()  # struct cachestat: nr_cache is the first
    if _libc.syscall(_SYS_CACHESTAT, fd, where, counts, 0) != 0:
        _raise_errno("cachestat")
    return int(counts[0])
