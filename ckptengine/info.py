"""What a save and a restore report: frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field


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


@dataclass(frozen=True, slots=True)
class FallBack:
    """A committed step that could not be restored, and why."""

    step: int
    reason: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class RestoreInfo:
    """A finished restore.

    nbytes: bytes delivered into this rank's state. seconds: wall time of the whole call. read_seconds: of
    reading, checking and placing the bytes. missing, unexpected: keys only in the target, only in the
    checkpoint (with `strict=False`).
    fell_back_from: newer steps that were damaged. source: where the bytes came from. from_cache_nbytes: how
    many of them the page cache had. verified: every byte was checked against its digest.
    """

    step: int
    path: str
    nbytes: int
    seconds: float
    read_seconds: float
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    fell_back_from: tuple[FallBack, ...] = field(default=())
    source: str = "storage"
    from_cache_nbytes: int = 0
    verified: bool = True
