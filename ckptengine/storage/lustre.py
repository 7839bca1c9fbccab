"""Is this Lustre, and how are its files striped? Everything off Lustre ends at the first question.

No `lfs` binary and no library of Lustre's: its layouts are extended attributes, and its number of OSTs is one
ioctl. Both are what `lfs` itself uses.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os

from ckptengine.storage import linux
from ckptengine.storage.lustre_layout import ALL_OSTS, Component, Layout, decode, encode
from ckptengine.storage.lustre_policy import Striping, stripe_count

logger = logging.getLogger(__name__)

FILE_SYSTEM_TYPE = 0x0BD00BD0
ATTRIBUTE = "lustre.lov"

# LL_IOC_GETOBDCOUNT, _IOR('f', 168, long). It reads an int, 0 to ask for OSTs (else it counts metadata
# servers), and puts the count there (`llapi_get_obd_count` in lustre/utils/liblustreapi.c).
_GET_TARGET_COUNT = 0x8008_66A8


def is_lustre(fd: int) -> bool:
    """Whether an open file or directory is on Lustre: one fstatfs."""
    return linux.file_system_type(fd) == FILE_SYSTEM_TYPE


def on_lustre(path: str) -> bool:
    """Whether a file or directory is on Lustre; False for what cannot be opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_lustre(fd)
    except OSError:
        return False
    finally:
        os.close(fd)


def ost_count(fd: int) -> int | None:
    """How many OSTs the file system of an open directory on Lustre has; None if it does not say."""
    answer = bytearray(8)
    try:
        fcntl.ioctl(fd, _GET_TARGET_COUNT, answer)
    except OSError:
        return None
    return int.from_bytes(answer[:4], "little") or None


def read_layout(fd: int) -> Layout | None:
    """The layout of an open file, or the default for new files of an open directory, on Lustre.

    None for a file that has none yet. `LayoutError` if it is in no form known here, `OSError` if it cannot be
    read.
    """
    try:
        return decode(os.getxattr(fd, ATTRIBUTE))
    except OSError as exc:
        if exc.errno == errno.ENODATA:
            return None
        raise


def layout_of(path: str) -> Layout | None:
    """`read_layout` of the file or directory at `path`, None where it is not on Lustre."""
    # Opening does not fetch an archived file back; only reading does.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return read_layout(fd) if is_lustre(fd) else None
    finally:
        os.close(fd)


def is_released(fd: int) -> bool:
    """Whether the bytes of an open file are only in Lustre's archive, to be fetched at the first read. Never
    fails; off Lustre it costs an fstat."""
    try:
        # Lustre reports one block for a released file (LU-3864), whatever its size.
        if os.fstat(fd).st_blocks > 1 or not is_lustre(fd):
            return False
        layout = read_layout(fd)
    except (OSError, ValueError):
        return False
    return layout is not None and layout.released


def set_default(path: str, striping: Striping, *, files: int, file_nbytes: int) -> str | None:
    """Set how the files that will be made in the directory `path` are striped: `files` at a time, of about
    `file_nbytes` each (0: small ones, which are always put on one OST).

    Does nothing where `path` is not on Lustre, where `striping` says to inherit, or where the number of OSTs
    is needed and not known. What is there already is not set again; a pool it names is kept. Returns what
    went wrong, if anything did: the files are then striped as the directory above says, which is slower at
    worst.
    """
    if striping.count == "inherit":
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not is_lustre(fd):
                return None
            count = _count(fd, striping, files, file_nbytes)
            found = None if count is None else _set(fd, count, striping.nbytes)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        found = str(error)
    return None if found is None else f"the striping of {path} could not be set: {found}"


def has_room(path: str, nbytes: int) -> bool:
    """Whether `path`'s file system is Lustre with `nbytes` free on all OSTs together.

    After ENOSPC it means that one OST of the file was full: a new file may get others.
    """
    if not on_lustre(path):
        return False
    try:
        status = os.statvfs(path)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize >= nbytes


def _count(fd: int, striping: Striping, files: int, file_nbytes: int) -> int | None:
    if not file_nbytes:
        return 1
    if striping.count != "auto":
        assert striping.count != "inherit"
        return striping.count
    osts = ost_count(fd)
    if osts is None:
        logger.debug("the file system does not say how many OSTs it has: the layout is inherited")
        return None
    return stripe_count(file_nbytes, files, osts)


def _set(fd: int, count: int, nbytes: int) -> str | None:
    before = read_layout(fd)
    pool = None if before is None else before.pool
    if before is not None and _is(before, count, nbytes, pool):
        return None
    os.setxattr(fd, ATTRIBUTE, encode(count, nbytes, pool))
    # Lustre's xattr interface swallows some refusals, and answers others by adjusting the values.
    after = read_layout(fd)
    if after is not None and _is(after, count, nbytes, pool):
        return None
    found = "none" if after is None else describe(after)
    return f"asked for {_stripes_of(count, nbytes)}, it is: {found}"


def _is(layout: Layout, count: int, nbytes: int, pool: str | None) -> bool:
    if layout.kind != "plain":
        return False
    component = layout.components[0]
    return (component.pattern, component.stripe_count, component.stripe_nbytes, component.pool) == (
        "raid0",
        count,
        nbytes,
        pool,
    )


def describe(layout: Layout) -> str:
    """One line for people: `4 x 4 MiB`, `0-100 MiB: 1 x 1 MiB, 100 MiB-end: 8 x 1 MiB`."""
    if layout.kind == "foreign":
        return "foreign"
    whole = layout.kind == "plain"
    parts = [
        ("" if whole else f"{_extent(component)}: ") + _stripes(component) for component in layout.components
    ]
    text = ", ".join(parts) or "empty"
    if layout.mirrors > 1:
        text += f", {layout.mirrors} mirrors"
    if layout.pool is not None:
        text += f", pool {layout.pool}"
    return text + (", released" if layout.released else "")


def _extent(component: Component) -> str:
    stop = "end" if component.stop is None else _size(component.stop)
    return f"{_size(component.start)}-{stop}"


def _stripes(component: Component) -> str:
    if component.pattern == "mdt":
        return "on the metadata server"
    if component.pattern in ("foreign", "other"):
        return component.pattern
    marks = [
        name
        for name, is_so in (
            ("overstriped", component.pattern == "overstriped"),
            ("extension", component.extension),
            ("parity", component.parity),
            ("stale", component.stale),
        )
        if is_so
    ]
    text = _stripes_of(component.stripe_count, component.stripe_nbytes)
    return text + (f" ({', '.join(marks)})" if marks else "")


def _stripes_of(count: int, nbytes: int) -> str:
    return f"{ {0: 'default', ALL_OSTS: 'all'}.get(count, count) } x {_size(nbytes)}"


def _size(nbytes: int) -> str:
    """In the largest unit that divides."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and not nbytes % (1 << shift):
            return f"{nbytes >> shift} {unit}"
    return str(nbytes)
