"""With which knobs do the native programs run, and what do they report?"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Literal, TypeVar

import msgspec

Engine = Literal["threads", "io_uring"]
Pages = Literal["4k", "huge"]

MIB = 1 << 20


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """What every program reports."""

    program: str
    version: str
    flags: dict[str, Any]
    """All of them, the defaults included."""
    nbytes: int = msgspec.field(name="bytes")
    """Per repeat."""
    seconds: tuple[float, ...]
    """Wall clock, one per repeat."""
    cpu_seconds: tuple[float, ...]
    """User and system time of all threads, one per repeat."""
    gib_s: float = msgspec.field(name="gib_s_median")
    """`nbytes` over the median of `seconds`."""

    @property
    def best_gib_s(self) -> float:
        """`nbytes` over the least of `seconds`."""
        return self.nbytes / 2**30 / min(self.seconds)


class CopyLimit(Limit, frozen=True, kw_only=True):
    huge_page_bytes: int
    """Of the target, in the last repeat."""


class ReadLimit(CopyLimit, frozen=True, kw_only=True):
    samples_checked: int
    """Places compared with the files after each repeat."""
    cached_bytes_before: tuple[int, ...] = ()
    """Of the files, in the page cache, before each repeat."""


class WriteLimit(CopyLimit, frozen=True, kw_only=True):
    """`seconds` is from the creation of the files to their being durable; its parts stand apart."""

    create_seconds: tuple[float, ...]
    write_seconds: tuple[float, ...]
    fsync_seconds: tuple[float, ...]
    kept: tuple[str, ...] = ()


class DigestLimit(Limit, frozen=True, kw_only=True):
    code: str


class ZstdLimit(Limit, frozen=True, kw_only=True):
    """`seconds` and `gib_s` are of compressing; both directions count uncompressed bytes."""

    compressed_nbytes: int = msgspec.field(name="compressed_bytes")
    ratio: float
    decompress_seconds: tuple[float, ...]
    decompress_gib_s: float = msgspec.field(name="decompress_gib_s_median")
    zstd_version: str


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    seconds: tuple[float, ...]
    files_s: float = msgspec.field(name="files_s_median")


class MetadataLimit(Limit, frozen=True, kw_only=True):
    phases: dict[Literal["create", "read", "rename", "unlink"], Phase]


@dataclass(frozen=True, slots=True)
class ReadKnobs:
    """How `direct_read` goes about it. `into`: each byte straight to its place in one large buffer
    ("target"), there by way of a few buffers ("copy"), or only into those ("pool")."""

    engine: Engine = "threads"
    block: int = 8 * MIB
    threads: int = 2
    depth: int = 1
    into: Literal["target", "copy", "pool"] = "target"
    pages: Pages = "4k"
    pool_pages: Pages = "4k"
    direct: bool = True


@dataclass(frozen=True, slots=True)
class WriteKnobs:
    """How `direct_write` goes about it."""

    engine: Engine = "threads"
    block: int = 8 * MIB
    threads: int = 2
    depth: int = 1
    pages: Pages = "4k"
    preallocate: bool = True
    direct: bool = True


Knobs = TypeVar("Knobs", ReadKnobs, WriteKnobs)


@dataclass(frozen=True, slots=True)
class Best(Generic[Knobs]):
    """The fastest set of knobs of a grid. `trials`: each that ran, with the best rate it reached, fastest
    first; `skipped`: why others could not run."""

    knobs: Knobs
    gib_s: float
    trials: tuple[tuple[Knobs, float], ...]
    skipped: tuple[str, ...]


# Into 4 KiB pages, which is what tensors get where transparent huge pages have to be asked for. A pool is the
# reader's own: it may have the pages it likes.
READ_GRID = (
    ReadKnobs(),
    ReadKnobs(threads=4),
    ReadKnobs(threads=4, block=16 * MIB),
    ReadKnobs(engine="io_uring", threads=1, depth=4),
    ReadKnobs(engine="io_uring", threads=2, depth=4, block=4 * MIB),
    ReadKnobs(threads=4, into="copy"),
    ReadKnobs(threads=2, into="copy", pool_pages="huge"),
    ReadKnobs(threads=4, into="copy", pool_pages="huge"),
    ReadKnobs(threads=4, into="copy", pool_pages="huge", block=16 * MIB),
    ReadKnobs(engine="io_uring", threads=2, depth=2, into="copy", pool_pages="huge"),
)
# For a target in huge pages, which is another limit.
HUGE_READ_GRID = tuple(replace(knobs, pages="huge") for knobs in READ_GRID if knobs.into == "target")
WRITE_GRID = (
    WriteKnobs(),
    WriteKnobs(threads=4),
    WriteKnobs(preallocate=False),
    WriteKnobs(pages="huge"),
    WriteKnobs(threads=4, pages="huge"),
    WriteKnobs(threads=4, block=16 * MIB, pages="huge"),
    WriteKnobs(engine="io_uring", threads=1, depth=4, pages="huge"),
    WriteKnobs(engine="io_uring", threads=1, depth=8, block=4 * MIB),
)


def without_direct_io(knobs: Knobs) -> Knobs:
    """The same, through the page cache."""
    return replace(knobs, direct=False)


def flags_of(knobs: ReadKnobs | WriteKnobs) -> list[str]:
    """For the command line of the program that they are for."""
    return [f"--{name.replace('_', '-')}={flag(value)}" for name, value in _fields(knobs).items()]


def flag(value: object) -> str:
    """A value as the programs take it."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _fields(knobs: ReadKnobs | WriteKnobs) -> dict[str, Any]:
    return {field.name: getattr(knobs, field.name) for field in fields(knobs)}
