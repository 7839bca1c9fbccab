"""Where does a case's data lie, and how is that brought into a known state? Memory, directories, the page
cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from native_bench import page_cache, sessions
from native_bench.cases import Case
from native_bench.mounts import mount_of
from native_bench.peers.base import files_below

PREFIX = "native-bench-"


@contextlib.contextmanager
def memories(extent: int) -> Iterator[tuple[int, int]]:
    """Memory for a rank's state and target, without a name that could stay behind."""
    fds = []
    try:
        for name in ("state", "target"):
            fds.append(os.memfd_create(f"native-bench-{name}"))
            os.ftruncate(fds[-1], extent)
        yield fds[0], fds[1]
    finally:
        for fd in fds:
            os.close(fd)


@contextlib.contextmanager
def work_directory(case: Case, directory: Path) -> Iterator[Path]:
    """A directory of this run's own."""
    sweep(directory)
    # Not every system takes a path that is relative.
    where = directory.absolute() if case.place == "disk" else _tmpfs()
    work = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=where))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def sweep(*directories: Path) -> None:
    """Remove the work directories of runs that were killed: from `directories`, and from memory."""
    for where in {*(directory.absolute() for directory in directories), *_all_tmpfs()}:
        for left in where.glob(f"{PREFIX}*"):
            pid = left.name.removeprefix(PREFIX).partition("-")[0]
            if pid.isdigit() and not sessions.lives(int(pid)):
                shutil.rmtree(left, ignore_errors=True)


def _tmpfs() -> Path:
    for place in _all_tmpfs():
        return place
    raise OSError("there is no tmpfs to write to; leave the case out with --cases")


def _all_tmpfs() -> list[Path]:
    return [
        Path(place)
        for place in ("/dev/shm", tempfile.gettempdir())
        if os.path.isdir(place) and os.access(place, os.W_OK) and mount_of(place).file_system == "tmpfs"
    ]


def make_cold(root: Path) -> int:
    """Write the files below back and drop them from the page cache. Returns the bytes that are still there,
    which somebody has mapped."""
    paths = list(files_below(str(root)))
    page_cache.evict(paths)
    left = page_cache.cached_bytes(paths)
    if left:
        # The whole cache, if this process may: not at once, as it is everybody's.
        page_cache.drop_caches(paths)
        left = page_cache.cached_bytes(paths)
    return left or 0


def make_hot(root: Path) -> int:
    """Read the files below into the page cache. Returns the bytes that did not stay there."""
    paths = list(files_below(str(root)))
    page_cache.fill(paths)
    cached = page_cache.cached_bytes(paths)
    return 0 if cached is None else max(0, sum(map(os.path.getsize, paths)) - cached)
