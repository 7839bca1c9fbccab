"""Which parcels have arrived, and who waits for one?

A parcel is what is waited for as one: a tensor of a target, or several that share memory. It is made of
pieces that arrive one by one, in whatever order and thread; it is there when the last one is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ckptengine.errors import CommitTimeoutError

LOOK_S = 1.0
"""So often a thread that waits sees whether anything moves; on the main thread, signals come through."""


class Arrivals:
    """Thread-safe. pieces: of how many each parcel is made; one of none is there from the start.

    on_whole: called with each parcel whose last piece has come, before anybody hears that it is there.
    """

    def __init__(self, pieces: Sequence[int], on_whole: Callable[[int], None] = lambda parcel: None) -> None:
        self._left = list(pieces)
        self._there = bytearray(not count for count in self._left)
        self._missing = len(self._there) - sum(self._there)
        self._on_whole = on_whole
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._moved = time.monotonic()

    def arrive(self, parcels: Iterable[int]) -> None:
        """One piece of each of the parcels is there, and known to be good."""
        whole = []
        with self._changed:
            self._moved = time.monotonic()
            for parcel in parcels:
                self._left[parcel] -= 1
                if not self._left[parcel]:
                    whole.append(parcel)
        if not whole:
            return
        for parcel in whole:
            self._on_whole(parcel)
        with self._changed:
            for parcel in whole:
                self._there[parcel] = True
            self._missing -= len(whole)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come; every wait from now on raises `error`. The first one counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    @property
    def error(self) -> BaseException | None:
        return self._error

    def are_there(self, parcels: Iterable[int]) -> bool:
        there = self._there
        return all(there[parcel] for parcel in parcels)

    def all_there(self) -> bool:
        return not self._missing

    def wait(self, parcels: Iterable[int], stalled_s: float, timeout_s: float | None = None) -> bool:
        """Wait until all of the parcels are there; False if `timeout_s` pass first.

        Raises the error of `fail`, also if they are there, and `CommitTimeoutError` when nothing at all has
        arrived for `stalled_s`.
        """
        wanted = [parcel for parcel in parcels if not self._there[parcel]]
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                wanted = [parcel for parcel in wanted if not self._there[parcel]]
                if not wanted:
                    return True
                now = time.monotonic()
                if now - self._moved > stalled_s:
                    raise CommitTimeoutError(f"no block was read for {stalled_s:g} s")
                if deadline is not None and now >= deadline:
                    return False
                self._changed.wait(LOOK_S if deadline is None else min(LOOK_S, deadline - now))
