"""How does Lustre describe, in bytes, over which servers a file is striped?

The value of the extended attribute `lustre.lov`, as client and user exchange it. Source: `lov_user_md_v1`,
`lov_user_md_v3`, `lov_comp_md_v1`, `lov_comp_md_entry_v1` and `lov_foreign_md` in
`include/uapi/linux/lustre/lustre_user.h`, and `ll_getxattr_lov` and `ll_setstripe_ea` in
`lustre/llite/xattr.c`, of Lustre 2.15 and of the development branch (v2_16 and later), which agree. All
fields are in the byte order of the host; only little-endian hosts are known here::

    v1         magic 0x0BD10BD0, pattern, object id[16], stripe size u32, stripe count u16, offset u16
    v3         magic 0x0BD30BD0, the same, then the pool's name[16], NUL-padded
               either is followed by 24 bytes per stripe: object id[16], generation u32, OST index u32; not
               for a directory's default, and not where no objects exist (released, or not written yet)
    composite  magic 0x0BD60BD0, size u32, generation u32, flags u16, entries u16, mirrors - 1 u16, pad[14],
               then 48 bytes per entry: id u32 (its mirror in bits 16..30), flags u32, extent start u64, end
               u64, offset u32, size u32, pad[16]; at each offset lies a v1 or v3
    foreign    magic 0x0BD70BD0, length u32, type u32, flags u32, value
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from ckptengine.config import MAX_STRIPES, STRIPE_QUANTUM

Pattern = Literal["raid0", "overstriped", "mdt", "foreign", "other"]
"""raid0: over OSTs; overstriped: more than once on the same OST; mdt: on the metadata server (DoM)."""

ALL_OSTS = -1
"""A stripe count that means: over every OST."""

_V1, _JOIN, _V3, _SPECIFIC = 0x0BD10BD0, 0x0BD20BD0, 0x0BD30BD0, 0x0BD50BD0
_COMPOSITE, _FOREIGN, _SELF_EXTENDING = 0x0BD60BD0, 0x0BD70BD0, 0x0BD80BD0

_RAID0, _MDT, _OVERSTRIPED, _FOREIGN_PATTERN = 0x1, 0x100, 0x200, 0x400
_RELEASED = 0x8000_0000
_FLAGS_MASK = 0xFFFF_0000

_STALE, _INIT, _EXTENSION, _PARITY = 0x1, 0x10, 0x40, 0x80
_NO_END = 0xFFFF_FFFF_FFFF_FFFF
_ANY_OST = 0xFFFF
"""The offset that lets the server choose. 0 would put the first stripe of every file on OST 0."""
_WIDE = 0xFFFF

_HEAD = struct.Struct("<II16xIHH")
_POOL_NBYTES = 16
_OBJECT = struct.Struct("<16xII")
_COMPOSITE_HEAD = struct.Struct("<IIIHHH14x")
_ENTRY = struct.Struct("<IIQQII16x")


class LayoutError(ValueError):
    """The bytes are not a layout this module knows."""


@dataclass(frozen=True, slots=True)
class Component:
    """One range of a file, `start` to `stop` (None: its end), and how it is striped.

    stripe_count: 0: the file system's default, or none needed (mdt); `ALL_OSTS`: all. osts: the index of each
    stripe's OST, empty where no objects exist. mirror: which copy of the file it belongs to, 0 where there is
    one. stale: of a mirror that is behind. extension: a range that gets its objects as the file grows.
    """

    start: int
    stop: int | None
    pattern: Pattern
    stripe_count: int
    stripe_nbytes: int
    pool: str | None = None
    osts: tuple[int, ...] = ()
    mirror: int = 0
    released: bool = False
    stale: bool = False
    extension: bool = False
    parity: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """A file's layout, or a directory's default for new files.

    kind: plain (one component), composite (a progressive layout, mirrors), foreign (kept by something else,
    with no components).
    """

    kind: Literal["plain", "composite", "foreign"]
    components: tuple[Component, ...]
    mirrors: int = 1

    @property
    def released(self) -> bool:
        """The bytes are only in the archive (HSM, on FSx the S3 repository): the first read fetches them."""
        return bool(self.components) and all(component.released for component in self.components)

    @property
    def pool(self) -> str | None:
        """The pool that all of it is in, None if there is no such one."""
        pools = {component.pool for component in self.components}
        return pools.pop() if len(pools) == 1 else None


def decode(data: bytes) -> Layout:
    """The layout in a `lustre.lov` value; `LayoutError` says what is wrong with one that is none."""
    magic = _magic(data)
    if magic in (_COMPOSITE, _SELF_EXTENDING):
        return _decode_composite(data)
    if magic == _FOREIGN:
        _decode_foreign(data)
        return Layout("foreign", ())
    return Layout("plain", (_decode_plain(data, start=0, stop=None),))


def encode(stripe_count: int, stripe_nbytes: int, pool: str | None = None) -> bytes:
    """A v1 (v3 with a pool) for a directory's default, or for a file created without objects.

    stripe_count: `ALL_OSTS`, or 1 to 2000. stripe_nbytes: a multiple of 64 KiB below 4 GiB. The server
    chooses the OSTs. `ValueError` for anything else.
    """
    if stripe_count != ALL_OSTS and not 1 <= stripe_count <= MAX_STRIPES:
        raise ValueError(
            f"stripe_count must be in [1, {MAX_STRIPES}], or -1 for all OSTs, not {stripe_count}"
        )
    if not 0 < stripe_nbytes < 1 << 32 or stripe_nbytes % STRIPE_QUANTUM:
        raise ValueError(
            f"stripe_nbytes must be a multiple of {STRIPE_QUANTUM} below 4 GiB, not {stripe_nbytes}"
        )
    count = _WIDE if stripe_count == ALL_OSTS else stripe_count
    if pool is None:
        return _HEAD.pack(_V1, _RAID0, stripe_nbytes, count, _ANY_OST)
    name = pool.encode()
    if not 0 < len(name) < _POOL_NBYTES or b"\0" in name:
        raise ValueError(f"a pool's name has 1 to {_POOL_NBYTES - 1} bytes, not {pool!r}")
    return _HEAD.pack(_V3, _RAID0, stripe_nbytes, count, _ANY_OST) + name.ljust(_POOL_NBYTES, b"\0")


def _magic(data: bytes) -> int:
    if len(data) < 4:
        raise LayoutError(f"{len(data)} bytes are too few for a layout")
    return int.from_bytes(data[:4], "little")


def _unpack(form: struct.Struct, data: bytes, offset: int, what: str) -> tuple[Any, ...]:
    if offset + form.size > len(data):
        raise LayoutError(f"{what} at byte {offset} needs {form.size} bytes, there are {len(data) - offset}")
    return form.unpack_from(data, offset)


def _decode_plain(data: bytes, *, start: int, stop: int | None, objects: bool = True) -> Component:
    magic = _magic(data)
    if magic not in (_V1, _V3, _SPECIFIC):
        known = "a joined file's, long gone from Lustre" if magic == _JOIN else "unknown"
        raise LayoutError(f"the magic {magic:#010x} is {known}")
    _, pattern, stripe_nbytes, count, _ = _unpack(_HEAD, data, 0, "a layout")
    end = _HEAD.size
    pool = None
    if magic != _V1:
        (name,) = _unpack(struct.Struct(f"{_POOL_NBYTES}s"), data, end, "the pool's name")
        pool = name.partition(b"\0")[0].decode("utf-8", "backslashreplace") or None
        end += _POOL_NBYTES
    stripe_count = ALL_OSTS if count == _WIDE else count
    released = bool(pattern & _RELEASED)
    osts: tuple[int, ...] = ()
    if objects and not released and len(data) > end and stripe_count > 0:
        osts = tuple(_unpack(_OBJECT, data, end + i * _OBJECT.size, "a stripe")[1] for i in range(count))
    return Component(
        start=start,
        stop=stop,
        pattern=_pattern(pattern & ~_FLAGS_MASK),
        stripe_count=stripe_count,
        stripe_nbytes=stripe_nbytes,
        pool=pool,
        osts=osts,
        released=released,
    )


def _pattern(bits: int) -> Pattern:
    if bits & _MDT:
        return "mdt"
    if bits & _FOREIGN_PATTERN:
        return "foreign"
    # Parity and compression are marks beside raid0. A default written by an old tool has no bit at all.
    if bits & _RAID0 or not bits:
        return "overstriped" if bits & _OVERSTRIPED else "raid0"
    return "other"


def _decode_composite(data: bytes) -> Layout:
    _, size, _, _, count, other_mirrors = _unpack(_COMPOSITE_HEAD, data, 0, "a composite layout")
    if not _COMPOSITE_HEAD.size <= size <= len(data):
        raise LayoutError(f"a composite layout says it has {size} bytes, there are {len(data)}")
    return Layout("composite", tuple(_components(data[:size], count)), other_mirrors + 1)


def _components(data: bytes, count: int) -> Iterator[Component]:
    bodies = _COMPOSITE_HEAD.size + count * _ENTRY.size
    for index in range(count):
        ident, flags, start, stop, offset, size = _unpack(
            _ENTRY, data, _COMPOSITE_HEAD.size + index * _ENTRY.size, f"component {index}"
        )
        if offset < bodies or offset + size > len(data):
            raise LayoutError(
                f"component {index} says it lies at bytes {offset} to {offset + size} of {len(data)}"
            )
        if start > stop or (start == stop and not flags & _EXTENSION):
            raise LayoutError(f"component {index} covers bytes {start} to {stop}")
        body = data[offset : offset + size]
        end = None if stop == _NO_END else stop
        if _magic(body) == _FOREIGN:
            _decode_foreign(body)
            component = Component(start, end, "foreign", 0, 0)
        else:
            component = _decode_plain(body, start=start, stop=end, objects=bool(flags & _INIT))
        yield replace(
            component,
            mirror=(ident >> 16) & 0x7FFF,
            stale=bool(flags & _STALE),
            extension=bool(flags & _EXTENSION),
            parity=bool(flags & _PARITY),
        )


def _decode_foreign(data: bytes) -> None:
    _, length, _, _ = _unpack(struct.Struct("<4I"), data, 0, "a foreign layout")
    if 16 + length > len(data):
        raise LayoutError(f"a foreign layout says it has {length} bytes, there are {len(data) - 16}")
