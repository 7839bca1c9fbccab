"""How a Checkpointer behaves: one frozen value, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

PAGE_NBYTES = 4096
BLOCK_NBYTES = 16 << 20
COMPRESSED_BLOCK_NBYTES = 8 << 20
"""Half as much: four threads with a frame each stay, with what zstd holds, within 64 MiB beside the arena."""
# Lustre's rules for a layout.
STRIPE_QUANTUM = 64 << 10
MAX_STRIPES = 2000
MIN_GBPS, MAX_GBPS = 1e-6, 1e6
MAX_TIMEOUT_S = 1e9
"""What every wait takes: a system's own bound is some times that."""
MAX_IO_THREADS = 1024
"""More than any storage gains from; a mistyped number would use up the process's threads in a save."""
MAX_ARENAS = 1024
"""Each is a whole snapshot in memory: to let memory alone bind them, take this."""
MAX_COUNT = (1 << 63) - 1
"""What a message to the writer process carries; steps and sizes have the same bound."""


EACH_RANKS_OWN = (
    "direct_io",
    "io_threads",
    "storage_gbps",
    "fabric_gbps",
    "max_arenas",
    "arena_budget_nbytes",
    "trace",
    "commit_timeout_s",
    "stall_timeout_s",
    "agree_timeout_s",
    "restore_timeout_s",
)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a `Checkpointer`. All ranks must use the same, which is checked when they make it; only
    what belongs to the machine a rank runs on may be its own (`EACH_RANKS_OWN`): `direct_io`, `io_threads`,
    `storage_gbps`, `fabric_gbps`, `max_arenas`, `arena_budget_nbytes`, `trace`, and the four timeouts.

    block_nbytes: unit of I/O, digest and compression; a multiple of 4096 below 4 GiB. None: 16 MiB, and 8 MiB
        where blocks are compressed, as each of `io_threads` then holds one (`shard_block_nbytes`).
    codec: `"raw"`; `"zstd"`, each block by the method that leaves the fewest bytes; or `"auto"`, which
        compresses only what is durable sooner for it, as samples of the state and the measured rate of the
        storage tell. Compressed shards (`"zstd"`, `"auto"`) are no safetensors files.
    zstd_level: for what is compressed as it is; byte planes of numbers take no level.
    direct_io: `"auto"` bypasses the page cache where the file system can; `"on"` requires it; `"off"` never
        does.
    storage_gbps: GB (1e9 bytes) a second that the storage was measured to give one rank while all read, for
        `RestoreInfo.limit_share` and for `exchange`; on a local disk, 1.074 times the GiB/s of `make limits`.
        None: not known.
    exchange: how a restore gets bytes that several ranks need: `"on"`: each reads its part once and gets the
        rest from the others; `"off"`: every rank reads all it needs; `"auto"`: whichever is faster, by what
        the page cache has and by rates, told or measured.
    fabric_gbps: GB a second that one rank can receive from those of other hosts, over TCP while all do, for
        `exchange`. None: it is measured when needed.
    io_threads: parallel block reads or writes per rank, at most 1024; a restore of raw shards has twice as
        many threads (no more than CPUs where the page cache has them), a save of them half as many again.
    stripe_count: on Lustre, over how many OSTs each shard is striped: a number (-1: all), `"auto"` (by the
        shards' size, the number of ranks and of OSTs), or `"inherit"` (what the root's directory says).
    stripe_nbytes: on Lustre, the size of a stripe; a multiple of 64 KiB below 4 GiB.
    max_arenas: snapshots held at once, at most 1024 (2 lets one be taken while the last is being written).
    arena_budget_nbytes: bound on all arenas together; a save that needs more than is free waits. None:
        `max_arenas` is the only bound.
    keep_last, keep_every: retention, applied after each commit: keep the newest N steps, and every step
        divisible by M. None for both keeps everything.
    allow_pickle: store values of unknown types with pickle, and read them back.
    on_error: a failed background save is raised by the next call (`"raise"`) or logged (`"warn"`).
    retries: fresh attempts after a failed one, from the same snapshot; 0 to 9.
    snapshot: `"copy"`: a save returns when the state is copied; `"overlap"`: at once, while what only an
        optimizer's step changes is copied in the background, and the next step waits for that.
    commit_timeout_s: from the request of a save to its commit; the save fails on all ranks when it passes. It
        bounds what a rank waits for others, and for its state to be copied.
    stall_timeout_s: a writer that makes no progress for so long is ended and its save fails, whatever it is
        at: the directory, the shard, the commit (a new one has at least 300 s to start). Waiting for other
        ranks, or for the state to be copied, is no standstill.
    trace: a directory, made when there is something to write, in which every process of every rank leaves a
        file of what it did when, for `ckpt trace`; None: nothing is recorded. A process with several
        Checkpointers is traced as a whole, from the first that asks for it to the last.
    agree_timeout_s: for ranks to meet and agree (construction, the choice of the step to restore).
    restore_timeout_s: for the slowest rank to read its shard once the fastest one is done.
    """

    block_nbytes: int | None = None
    codec: Literal["raw", "zstd", "auto"] = "raw"
    zstd_level: int = 1
    direct_io: Literal["auto", "on", "off"] = "auto"
    io_threads: int = 4
    storage_gbps: float | None = None
    exchange: Literal["auto", "on", "off"] = "auto"
    fabric_gbps: float | None = None
    stripe_count: int | Literal["auto", "inherit"] = "auto"
    stripe_nbytes: int = 4 << 20
    max_arenas: int = 2
    arena_budget_nbytes: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    allow_pickle: bool = False
    on_error: Literal["raise", "warn"] = "raise"
    retries: int = 0
    snapshot: Literal["copy", "overlap"] = "copy"
    trace: str | None = None
    commit_timeout_s: float = 1800.0
    stall_timeout_s: float = 300.0
    agree_timeout_s: float = 300.0
    restore_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        # First, as what follows compares: and "no" would allow pickle, a float fail in the writer process.
        problems = [
            f"{name} must be {article}, not {getattr(self, name)!r}"
            for name, (article, fits) in _KINDS.items()
            if not fits(getattr(self, name))
        ]
        if problems:
            raise ValueError("; ".join(problems))
        block = self.shard_block_nbytes
        if not 0 < block < 1 << 32 or block % PAGE_NBYTES:
            problems.append(f"block_nbytes must be a multiple of {PAGE_NBYTES} below 4 GiB, not {block}")
        if self.codec not in ("raw", "zstd", "auto"):
            problems.append(f'codec must be "raw", "zstd" or "auto", not {self.codec!r}')
        if not -7 <= self.zstd_level <= 22:
            problems.append(f"zstd_level must be in [-7, 22], not {self.zstd_level}")
        if self.direct_io not in ("auto", "on", "off"):
            problems.append(f'direct_io must be "auto", "on" or "off", not {self.direct_io!r}')
        if self.exchange not in ("auto", "on", "off"):
            problems.append(f'exchange must be "auto", "on" or "off", not {self.exchange!r}')
        if self.snapshot not in ("copy", "overlap"):
            problems.append(f'snapshot must be "copy" or "overlap", not {self.snapshot!r}')
        count = self.stripe_count
        known = (
            count == -1 or 1 <= count <= MAX_STRIPES if type(count) is int else count in ("auto", "inherit")
        )
        if not known:
            problems.append(
                f'stripe_count must be "auto", "inherit", -1 or in [1, {MAX_STRIPES}], not {count!r}'
            )
        if not 0 < self.stripe_nbytes < 1 << 32 or self.stripe_nbytes % STRIPE_QUANTUM:
            problems.append(
                f"stripe_nbytes must be a multiple of {STRIPE_QUANTUM} below 4 GiB, not {self.stripe_nbytes}"
            )
        if self.on_error not in ("raise", "warn"):
            problems.append(f'on_error must be "raise" or "warn", not {self.on_error!r}')
        for name, most in (("io_threads", MAX_IO_THREADS), ("max_arenas", MAX_ARENAS)):
            if not 1 <= getattr(self, name) <= most:
                problems.append(f"{name} must be in [1, {most}], not {getattr(self, name)}")
        for name in ("keep_last", "keep_every", "arena_budget_nbytes"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_COUNT:
                problems.append(f"{name} must be in [1, 2^63) or None, not {value}")
        if not 0 <= self.retries <= 9:
            problems.append(f"retries must be in [0, 9], not {self.retries}")
        for name in ("commit_timeout_s", "stall_timeout_s", "agree_timeout_s", "restore_timeout_s"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_S:
                found = getattr(self, name)
                problems.append(f"{name} must be in (0, {MAX_TIMEOUT_S:g}] seconds, not {found}")
        if self.trace == "":
            problems.append("trace must be a directory or None, not ''")
        for name in ("storage_gbps", "fabric_gbps"):
            value = getattr(self, name)
            if value is not None and not MIN_GBPS <= value <= MAX_GBPS:
                problems.append(f"{name} must be in [{MIN_GBPS:g}, {MAX_GBPS:g}] or None, not {value}")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def shard_block_nbytes(self) -> int:
        """What `block_nbytes` comes to, for this codec."""
        if self.block_nbytes is not None:
            return self.block_nbytes
        return BLOCK_NBYTES if self.codec == "raw" else COMPRESSED_BLOCK_NBYTES


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_int_or_none(value: object) -> bool:
    return value is None or type(value) is int


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(
        ("zstd_level", "io_threads", "stripe_nbytes", "max_arenas", "retries"),
        ("an int", _is_int),
    ),
    **dict.fromkeys(
        ("block_nbytes", "keep_last", "keep_every", "arena_budget_nbytes"),
        ("an int or None", _is_int_or_none),
    ),
    **dict.fromkeys(
        ("commit_timeout_s", "stall_timeout_s", "agree_timeout_s", "restore_timeout_s"),
        ("a number of seconds", _is_seconds),
    ),
    **dict.fromkeys(
        ("storage_gbps", "fabric_gbps"),
        ("a number or None", lambda value: value is None or _is_seconds(value)),
    ),
    "trace": ("a str or None", lambda value: value is None or isinstance(value, str)),
    "allow_pickle": ("True or False", _is_bool),
}
