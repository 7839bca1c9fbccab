"""Have all ranks done what each does in its own time, or has one of them failed?

`Group` is for ranks that come to the same place in their programs. Here they do not wait for each other: each
says when it is done, or that it has failed, and looks now and then for what has become of the others.
"""

from __future__ import annotations

import msgspec

from ckptengine.comm.failure import Failure
from ckptengine.comm.group import COORDINATOR
from ckptengine.comm.transport import Transport


class RollCall:
    """One call of the roll of `world_size` ranks, under `prefix`, which no other has.

    `done` or `fail` is called once by each rank; `look` as often as one likes, by one thread at a time. The
    first failure is the one that all ranks hear of. The methods raise `ConnectionError` if the transport does
    not answer.
    """

    def __init__(self, rank: int, world_size: int, transport: Transport, prefix: str) -> None:
        self._rank = rank
        self._world_size = world_size
        self._transport = transport
        self._prefix = prefix
        # Ranks below it have been heard of; the coordinator's.
        self._next = 0

    def done(self) -> None:
        """This rank has done its part, and cannot fail any more."""
        if self._world_size > 1:
            self._transport.set(f"{self._prefix}/{self._rank}", b"")

    def fail(self, failure: Failure) -> Failure:
        """This rank has failed, or has given up waiting. Returns the failure that counts."""
        if self._world_size == 1:
            return failure
        first = self._transport.set_if_absent(f"{self._prefix}/failed", msgspec.msgpack.encode(failure))
        return msgspec.msgpack.decode(first, type=Failure)

    def look(self) -> Failure | bool:
        """Are all ranks done? Or the first failure. On a rank that is done itself, or wants to hear of
        others' failures only."""
        if self._world_size == 1:
            return True
        failed = self._transport.peek(f"{self._prefix}/failed")
        if failed is not None:
            return msgspec.msgpack.decode(failed, type=Failure)
        if self._rank != COORDINATOR:
            return self._transport.peek(f"{self._prefix}/all") is not None
        while self._next < self._world_size:
            if self._transport.peek(f"{self._prefix}/{self._next}") is None:
                return False
            self._next += 1
        self._transport.set(f"{self._prefix}/all", b"")
        return True

    def is_done(self, rank: int) -> bool:
        """Has a rank said that it has done its part?"""
        return self._transport.peek(f"{self._prefix}/{rank}") is not None

    @property
    def missing(self) -> int:
        """A rank that has not been heard of, as far as this one can tell."""
        return self._next if self._rank == COORDINATOR else COORDINATOR

    def forget(self) -> None:
        """Once every rank has heard how it ended: the coordinator's, for all."""
        if self._world_size > 1 and self._rank == COORDINATOR:
            for name in ("failed", "all", *map(str, range(self._world_size))):
                self._transport.delete(f"{self._prefix}/{name}")
