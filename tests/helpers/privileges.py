"""Root's power to read and write what its mode forbids, given up for a while.

Another user id would forbid too much: an environment of root's own can then no longer be imported from.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2
VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    """The first 32 of the three sets, then the rest of them."""

    _fields_ = tuple(
        (f"{name}_{half}", ctypes.c_uint32) for half in (0, 1) for name in ("eff", "perm", "inh")
    )


@contextlib.contextmanager
def modes_bind_root() -> Iterator[None]:
    """Permission bits hold for this thread, and for threads it starts, whoever runs the tests."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = _Header(VERSION_3, 0)
    held = _Capabilities()
    _call(libc.capget, header, held)
    kept = _Capabilities.from_buffer_copy(held)
    kept.eff_0 &= ~(1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH)
    _call(libc.capset, header, kept)
    try:
        yield
    finally:
        _call(libc.capset, header, held)


def _call(function: ctypes._NamedFuncPointer, header: _Header, capabilities: _Capabilities) -> None:
    if function(ctypes.byref(header), ctypes.byref(capabilities)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
