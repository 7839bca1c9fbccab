"""What a save and a restore report: frozen values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ckptengine.phases import GB, Phase, RankPhases, RestorePhases, table

CACHED_SHARE = 0.01
"""With more than this from the page cache, a rate says nothing about the storage."""


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """When a save reached its moments, in Unix seconds of this rank's clock (`committed`: the coordinator's);
    0.0 if not yet.

    `returned` is when `async_save` gave control back: once the state was `staged`, except with
    `Config(snapshot="overlap")`. `written` is the last write, `durable` the end of the sync. `waited_s`:
    seconds that optimizer steps waited for the state to be staged.
    """

    requested: float = 0.0
    returned: float = 0.0
    staged: float = 0.0
    written: float = 0.0
    durable: float = 0.0
    committed: float = 0.0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """A committed save.

    path: the step's. attempt: its id. fingerprint: the manifest's digest. nbytes: of all ranks' shard files.
    rank_nbytes: the tensor bytes this rank staged. notes: what did not go as wished without harm to the
    checkpoint, such as a striping that Lustre would not take; the same on all ranks.
    """

    step: int
    path: str
    attempt: str
    fingerprint: str
    nbytes: int
    rank_nbytes: int
    times: SaveTimes
    notes: tuple[str, ...] = ()

    @property
    def stall_s(self) -> float:
        """Seconds that training stood still: in the call, and in steps that waited for the copy."""
        return self.times.returned - self.times.requested + self.times.waited_s

    @property
    def phases(self) -> dict[str, Phase]:
        """Wall time from one moment to the next, with the bytes of this rank: `stage`, `write`, `sync`, and
        `commit`, in which it waited for all ranks (by the coordinator's clock).

        What overlaps counts as the earlier one: bytes that were written while others were still being staged
        make `write` shorter. No `thread_seconds`.
        """
        times = self.times
        staged = max(times.staged, times.requested)
        return {
            "stage": Phase(staged - times.requested, self.rank_nbytes),
            "write": Phase(max(times.written - staged, 0.0), self.rank_nbytes),
            "sync": Phase(max(times.durable - max(times.written, staged), 0.0)),
            "commit": Phase(max(times.committed - times.durable, 0.0)),
        }

    def summary(self) -> str:
        """A table for people: what this rank's save took, phase by phase."""
        seconds = max(self.times.committed - self.times.requested, 0.0)
        head = f"step {self.step}: {self.rank_nbytes:,} bytes of this rank committed in {seconds:.3f} s"
        return "\n".join(
            [
                f"{head}, {self.stall_s:.4f} s of them in the way of training",
                *table(iter(self.phases.items()), seconds),
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        phases = {name: phase.to_dict() for name, phase in self.phases.items()}
        return {**asdict(self), "stall_s": self.stall_s, "phases": phases}


@dataclass(frozen=True, slots=True)
class FallBack:
    """A committed step that could not be restored, and why.

    rank: whose shard it was. met_by: the rank that met the error, another one where it was reading that shard
    for itself or for others.
    """

    step: int
    reason: str
    rank: int | None = None
    met_by: int | None = None


@dataclass(frozen=True, slots=True)
class ExchangeInfo:
    """How a restore came by what several ranks need.

    used: each rank of some has read a part of it, and got the rest from the others. why: the reason for that,
    or against it. channel: `"shared memory"` or `"gloo"`; "" if unused. ranks: how many exchanged, this one
    included. received_nbytes, sent_nbytes: blocks that this rank got from others, and that others got
    from it, each counted once.
    """

    used: bool = False
    why: str = "no two ranks need the same blocks"
    channel: str = ""
    ranks: int = 1
    received_nbytes: int = 0
    sent_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class RestoreInfo:
    """A finished restore.

    nbytes: bytes delivered into this rank's state. seconds: wall time of the whole call. read_seconds: of
    reading, checking and placing the bytes. missing, unexpected: keys only in the target, only in the
    checkpoint (with `strict=False`).
    world_size: of the ranks that saved it. from_rank0, dropped: values that each of these had its own of and
    that another number of ranks could not have back, so that all got rank 0's, or kept what they had (see
    `Checkpointer.restore`).
    fell_back_from: newer steps that were damaged. source: where the bytes came from. from_cache_nbytes: how
    many of them the page cache had. verified: every byte was checked against its digest.
    rank, phases: whose figures these are, and where its `seconds` went. slowest: the rank that was busy
    longest, with its phases; known to all ranks. ranks: every rank's, in rank order; the coordinator's
    (rank 0's) alone, else empty. limit_gbps: `Config.storage_gbps`. exchange: whether this rank read all
    it needed itself, and why.
    """

    step: int
    path: str
    nbytes: int
    seconds: float
    read_seconds: float
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    world_size: int = 0
    from_rank0: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    fell_back_from: tuple[FallBack, ...] = field(default=())
    source: str = "storage"
    from_cache_nbytes: int = 0
    verified: bool = True
    rank: int = 0
    phases: RestorePhases = field(default_factory=RestorePhases)
    slowest: RankPhases | None = None
    ranks: tuple[RankPhases, ...] = ()
    limit_gbps: float | None = None
    exchange: ExchangeInfo = field(default_factory=ExchangeInfo)

    @property
    def limit_share(self) -> float | None:
        """Bytes read from storage by this rank, a second of `read_seconds`, in parts of `limit_gbps`; 1.0 is
        all that the storage was measured to give.

        `read_seconds` is the whole wall time from the first read to the last check, so whatever holds the
        reads up lowers the share. None if no limit was given, and where the page cache had more than a
        hundredth of the bytes.
        """
        nbytes = self.phases.read.nbytes
        if self.limit_gbps is None or not nbytes or not self.read_seconds:
            return None
        if self.from_cache_nbytes > CACHED_SHARE * nbytes:
            return None
        return (nbytes - self.from_cache_nbytes) / self.read_seconds / GB / self.limit_gbps

    def summary(self) -> str:
        """A table for people: where this rank's time went, and which rank was the slowest."""
        rate = self.nbytes / self.seconds / GB if self.seconds > 0 else 0.0
        lines = [
            f"step {self.step}, rank {self.rank}: {self.nbytes:,} bytes "
            f"in {self.seconds:.3f} s ({rate:.2f} GB/s)",
            *table(self.phases.items(), self.seconds),
        ]
        if self.limit_share is not None:
            lines.append(f"read at {self.limit_share:.0%} of the storage's {self.limit_gbps:g} GB/s")
        if self.exchange.used:
            got = f"{self.exchange.received_nbytes:,} bytes came from {self.exchange.ranks - 1} other ranks"
            lines.append(f"{got}, through {self.exchange.channel}: {self.exchange.why}")
        if self.slowest is not None and (len(self.ranks) > 1 or self.slowest.rank != self.rank):
            slowest = self.slowest
            lines.append(
                f"slowest: rank {slowest.rank}, busy for {slowest.seconds:.3f} s, most of it {slowest.phase}"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            **asdict(self),
            "phases": self.phases.to_dict(),
            "slowest": None if self.slowest is None else self.slowest.to_dict(),
            "ranks": [one.to_dict() for one in self.ranks],
            "limit_share": self.limit_share,
        }
