"""Where does a case's data lie, and how is that brought into a known state? Memory, directories, the page
cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from native_bench import page_cache
from native_bench.cases import GIB, Case
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
    """A directory of this run's own; also removes those of runs that were killed."""
    # Not every system takes a path that is relative.
    where = directory.absolute() if case.place == "disk" else _tmpfs()
    for left in where.glob(f"{PREFIX}*"):
        pid = left.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=where))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _tmpfs() -> Path:
    for place in ("/dev/shm", tempfile.gettempdir()):
        if os.path.isdir(place) and os.access(place, os.W_OK) and mount_of(place).file_system == "tmpfs":
            return Path(place)
    raise OSError("there is no tmpfs to write to; leave the case out with --cases")


def check_space(directory: Path, nbytes: int, case: Case) -> None:
    """Only one checkpoint exists at a time, but some write their files twice, and the native write has its
    own."""
    needed = int(2.5 * nbytes) + (64 << 20)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            f"{case.name} needs {needed / GIB:.1f} GiB in {directory.parent}, "
            f"where {free / GIB:.1f} GiB are free"
        )


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
