"""Which arenas are kept, and who gets one next? Few: each is as large as the state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ckptengine.errors import CommitTimeoutError, SaveFailedError
from ckptengine.format.limits import round_up
from ckptengine.staging.arena import GRAIN, Arena
from ckptengine.staging.status import STATUS_NBYTES
from ckptengine.storage.headroom import available_memory

logger = logging.getLogger(__name__)

QUIET_WAIT_S = 0.5
"""A shorter wait for a free arena is not worth a line in the log."""


class ArenaPool:
    """Arenas kept for reuse, bounded in number and bytes. Thread-safe.

    max_arenas: at most so many at once. budget_nbytes: bound on the bytes of all of them, None for none.
    held_back: asked, whenever one is to be made, how many bytes must stay available beside it.
    """

    def __init__(
        self,
        max_arenas: int = 2,
        budget_nbytes: int | None = None,
        held_back: Callable[[], int] = lambda: 0,
    ) -> None:
        if max_arenas < 1:
            raise ValueError(f"max_arenas must be at least 1, not {max_arenas}")
        self._max_arenas = max_arenas
        self._budget = budget_nbytes
        self._held_back = held_back
        self._changed = threading.Condition()
        self._free: list[Arena] = []
        self._busy: list[Arena] = []
        # Bytes of arenas being made: outside the lock, since it takes a second per GiB.
        self._making: list[int] = []
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes held by all arenas."""
        with self._changed:
            return self._held()

    def acquire(self, nbytes: int, timeout_s: float) -> Arena:
        """An arena with room for `nbytes` of payload, for the caller alone until `release`. Its content is
        undefined.

        Reuses a free one, makes one if the bounds allow (in place of free ones that are too small), else
        waits for a release, and logs that. `CommitTimeoutError` after `timeout_s`; `SaveFailedError` if it
        can never fit.
        """
        need = STATUS_NBYTES + round_up(nbytes, GRAIN)
        if self._budget is not None and need > self._budget:
            raise SaveFailedError(
                "the snapshot does not fit the memory set aside for snapshots",
                expected=f"at most {self._budget} bytes",
                actual=f"{need} bytes",
                hint="raise arena_budget_nbytes",
            )
        started = time.monotonic()
        waited = False
        with self._changed:
            while True:
                if self._closed:
                    raise SaveFailedError("the snapshot memory is closed", hint="the checkpointer was closed")
                fitting = [arena for arena in self._free if arena.capacity >= nbytes]
                if fitting:
                    arena = min(fitting, key=lambda arena: arena.capacity)
                    self._free.remove(arena)
                    self._busy.append(arena)
                    break
                if self._make_room(need):
                    arena = self._make(nbytes, need)
                    break
                left = started + timeout_s - time.monotonic()
                if left <= 0:
                    raise CommitTimeoutError(
                        f"no snapshot memory became free in {timeout_s:g} s",
                        hint="earlier saves are still being written: save less often, or raise max_arenas",
                    )
                if not waited and time.monotonic() - started < QUIET_WAIT_S:
                    self._changed.wait(min(left, QUIET_WAIT_S))
                    continue
                if not waited:
                    waited = True
                    logger.warning(
                        "save waits for snapshot memory: %d of %d arenas are busy (%d bytes held, %d needed)",
                        len(self._busy),
                        self._max_arenas,
                        self._held(),
                        need,
                    )
                self._changed.wait(left)
        if waited:
            logger.warning("save waited %.2f s for snapshot memory", time.monotonic() - started)
        return arena

    def release(self, arena: Arena) -> None:
        """Give an arena back for reuse. Called once nobody reads its payload any more."""
        self._give_back(arena, reuse=True)

    def discard(self, arena: Arena) -> None:
        """Give an arena back, never to be reused: its writer could not be ended and may still read it."""
        self._give_back(arena, reuse=False)

    def close(self) -> None:
        """Free what is free, the rest as it is given back; `acquire` fails from now on. Idempotent."""
        with self._changed:
            self._closed = True
            for arena in self._free:
                arena.close()
            self._free.clear()
            self._changed.notify_all()

    def __enter__(self) -> ArenaPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _held(self) -> int:
        return sum(STATUS_NBYTES + arena.capacity for arena in (*self._free, *self._busy)) + sum(self._making)

    def _make_room(self, need: int) -> bool:
        """Whether an arena of `need` bytes may be made, by the bounds and by the memory there is; closes free
        ones (too small) where it takes that."""
        busy = len(self._busy) + len(self._making)
        held = self._held() - sum(STATUS_NBYTES + arena.capacity for arena in self._free)
        if busy >= self._max_arenas or (self._budget is not None and held + need > self._budget):
            return False
        self._free.sort(key=lambda arena: arena.capacity, reverse=True)
        while self._free and (
            busy + len(self._free) >= self._max_arenas
            or (self._budget is not None and self._held() + need > self._budget)
        ):
            self._free.pop().close()
        need += self._held_back()
        available = available_memory()
        if available is None:
            return True
        while self._free and need > available:
            available += self._free[-1].capacity
            self._free.pop().close()
        # With none to wait for, making it will say what is missing.
        return need <= available or not busy

    def _make(self, nbytes: int, need: int) -> Arena:
        self._making.append(need)
        self._changed.release()
        arena = None
        try:
            arena = Arena(nbytes, held_back=self._held_back())
        finally:
            self._changed.acquire()
            self._making.remove(need)
            if arena is not None:
                self._busy.append(arena)
            self._changed.notify_all()
        return arena

    def _give_back(self, arena: Arena, *, reuse: bool) -> None:
        with self._changed:
            if not any(arena is busy for busy in self._busy):
                raise ValueError("that arena was not acquired from this pool, or was given back already")
            self._busy = [busy for busy in self._busy if busy is not arena]
            if reuse and not self._closed:
                self._free.append(arena)
            else:
                arena.close()
            self._changed.notify_all()
