"""The channel of ranks on one host: rings in shared memory, out of which each takes what it wants.

A block is copied once, into its destinations; sockets of the same host copy it twice more, at several times
the CPU time. The owner of a ring is watched: a process that has ended is seen at once, not at a deadline.
Beside its ring each says whom it waits for: so who has waited for too long finds the one that does not wait.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from ckptengine.comm.failure import PeerLostError, StoppedByPeerError
from ckptengine.comm.verdict import at_fault
from ckptengine.format.limits import PAGE, round_up
from ckptengine.read.channel import StoppedHereError, lost, silent
from ckptengine.read.sharing import Turn
from ckptengine.staging.ring import Ring

SLOTS = 6
"""Of one rank: as many blocks can be on their way. Fewer where these would take more than `MAX_NBYTES`."""

MAX_NBYTES = 64 << 20
"""Of one rank's ring. Beside it, a restore has buffers for the blocks that it alone needs."""

MIN_SLOTS = 2

POLL_FIRST_S = 0.00005
POLL_LAST_S = 0.001
LOOK_S = 0.1
"""So often who waits sees whether the others are still there, and says that it waits."""

STALE_S = 10.0
"""Whoever has not said for so long that it waits does not: it is stopped, or at work."""

_STOPPED, _ENDED, _SILENT = 1, 2, 3
"""Why a ring's owner has given up: in the lowest bits, with the member that is lost above them."""
_WHY_BITS = 2


def slots_for(block_nbytes: int, turns: int) -> int:
    """How many slots a ring has for a rank that reads `turns` blocks of up to `block_nbytes`; 0 if two do not
    fit into the bound."""
    slots = min(SLOTS, MAX_NBYTES // round_up(block_nbytes, PAGE))
    return 0 if slots < MIN_SLOTS else max(1, min(slots, turns))


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank's ring is."""

    pid: int
    fd: int
    capacity: int
    slots: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Slot:
    view: memoryview
    address: int


class LocalChannel:
    """`Channel` among processes of one host. `offer` goes to the other members, their offers to `connect`."""

    name = "shared memory"

    def __init__(self, members: tuple[int, ...], me: int, turns: list[Turn], nbytes: int, timeout_s: float):
        """members: ranks. me: this process's position in them. turns: this member's, own and others'. nbytes:
        of the largest block. Raises `SaveFailedError` if there is no memory for the ring."""
        self._members = members
        self._me = me
        self._nbytes = round_up(max(nbytes, 1), PAGE)  # of this rank's slots
        self._timeout_s = timeout_s
        self._own = [turn for turn in turns if turn.reader == me]
        self._published = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._why = _STOPPED
        self._watched: dict[int, int] = {}
        self._mine = Ring.make(slots_for(self._nbytes, len(self._own)), self._nbytes, len(members))
        self._rings = {me: self._mine}
        # Beside the first reads: before them, it would be time in which nobody reads.
        self._ends = threading.Event()
        self._populating = threading.Thread(target=self._populate, name="ckptengine-ring", daemon=True)
        try:
            self._populating.start()
        except BaseException:
            self._mine.close()
            raise

    def offer(self) -> Offer:
        return Offer(os.getpid(), self._mine.fd, self._mine.arena_nbytes, self._mine.slots, self._nbytes)

    def connect(self, offers: list[Offer]) -> None:
        """offers: of all members, in order. Raises `StorageError` if a ring cannot be reached."""
        for member, offer in enumerate(offers):
            if member == self._me:
                continue
            with contextlib.suppress(OSError):  # it has ended: the ring says so, or it is waited for in vain
                self._watched[member] = os.pidfd_open(offer.pid)
            self._rings[member] = Ring.join(
                offer.pid, offer.fd, offer.capacity, offer.slots, offer.nbytes, len(self._members)
            )

    def slot(self, turn: Turn) -> _Slot:
        before = turn.number - self._mine.slots
        if before >= 0:
            self._wait_released(self._own[before])
        number = turn.number + 1
        return _Slot(self._mine.view(number), self._mine.address(number))

    def publish(self, turn: Turn, nbytes: int) -> None:
        self._mine.publish(turn.number + 1)
        with self._lock:
            self._published += 1

    def receive(self, turn: Turn, nbytes: int) -> int:
        ring = self._rings[turn.reader]
        number = turn.number + 1
        self._wait(partial(ring.is_published, number), turn.reader)
        return ring.address(number)

    def release(self, turn: Turn) -> None:
        self._rings[turn.reader].release(turn.number + 1, self._me)

    def finish(self) -> None:
        for turn in self._own[max(0, len(self._own) - self._mine.slots) :]:
            self._wait_released(turn)

    def stop(self) -> None:
        self._stopped.set()

    def give_up(self, undone: list[Turn]) -> None:
        self._mine.give_up(self._why)

    def close(self) -> None:
        self._ends.set()
        self._populating.join()
        for ring in self._rings.values():
            ring.close()
        for fd in self._watched.values():
            os.close(fd)
        self._watched.clear()

    def _populate(self) -> None:
        # Pages that cannot be had this way come when a slot is first written to.
        with contextlib.suppress(OSError):
            self._mine.populate(lambda: not self._ends.is_set())

    def _wait_released(self, turn: Turn) -> None:
        number = turn.number + 1
        for member in turn.members:
            if member != self._me:
                self._wait(partial(self._mine.has_released, number, member), member)

    def _wait(self, is_so: Callable[[], bool], member: int) -> None:
        """Until it is so, which takes what `member` does."""
        pause = POLL_FIRST_S
        began = looked = time.monotonic()
        while not is_so():
            if self._stopped.is_set():
                raise StoppedHereError
            for other, ring in self._rings.items():
                if ring.given_up and other != self._me:
                    raise self._given_up(other, ring.given_up)
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                self._look()
                self._mine.wait_for(member, _ms(now))
            if now - began > self._timeout_s:
                raise self._lost(self._at_fault(member), _SILENT)
            time.sleep(pause)
            pause = min(2 * pause, POLL_LAST_S)

    def _look(self) -> None:
        """Raises if a member's process has ended."""
        with self._lock:
            poll = select.poll()
            for fd in self._watched.values():
                poll.register(fd, select.POLLIN)
            ended = {fd for fd, _ in poll.poll(0)}
        for member, fd in self._watched.items():
            if fd in ended and not self._rings[member].given_up:
                raise self._lost(member, _ENDED)

    def _at_fault(self, member: int) -> int:
        """Whom this one really waits for, when it waits for `member`."""
        now, stale = _ms(time.monotonic()), _ms(min(STALE_S, self._timeout_s / 2))
        waits = {
            one: [other for other in self._rings if now - ring.waited_for(other) < stale]
            for one, ring in self._rings.items()
        }
        return at_fault(member, waits)

    def _given_up(self, other: int, why: int) -> Exception:
        lost, why = why >> _WHY_BITS, why & ((1 << _WHY_BITS) - 1)
        if why == _STOPPED:
            return StoppedByPeerError("it has stopped reading", rank=self._members[other])
        return self._lost(lost, why)

    def _lost(self, member: int, why: int) -> PeerLostError:
        """Also what this rank tells the others when it gives up."""
        if self._why == _STOPPED:
            self._why = member << _WHY_BITS | why
        rank = self._members[member]
        return lost(rank) if why == _ENDED else silent(rank, self._timeout_s)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
