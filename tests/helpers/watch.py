"""Does anything open, read or change a file or directory? Asks the kernel, by inotify."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from types import TracebackType

_libc = ctypes.CDLL(None, use_errno=True)
_IN_NONBLOCK = 0o4000
_IN_CLOEXEC = 0o2000000
_EVENTS = {
    0x001: "read",
    0x002: "written",
    0x004: "changed its attributes",
    0x020: "opened",
    0x040: "moved from",
    0x080: "moved to",
    0x100: "something made in it",
    0x200: "something deleted in it",
    0x400: "deleted",
    0x800: "moved",
}


class Watch:
    """Watches from `with` on; `touched()` says what has happened since it was asked last."""

    def __init__(self, *paths: Path) -> None:
        self._fd = _libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        assert self._fd >= 0, os.strerror(ctypes.get_errno())
        self._paths = {}
        for path in paths:
            number = _libc.inotify_add_watch(self._fd, os.fsencode(path), sum(_EVENTS))
            assert number >= 0, os.strerror(ctypes.get_errno())
            self._paths[number] = path

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def touched(self) -> list[str]:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return []
        found = []
        at = 0
        while at < len(data):
            number, mask, _, length = struct.unpack_from("iIII", data, at)
            name = data[at + 16 : at + 16 + length].rstrip(b"\0").decode()
            what = ", ".join(text for bit, text in _EVENTS.items() if mask & bit)
            found.append(f"{self._paths[number].name}{'/' + name if name else ''}: {what}")
            at += 16 + length
        return found
