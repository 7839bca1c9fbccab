"""How does a writer say how far a save is, and that it is alive? By words on the arena's status page.

The trainer gives up a writer that is silent for too long, in whatever state it is. So there is a word after
each step of the work, which says that the storage answers, and words all the while in each wait for somebody
else: another rank, the trainer's copy. No thread speaks for its own sake: it would go on while the work
hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ckptengine.staging.status import StatusPage
from ckptengine.write.messages import Outcome, SaveStatus, State, WriteTask

WORD_INTERVAL_S = 0.05
"""A word costs 20 µs."""

Beat = Callable[[], None]
"""Says that there is progress, or that it is somebody else who is waited for. Any thread may call it, and
often."""


def unheard() -> None:
    """A beat for nobody."""


class Reporter:
    """Puts a save's progress on the status page, where the trainer looks."""

    def __init__(self, task: WriteTask, page: StatusPage) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._status = SaveStatus(attempt=task.attempt, state="waiting")
        self._spoke_at = 0.0
        self._put()

    def beat(self) -> None:
        """See `Beat`."""
        if time.monotonic() - self._spoke_at >= WORD_INTERVAL_S:
            self._put()

    def enter(self, state: State) -> None:
        self._put(state=state)

    def wrote(self, nbytes: int) -> None:
        if time.monotonic() - self._spoke_at >= WORD_INTERVAL_S:
            self._put(nbytes_written=nbytes)

    def written(self) -> None:
        self._put(written_at=time.time())

    def durable(self) -> None:
        self._put(state="durable", durable_at=time.time())

    def ended(self, outcome: Outcome) -> None:
        self._put(state="ended", outcome=outcome)

    def _put(self, **changes: Any) -> None:
        with self._lock:
            self._spoke_at = time.monotonic()
            self._status = msgspec.structs.replace(self._status, words=self._status.words + 1, **changes)
            self._page.write(msgspec.msgpack.encode(self._status))
