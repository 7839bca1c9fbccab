"""What trainer and writer process tell each other, and ranks each other, about one save: plain values, no
torch."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ckptengine.comm.failure import Failure
from ckptengine.format.names import AttemptId


class ArenaRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where the writer finds the staged bytes: a memfd of the trainer, opened through `/proc/<pid>/fd/<fd>`.

    `serial` names this memory for the life of the trainer: a descriptor number may be reused, a serial never
    is. `huge`: it is in huge pages.
    """

    pid: int
    fd: int
    capacity: int
    serial: int
    huge: bool = False


class TransportSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a writer process joins the run's transport: torch's TCP store, a directory, or nothing (one
    rank)."""

    kind: Literal["none", "tcp", "file"]
    prefix: str = ""
    host: str = ""
    port: int = 0
    directory: str = ""


class WriteTask(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a writer needs to bring one rank's staged bytes to the commit. The arena's payload holds the
    header, then the data from `data_offset` on."""

    root: str
    step: int
    attempt: str
    rank: int
    world_size: int
    arena: ArenaRef
    live_arenas: tuple[int, ...]
    header_nbytes: int
    digests_at: int
    stored_at: int | None
    methods_at: int | None
    own_at: int | None = None
    data_offset: int
    data_nbytes: int
    block_nbytes: int
    codec: Literal["raw", "zstd"]
    zstd_level: int
    auto: bool
    """Compress only what is through sooner for it."""
    direct_io: Literal["auto", "on", "off"]
    stripe_count: int | Literal["auto", "inherit"] = "auto"
    stripe_nbytes: int = 4 << 20
    io_threads: int
    transport: TransportSpec
    deadline: float
    """By `time.monotonic`, which all processes of a host share, and nobody sets."""
    may_retry: bool = False
    metadata: Any = None
    """The user's metadata as a tree; the coordinator's is the one that is committed."""
    keep_last: int | None = None
    keep_every: int | None = None
    trace: str | None = None
    """The directory to which this process is to be traced."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's word that the attempt's directory exists, for this step; or why it never will."""

    step: int = -1
    failure: Failure | None = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's word about its shard: durable with this size and header digest, or the reason why not."""

    rank: int
    size: int = 0
    header_nbytes: int = 0
    header_digest: str = ""
    notes: tuple[str, ...] = ()
    failure: Failure | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, decided once for all ranks by the coordinator."""

    committed: bool
    fingerprint: str = ""
    nbytes: int = 0
    committed_at: float = 0.0
    notes: tuple[str, ...] = ()
    failure: Failure | None = None
    retry: bool = False


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator makes the commit (no failure), or the attempt was given up for this reason: whichever
    was said first."""

    failure: Failure | None = None


State = Literal["waiting", "writing", "durable", "committing", "ended"]
"""Waiting for the directory, or, on the coordinator, making it; writing the shard; waiting for the other
ranks; making the commit (the coordinator only); outcome known."""


class SaveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a writer last reported about an attempt on its arena's status page; times are Unix seconds, 0 if
    not reached.

    words: how often it has reported. It does so whenever a step of its work is done, and again and again
    while it waits for others: a number that stays means that the writer, or the storage under it, hangs.
    """

    attempt: str
    state: State
    words: int = 0
    nbytes_written: int = 0
    written_at: float = 0.0
    durable_at: float = 0.0
    outcome: Outcome | None = None


def ready_key(attempt: str) -> str:
    """Set by the coordinator; holds a `Ready`."""
    return f"{attempt}/ready"


def receipt_key(attempt: str, rank: int) -> str:
    return f"{attempt}/receipt/{rank}"


def failed_key(attempt: str) -> str:
    """Set by the first rank that fails, so that the coordinator need not wait for the others to hear of
    it."""
    return f"{attempt}/failed"


def outcome_key(attempt: str) -> str:
    return f"{attempt}/outcome"


def fate_key(attempt: str) -> str:
    """Holds a `Fate`."""
    return f"{attempt}/fate"


def gone_key(attempt: str) -> str:
    """Set by the writer whose trainer has ended, for the attempt's whole run: no later save can succeed
    either."""
    return f"{AttemptId.parse(attempt).run}/gone"
