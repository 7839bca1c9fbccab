"""Has the process of a rank on this host ended?

A rank that is killed tells nobody, but the kernel tells the processes of its host at once. Each rank watches
those next to it, which are on its host where ranks are numbered host by host, and tells all others. Only
where a whole host is lost does nobody see it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading

import msgspec

from ckptengine.comm.host import host_id
from ckptengine.comm.transport import Transport

REACH = 8
"""So many ranks below this one, and above, are watched: where some of a host die together, one is left whom
that concerns."""


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """started: by the kernel's clock, as another process may get the number of one that has ended."""

    host: bytes
    pid: int
    started: int


class Neighbours:
    """The processes of the ranks next to `rank`. The transport's keys under `prefix` are no one else's.

    `publish` once on each rank; `ended` in any thread, and `ConnectionError` from it if the transport does
    not answer; `close` at the end.
    """

    def __init__(self, rank: int, world_size: int, transport: Transport, prefix: str) -> None:
        self._rank = rank
        self._transport = transport
        self._prefix = prefix
        self._here: bytes | None = None
        reach = range(max(rank - REACH, 0), min(rank + REACH + 1, world_size))
        self._unknown = {one for one in reach if one != rank}
        self._watched: dict[int, int] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()

    def publish(self) -> None:
        """Say where this rank is, for the others to watch. Nothing where the system has no means to."""
        with contextlib.suppress(OSError, AttributeError, ValueError, IndexError):
            os.close(os.pidfd_open(os.getpid()))
            here = host_id()
            place = _Place(here, os.getpid(), _started(os.getpid()))
            self._here = here
            if self._unknown:
                self._transport.set(f"{self._prefix}/{self._rank}", msgspec.msgpack.encode(place))

    def ended(self) -> list[int]:
        """The ranks that are known to have ended, ascending."""
        if self._here is None:
            return []
        with self._lock:
            for rank in sorted(self._unknown):
                told = self._transport.peek(f"{self._prefix}/{rank}")
                if told is not None:
                    self._unknown.discard(rank)
                    self._watch(rank, msgspec.msgpack.decode(told, type=_Place))
            poll = select.poll()
            for fd in self._watched.values():
                poll.register(fd, select.POLLIN)
            over = {fd for fd, _ in poll.poll(0)}
            for rank in [rank for rank, fd in self._watched.items() if fd in over]:
                os.close(self._watched.pop(rank))
                self._ended.add(rank)
            return sorted(self._ended)

    def _watch(self, rank: int, place: _Place) -> None:
        if place.host != self._here:
            return
        try:
            descriptor = os.pidfd_open(place.pid)
        except ProcessLookupError:
            self._ended.add(rank)
            return
        except OSError:
            return  # no descriptors are left: it goes unwatched
        try:
            same = _started(place.pid) == place.started
        except (OSError, ValueError, IndexError):
            same = False
        if same:
            self._watched[rank] = descriptor
        else:
            os.close(descriptor)
            self._ended.add(rank)

    def close(self) -> None:
        with self._lock:
            for descriptor in self._watched.values():
                os.close(descriptor)
            self._watched.clear()
            self._unknown.clear()
        if self._here is not None:
            with contextlib.suppress(ConnectionError):
                self._transport.delete(f"{self._prefix}/{self._rank}")


def _started(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name of the command comes before, in brackets, and may hold anything.
        return int(file.read().rpartition(b")")[2].split()[19])
