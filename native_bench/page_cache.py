"""What of a file is in the page cache, and how does it get out of there?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

from ckptengine.storage.linux import resident_pages

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
PAGE = os.sysconf("SC_PAGESIZE")
_PIECE_NBYTES = 64 << 20

CacheDrop = Literal["drop_caches", "posix_fadvise", "none"]


def can_drop_caches() -> bool:
    """Whether this process may empty the whole page cache."""
    return os.access(DROP_CACHES, os.W_OK)


def drop_caches(paths: Iterable[str | os.PathLike[str]] = ()) -> CacheDrop:
    """Write back what is dirty, then empty the page cache; returns how it was done.

    "drop_caches": the whole cache, for which it takes root. "posix_fadvise": only the pages of `paths`
    (a directory stands for all files below it); pages that someone has mapped stay. "none": no root, and no
    path given. `cached_bytes` tells what it came to.
    """
    given = list(paths)
    if can_drop_caches():
        os.sync()
        try:
            # 1: page cache only. Without dentries and inodes, everybody else would be slower, too.
            DROP_CACHES.write_text("1\n")
            return "drop_caches"
        except OSError:  # a container whose root may open it, but not write to it
            pass
    return "posix_fadvise" if evict(given) else "none"


def evict(paths: Iterable[str | os.PathLike[str]]) -> int:
    """Have the page cache forget these files, and nothing else; a directory stands for all files below it.

    Returns how many files it were.
    """
    files = 0
    for fd in _opened(paths):
        os.fsync(fd)  # dirty pages are not dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        files += 1
    return files


def fill(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Read these files, or all files below these directories, into the page cache."""
    # One thread reads a cold file at a third of the rate of four.
    with ThreadPoolExecutor(4) as pool:
        for fd in _opened(paths):
            size = os.fstat(fd).st_size
            for _ in pool.map(partial(_read, fd), range(0, size, _PIECE_NBYTES)):
                pass


def _read(fd: int, at: int) -> None:
    end = at + _PIECE_NBYTES
    buffer = memoryview(bytearray(8 << 20))
    while at < end and (n := os.preadv(fd, [buffer[: end - at]], at)):
        at += n


def cached_bytes(paths: Iterable[str | os.PathLike[str]]) -> int | None:
    """Bytes of these files (or of all files below these directories) in the page cache, in whole pages.

    None if the kernel does not tell: cachestat is Linux 6.5 and later.
    """
    pages = 0
    for fd in _opened(paths):
        try:
            pages += resident_pages(fd, 0, os.fstat(fd).st_size)
        except OSError:
            return None
    return pages * PAGE


def _opened(paths: Iterable[str | os.PathLike[str]]) -> Iterator[int]:
    """Each file's descriptor, for as long as the caller stays with it.

    A file below a directory may have gone since the directory was listed: the engine removes old steps in the
    background. Such a file has no pages in the cache either.
    """
    for path, listed in _files(paths):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if listed:
                continue
            raise
        try:
            yield fd
        finally:
            os.close(fd)


def _files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[tuple[str, bool]]:
    """Each file, and whether it was found in a directory rather than given."""
    for given in map(os.fspath, paths):
        if not os.path.isdir(given):
            yield given, False
            continue
        for folder, _, names in os.walk(given):  # passes over a directory that has gone
            for path in (os.path.join(folder, name) for name in sorted(names)):
                if os.path.isfile(path) and not os.path.islink(path):
                    yield path, True
