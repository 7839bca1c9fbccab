"""How does one process hand blocks to others of its host without a copy? A ring of slots in shared memory.

Its owner fills a slot and publishes it; the others, who map the same memory, take what they want straight out
of it and release it; when all have, the owner fills it with something else. Each word is written by one
process only, and stored and loaded as one machine word. Nothing here waits: `ckptengine.read.local` does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ckptengine.format.limits import PAGE, round_up
from ckptengine.staging.arena import Arena, attach
from ckptengine.storage.linux import MADV_POPULATE_WRITE, madvise

_WORD = 8

POPULATE_NBYTES = 4 << 20
"""At once: nobody else in the process can map memory meanwhile."""


class Ring:
    """`slots` slots of `nbytes` bytes each, for `members` processes.

    The arena's payload holds one word that says that the owner has given up, and why; for each member when
    the owner has last been waiting for it; for each slot the number of what is in it; for each slot and
    member the number of what that member has released last; then the slots. Numbers count from 1.
    """

    def __init__(self, arena: Arena, slots: int, nbytes: int, members: int) -> None:
        self.slots = slots
        self._arena = arena
        self._members = members
        self._nbytes = nbytes
        words = self._count(slots, members)
        self._words = (ctypes.c_uint64 * words).from_buffer(arena.payload)
        self._first = round_up(words * _WORD, PAGE)

    @staticmethod
    def capacity(slots: int, nbytes: int, members: int) -> int:
        """How large the arena must be."""
        return round_up(Ring._count(slots, members) * _WORD, PAGE) + slots * nbytes

    @staticmethod
    def _count(slots: int, members: int) -> int:
        """Of the words."""
        return 1 + members + slots * (1 + members)

    @classmethod
    def make(cls, slots: int, nbytes: int, members: int) -> Ring:
        """A ring of this process's. Raises `SaveFailedError` if there is no memory for it.

        Its slots get their pages by `populate`, or when they are first written to.
        """
        arena = Arena(cls.capacity(slots, nbytes, members), try_huge=False, prefault=False)
        return cls(arena, slots, nbytes, members)

    @classmethod
    def join(cls, pid: int, fd: int, capacity: int, slots: int, nbytes: int, members: int) -> Ring:
        """The ring of another process. Raises `StorageError` if it cannot be reached."""
        return cls(attach(pid, fd, capacity), slots, nbytes, members)

    @property
    def fd(self) -> int:
        return self._arena.fd

    @property
    def arena_nbytes(self) -> int:
        return self._arena.capacity

    def address(self, number: int) -> int:
        """Of the slot that holds what has this number."""
        return self._arena.payload_address + self._first + self._slot(number) * self._nbytes

    def view(self, number: int) -> memoryview:
        at = self._first + self._slot(number) * self._nbytes
        return self._arena.payload[at : at + self._nbytes]

    def populate(self, goes_on: Callable[[], bool]) -> None:
        """Give the slots their pages, in order, as long as it `goes_on`; also while they are being filled.

        Not after `close`. Raises OSError if there is no memory, and before Linux 5.14.
        """
        start = self._arena.payload_address + self._first
        for at in range(0, self.slots * self._nbytes, POPULATE_NBYTES):
            if not goes_on():
                return
            nbytes = min(POPULATE_NBYTES, self.slots * self._nbytes - at)
            madvise(start + at, nbytes, MADV_POPULATE_WRITE)

    def publish(self, number: int) -> None:
        """The slot is filled."""
        self._words[self._filled(number)] = number

    def is_published(self, number: int) -> bool:
        return bool(self._words[self._filled(number)] == number)

    def release(self, number: int, member: int) -> None:
        """This member has what it wanted of it."""
        self._words[self._released(number, member)] = number

    def has_released(self, number: int, member: int) -> bool:
        return bool(self._words[self._released(number, member)] >= number)

    def wait_for(self, member: int, now_ms: int) -> None:
        """The owner is waiting for this member."""
        self._words[1 + member] = now_ms

    def waited_for(self, member: int) -> int:
        """When it has last said so; 0: never."""
        return int(self._words[1 + member])

    def give_up(self, why: int = 1) -> None:
        """The owner will publish nothing more. why: not 0."""
        self._words[0] = why

    @property
    def given_up(self) -> int:
        """0, or why the owner has given up."""
        return int(self._words[0])

    def close(self) -> None:
        """Give the memory up; a slot that is still looked at stays until the last view of it is gone."""
        self._words = (ctypes.c_uint64 * len(self._words))()
        self._arena.close()

    def _slot(self, number: int) -> int:
        return (number - 1) % self.slots

    def _filled(self, number: int) -> int:
        return 1 + self._members + self._slot(number)

    def _released(self, number: int, member: int) -> int:
        return 1 + self._members + self.slots + self._slot(number) * self._members + member
