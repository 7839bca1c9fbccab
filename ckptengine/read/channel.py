"""How do blocks get from the rank that has read them to the others of its cell? The contract."""

from __future__ import annotations

from typing import Protocol

from ckptengine.comm.failure import PeerLostError
from ckptengine.read.sharing import Turn
from ckptengine.storage.direct import Memory


class StoppedHereError(Exception):
    """Another thread of this process has failed, and told the channel to stop."""


class Channel(Protocol):
    """Carries blocks among the members of one cell, each member at its own pace, in the order of the turns.

    For a turn of its own, a member takes a `slot`, fills it, and calls `publish`. For another's, it calls
    `receive`, takes what it wants from the address that it gets, and calls `release`. Each turn is done once;
    a member's own in order, and the others' in order, by one thread or several. At the end `finish`. Where
    something goes wrong: `stop` in whatever thread sees it first, then `give_up` once no thread is in here.

    `slot`, `receive` and `finish` wait for other members. They raise `StoppedByPeerError` when one has given
    up, `PeerLostError` with its rank when one has ended or not been heard of for the timeout, and
    `StoppedHereError` after `stop`.
    """

    @property
    def name(self) -> str:
        """For people."""
        ...

    def slot(self, turn: Turn) -> Memory:
        """Memory for the block of a turn of this member's: page-aligned, for direct transfers."""
        ...

    def publish(self, turn: Turn, nbytes: int) -> None:
        """The slot holds the block, checked."""
        ...

    def receive(self, turn: Turn, nbytes: int) -> int:
        """The address of the block that another member has read; valid until `release`, in this thread."""
        ...

    def release(self, turn: Turn) -> None: ...

    def finish(self) -> None:
        """Wait until the others have all that was published."""
        ...

    def stop(self) -> None:
        """End all waits in this process. From any thread."""
        ...

    def give_up(self, undone: list[Turn]) -> None:
        """Have the other members stop. undone: this member's turns, own and others', that were not done."""
        ...

    def close(self) -> None:
        """Give up what the channel holds. Not while a thread is in it."""
        ...


def lost(rank: int) -> PeerLostError:
    return PeerLostError(f"rank {rank} ended while blocks were exchanged", rank=rank)


def silent(rank: int, timeout_s: float) -> PeerLostError:
    return PeerLostError(
        f"rank {rank} did not take part for {timeout_s:g} s while blocks were exchanged", rank=rank
    )
