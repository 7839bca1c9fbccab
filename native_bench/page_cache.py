"""What of a file is in the page cache, and how does it get out of there?"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from ckptengine.storage.linux import resident_pages

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
PAGE = os.sysconf("SC_PAGESIZE")

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
    files = list(_files(paths))
    if can_drop_caches():
        os.sync()
        try:
            # 1: page cache only. Without dentries and inodes, everybody else would be slower, too.
            DROP_CACHES.write_text("1\n")
            return "drop_caches"
        except OSError:  # a container whose root may open it, but not write to it
            pass
    for path in files:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # dirty pages are not dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return "posix_fadvise" if files else "none"


def cached_bytes(paths: Iterable[str | os.PathLike[str]]) -> int | None:
    """Bytes of these files (or of all files below these directories) in the page cache, in whole pages.

    None if the kernel does not tell: cachestat is Linux 6.5 and later.
    """
    pages = 0
    for path in _files(paths):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pages += resident_pages(fd, 0, os.fstat(fd).st_size)
        except OSError:
            return None
        finally:
            os.close(fd)
    return pages * PAGE


def _files(paths: Iterable[str | os.PathLike[str]]) -> Iterable[Path]:
    for given in paths:
        path = Path(given)
        if path.is_dir():
            below = sorted(path.rglob("*"))
            yield from (found for found in below if found.is_file() and not found.is_symlink())
        else:
            yield path
