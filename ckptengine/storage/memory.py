"""How are bytes moved within memory, when several threads do it at once?"""

from __future__ import annotations

import ctypes

HELD_NBYTES = 64 << 10
"""Up to here a copy takes a few microseconds, less than giving Python's lock away and taking it back."""

_memmove = ctypes.PyDLL(None).memmove  # unlike ctypes.memmove, it keeps the lock
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


def move(to: int, address: int, nbytes: int) -> None:
    """Copy bytes from one address to another.

    Other Python threads go on during a long copy only. With two threads that copy 15 KiB at a time and give
    the lock away for each, the lock's way from core to core took four times as long as the copies.
    """
    if nbytes <= HELD_NBYTES:
        _memmove(to, address, nbytes)
    else:
        ctypes.memmove(to, address, nbytes)
