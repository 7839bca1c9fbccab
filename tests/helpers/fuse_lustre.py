"""A FUSE file system that passes everything on to a directory, and answers about layouts as Lustre does.

Run as a process of its own: `python -m tests.helpers.fuse_lustre SOURCE MOUNT OSTS`. It serves `lustre.lov`
(directories hand their default down; a new file gets objects on OSTs in turn), the ioctl that counts OSTs,
and refuses direct I/O that is not of whole pages, as Lustre 2.15 does. It can have full OSTs, archived files,
and faults that happen once; `Mounted` sets these through extended attributes and hears through another what
was done.

What it is not: it says nothing about speed, about several clients, or about what a server does in a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

PAGE = 4096
MOUNT_TIMEOUT_S = 20.0
END_TIMEOUT_S = 10.0
LAST_REQUESTS_S = 1.0
LIFE_S = 600
"""Whatever becomes of the test: no mount is older."""
FUSE_TYPE = 0x65735546

LOV = "lustre.lov"
CONTROL = "user.fuse_lustre."
GET_TARGET_COUNT = 0x800866A8
HEAD, OBJECT = struct.Struct("<II16sIHH"), struct.Struct("<QQII")
V1, V3, COMPOSITE = 0x0BD10BD0, 0x0BD30BD0, 0x0BD60BD0
RELEASED = 0x80000000
STAT = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_ino")
ROOT_DEFAULT = HEAD.pack(V1, 1, bytes(16), 1 << 20, 1, 0xFFFF)


class PassThrough:
    """The operations of the file system, as `mfusepy` calls them."""

    use_ns = True
    # An open file has no path once it is unlinked; what is done with it comes with its handle only.
    flag_nopath = flag_nullpath_ok = True

    def __init__(self, source: str, osts: int) -> None:
        self._source = source
        self._osts = osts
        self._lock = threading.Lock()
        self._next_ost = 0
        self._full: set[int] = set()
        self._defaults: dict[int, bytes] = {os.stat(source).st_ino: ROOT_DEFAULT}
        self._layouts: dict[int, bytes] = {}
        self._direct: set[int] = set()
        self._names: dict[int, str] = {}
        self._faults: list[dict[str, Any]] = []
        self._refuse_layouts = ""
        self._evict = ""
        self._done: list[str] = []

    # -- what happens, and what goes wrong --

    def _at(self, path: str) -> str:
        return self._source + path

    def _did(self, what: str, path: str) -> None:
        with self._lock:
            self._done.append(f"{what} {path}")
            for fault in self._faults:
                if fault["what"] == what and fnmatchcase(path, fault["path"]):
                    fault["left"] -= 1
                    if not fault["left"]:
                        self._faults.remove(fault)
                        raise OSError(fault["errno"], os.strerror(fault["errno"]))

    def _check_space(self, fd: int) -> None:
        if self._full & set(osts_of(self._layouts.get(os.fstat(fd).st_ino, b""))):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # -- layouts --

    def _parent_default(self, path: str) -> bytes:
        return self._defaults.get(os.stat(self._at(os.path.dirname(path))).st_ino, ROOT_DEFAULT)

    def _lay_out(self, path: str, fd: int) -> None:
        inode = os.fstat(fd).st_ino
        self._layouts.pop(inode, None)  # of an older file with that number
        # FUSE does not hand O_LOV_DELAY_CREATE on; such files have to say it in their name.
        if "delayed" not in os.path.basename(path):
            self._layouts[inode] = self._with_objects(inode, self._parent_default(path))

    def _with_objects(self, inode: int, default: bytes) -> bytes:
        magic, pattern, _, size, count, _ = HEAD.unpack_from(default)
        count = self._osts if count == 0xFFFF else min(count or 1, self._osts)
        with self._lock:
            osts = [(self._next_ost + i) % self._osts for i in range(count)]
            self._next_ost += count
        head = HEAD.pack(magic, pattern, inode.to_bytes(16, "little"), size, count, 0)
        pool = default[HEAD.size :] if magic == V3 else b""
        return head + pool + b"".join(OBJECT.pack(inode, 0, 0, ost) for ost in osts)

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        if name == CONTROL + "done":
            return json.dumps(self._done[-500:]).encode()
        if name != LOV:
            return os.getxattr(self._at(path), name)
        self._did("getxattr", path)
        status = os.lstat(self._at(path))
        if os.path.isdir(self._at(path)):
            data = self._defaults.get(status.st_ino, ROOT_DEFAULT)
        elif status.st_ino in self._layouts:
            data = self._layouts[status.st_ino]
        else:
            raise OSError(errno.ENODATA, "no layout")
        # As ll_sanitize_xattr: the generation is not shown, so that a copied layout leaves the OST open.
        return data[:30] + b"\xff\xff" + data[32:] if data[:4] != COMPOSITE.to_bytes(4, "little") else data

    def setxattr(self, path: str, name: str, value: bytes, options: int, position: int = 0) -> int:
        if name.startswith(CONTROL):
            self._control(path, name.removeprefix(CONTROL), json.loads(value))
            return 0
        if name != LOV:
            os.setxattr(self._at(path), name, value, options)
            return 0
        self._did("setxattr", path)
        if self._refuse_layouts == "silently":
            return 0
        if len(value) < HEAD.size:
            raise OSError(errno.ERANGE, "too short")
        magic, _, _, size, _, offset = HEAD.unpack_from(value)
        sizes = {V1: HEAD.size, V3: HEAD.size + 16}
        if magic not in sizes or len(value) < sizes[magic] or size % 65536 or offset != 0xFFFF:
            raise OSError(errno.EINVAL, "bad layout")
        inode = os.stat(self._at(path)).st_ino
        if os.path.isdir(self._at(path)):
            self._defaults[inode] = value[: sizes[magic]]
        elif inode not in self._layouts:
            self._layouts[inode] = self._with_objects(inode, value[: sizes[magic]])
        # else: a file that has a layout keeps it, and nobody is told (ll_setstripe_ea).
        return 0

    def ioctl(self, path: str | None, cmd: int, arg: Any, fh: int, flags: int, data: Any) -> int:
        if cmd & 0xFFFFFFFF != GET_TARGET_COUNT:
            raise OSError(errno.ENOTTY, "no such ioctl")
        ctypes.cast(data, ctypes.POINTER(ctypes.c_uint32))[0] = self._osts
        return 0

    def _control(self, path: str, what: str, value: Any) -> None:
        inode = os.lstat(self._at(path)).st_ino
        if what == "fault":
            self._faults.append(value)
        elif what == "full":
            self._full = set(value)
        elif what == "refuse":
            self._refuse_layouts = value
        elif what == "evict":
            self._evict = value
        elif what == "layout":  # of a file or directory, in hex
            (self._defaults if os.path.isdir(self._at(path)) else self._layouts)[inode] = bytes.fromhex(value)
        elif what == "release":
            data = bytearray(self._layouts[inode][: HEAD.size])
            data[7] |= RELEASED >> 24
            self._layouts[inode] = bytes(data)
        elif what == "reset":
            self._done.clear()
            self._faults.clear()
            self._full.clear()
            self._refuse_layouts = self._evict = ""
            self._next_ost = 0

    def _released(self, inode: int) -> bool:
        data = self._layouts.get(inode, b"")
        return len(data) >= 8 and bool(data[7] & RELEASED >> 24)

    # -- files --

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, int]:
        status = os.lstat(self._at(path)) if path is not None else os.fstat(fh or -1)
        found = {key: getattr(status, key) for key in STAT}
        found |= {f"st_{kind}": getattr(status, f"st_{kind}_ns") for kind in ("atime", "mtime", "ctime")}
        if self._released(status.st_ino):
            found["st_blocks"] = 1
        return found

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._did("create", path)
        # The kernel keeps O_EXCL and the like to itself, having looked the name up.
        fd = os.open(self._at(path), os.O_CREAT | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, mode)
        self._lay_out(path, fd)
        self._names[fd] = path
        return fd

    def open(self, path: str, flags: int) -> int:
        self._did("open", path)
        direct = bool(flags & os.O_DIRECT)
        fd = os.open(self._at(path), flags & ~(os.O_DIRECT | os.O_APPEND) | os.O_CLOEXEC)
        self._names[fd] = path
        if direct:
            self._direct.add(fd)
        return fd

    def _check_aligned(self, fh: int, offset: int, nbytes: int) -> None:
        if fh in self._direct and (offset % PAGE or nbytes % PAGE):
            raise OSError(errno.EINVAL, "direct I/O takes whole pages")

    def read(self, path: str | None, size: int, offset: int, fh: int) -> bytes:
        self._check_aligned(fh, offset, size)
        self._did("read", self._names[fh])
        inode = os.fstat(fh).st_ino
        if self._released(inode):
            self._did("restore", self._names[fh])
            data = bytearray(self._layouts[inode])
            data[7] &= ~(RELEASED >> 24) & 0xFF
            self._layouts[inode] = bytes(data)
        return os.pread(fh, size, offset)

    def write(self, path: str | None, data: bytes, offset: int, fh: int) -> int:
        self._check_aligned(fh, offset, len(data))
        self._did("direct write" if fh in self._direct else "write", self._names[fh])
        self._check_space(fh)
        return os.pwrite(fh, data, offset)

    def fallocate(self, path: str | None, mode: int, offset: int, size: int, fh: int) -> int:
        self._did("fallocate", self._names[fh])
        self._check_space(fh)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "only the plain kind")
        os.posix_fallocate(fh, offset, size)
        return 0

    def truncate(self, path: str | None, length: int, fh: int | None = None) -> int:
        if fh is not None:
            os.ftruncate(fh, length)
        else:
            assert path is not None
            os.truncate(self._at(path), length)
        return 0

    def fsync(self, path: str | None, datasync: int, fh: int) -> int:
        self._did("fsync", self._names[fh])
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str | None, datasync: int, fh: int) -> int:
        self._did("fsync", self._names[fh])
        os.fsync(fh)
        return 0

    def flush(self, path: str | None, fh: int) -> int:
        self._did("close", self._names[fh])
        return 0

    def release(self, path: str | None, fh: int) -> int:
        self._direct.discard(fh)
        if self._evict and fnmatchcase(self._names[fh], self._evict) and os.fstat(fh).st_size > PAGE:
            os.truncate(fh, os.fstat(fh).st_size - PAGE)
        del self._names[fh]
        os.close(fh)
        return 0

    # -- names --

    def opendir(self, path: str) -> int:
        self._did("opendir", path)
        fd = os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._names[fd] = path
        return fd

    def readdir(self, path: str | None, fh: int) -> list[str]:
        return [".", "..", *os.listdir(fh)]

    releasedir = release

    def mkdir(self, path: str, mode: int) -> int:
        self._did("mkdir", path)
        os.mkdir(self._at(path), mode)
        self._defaults[os.stat(self._at(path)).st_ino] = self._parent_default(path)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    def unlink(self, path: str) -> int:
        self._did("unlink", path)
        os.unlink(self._at(path))
        return 0

    def rename(self, old: str, new: str, flags: int = 0) -> int:
        self._did("rename", new)
        os.rename(self._at(old), self._at(new))
        for fh, name in list(self._names.items()):
            if name == old:
                self._names[fh] = new
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._at(target))
        return 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def chmod(self, path: str, mode: int, fh: int | None = None) -> int:
        os.chmod(self._at(path), mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        self._did("utime", path)
        os.utime(self._at(path), ns=times)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._source)
        return {key: getattr(status, key) for key in dir(status) if key.startswith("f_") and key != "f_fsid"}


def osts_of(layout: bytes) -> list[int]:
    """The OSTs of a v1 or v3 with objects."""
    if len(layout) < HEAD.size:
        return []
    magic, _, _, _, count, _ = HEAD.unpack_from(layout)
    at = HEAD.size + (16 if magic == V3 else 0)
    return [OBJECT.unpack_from(layout, at + i * OBJECT.size)[3] for i in range(count) if len(layout) > at]


class Mounted:
    """A mount of it, for a test: `path` is where, the methods say what is to go wrong."""

    def __init__(self, path: str) -> None:
        self.path = path

    def _tell(self, what: str, value: Any, path: str | Path | None = None) -> None:
        os.setxattr(path or self.path, CONTROL + what, json.dumps(value).encode())

    def fail(self, what: str, code: int, *, path: str = "*", nth: int = 1) -> None:
        """The `nth` operation `what` ("write", "direct write", "fsync", "close", …) from now on on a matching
        path fails, once."""
        self._tell("fault", {"what": what, "errno": code, "path": path, "left": nth})

    def fill(self, osts: list[int]) -> None:
        """These OSTs have no room; the others, and statfs, do."""
        self._tell("full", osts)

    def refuse_layouts(self, how: str) -> None:
        """ "silently": a layout set is not kept, and the call says nothing. "": take them again."""
        self._tell("refuse", how)

    def evict(self, path: str) -> None:
        """Matching files lose their last page when they are closed, and nobody is told: what other mounts see
        of a client that was evicted."""
        self._tell("evict", path)

    def put_layout(self, path: str | Path, data: bytes) -> None:
        self._tell("layout", data.hex(), path)

    def release(self, path: str | Path) -> None:
        """The file's bytes are in the archive only, until it is read."""
        self._tell("release", None, path)

    def reset(self) -> None:
        """All is well again, nothing has been done yet, and the next file begins on OST 0."""
        self._tell("reset", None)

    def done(self, what: str = "") -> list[str]:
        """What was done, in order, as "write /path"."""
        done = json.loads(os.getxattr(self.path, CONTROL + "done"))
        return [entry for entry in done if entry.startswith(what)]


def why_not() -> str | None:
    """Why it cannot be mounted here."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "needs /dev/fuse"
    if shutil.which("fusermount3") is None:
        return "needs fusermount3 (Debian: fuse3)"
    if importlib.util.find_spec("mfusepy") is None:
        return "needs mfusepy"
    return None


@contextlib.contextmanager
def mounted(osts: int = 8) -> Iterator[Mounted]:
    """Mount it on a directory of its own. Skips where that is not possible; leaves nothing behind."""
    import pytest

    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    # Not below pytest's directory, which pytest walks to remove old ones: a dead mount would stop it.
    directory = Path(tempfile.mkdtemp(prefix="fuse-lustre-"))
    source, mount, log = directory / "source", directory / "mount", directory / "log"
    source.mkdir()
    mount.mkdir()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fuse_lustre", str(source), str(mount), str(osts)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + MOUNT_TIMEOUT_S
        while not os.path.ismount(mount):
            if process.poll() is not None:
                pytest.skip(f"FUSE does not mount here: {log.read_text(errors='replace')[-500:]}")
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.01)
        yield Mounted(str(mount))
    finally:
        _end(process, mount)
        shutil.rmtree(directory, ignore_errors=True)


def _end(process: subprocess.Popen[bytes], mount: Path) -> None:
    """Unmount first, lazily: requests under way then fail when the process is gone, and nobody hangs."""
    unmount = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
    subprocess.run([*unmount, str(mount)], capture_output=True, timeout=END_TIMEOUT_S)
    try:
        process.wait(LAST_REQUESTS_S)
    except subprocess.TimeoutExpired:  # a file is still open, and its process may never close it
        process.kill()
        process.wait()
        subprocess.run([*unmount, str(mount)], capture_output=True, timeout=END_TIMEOUT_S)


def pretend() -> None:
    """From now on, this process takes FUSE for Lustre."""
    from ckptengine.storage import linux, lustre

    real = linux.file_system_type

    def file_system_type(fd: int) -> int:
        found = real(fd)
        return lustre.FILE_SYSTEM_TYPE if found == FUSE_TYPE else found

    linux.file_system_type = file_system_type


def main(source: str, mount: str, osts: int) -> None:
    import mfusepy

    class Fuse(mfusepy.FUSE):  # type: ignore[misc]  # it keeps the handle of an ftruncate to itself
        def truncate_fuse_3(self, path: bytes | None, length: int, fip: Any) -> int:
            name = None if path is None else os.fsdecode(path)
            return int(self.operations.truncate(name, length, fip.contents.fh if fip else None))

    # Whoever started this may be killed; the mount would outlive it.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    signal.alarm(LIFE_S)
    # auto_unmount: whatever ends this process, fusermount3 cleans up after it. hard_remove: what is unlinked
    # while open is gone, not renamed. No caching of attributes: another client's changes are seen.
    Fuse(
        PassThrough(source, osts),
        mount,
        foreground=True,
        auto_unmount=True,
        hard_remove=True,
        attr_timeout=0,
        entry_timeout=0,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
