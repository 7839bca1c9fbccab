"""What becomes of the saves under way: polled between steps, logged, and waited for at the end."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from typing import Any

import ckptengine as ck
from trainer.events import EventLog

logger = logging.getLogger("trainer")


class Saves:
    """Starts saves and follows them to their commit, on the training thread and without waiting for them."""

    def __init__(self, checkpointer: ck.Checkpointer, events: EventLog) -> None:
        self._checkpointer = checkpointer
        self._events = events
        self._under_way: deque[ck.SaveHandle] = deque()

    def start(self, step: int, state: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Request a save; what the training thread stood still for is measured here, around the call."""
        began = time.perf_counter()
        handle = self._checkpointer.async_save(step, state, metadata=metadata)
        stall_s = time.perf_counter() - began
        self._under_way.append(handle)
        self._events.write("save_requested", step=step, stall_s=stall_s)
        logger.info("step %5d  save requested; training stood still for %.1f ms", step, stall_s * 1e3)

    def poll(self) -> None:
        """Report the saves that have ended since the last call; a failed one raises here."""
        while self._under_way and self._under_way[0].done():
            self._report(self._under_way.popleft())

    def finish(self) -> None:
        """Wait until every save is committed; `--commit-timeout-s` bounds each wait."""
        while self._under_way:
            self._report(self._under_way.popleft())

    def _report(self, handle: ck.SaveHandle) -> None:
        info = handle.result()
        times = dataclasses.asdict(info.times)
        self._events.write(
            "save_committed",
            step=info.step,
            nbytes=info.nbytes,
            rank_nbytes=info.rank_nbytes,
            path=info.path,
            **times,
        )
        seconds = info.times.committed - info.times.requested
        logger.info(
            "step %5d  committed: %.1f MiB, %.2f s after the request", info.step, info.nbytes / 2**20, seconds
        )
