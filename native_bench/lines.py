"""How is progress told where there is no terminal? In lines, with the seconds since the start."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

QUIET_S = 5.0
"""Of all that is done in so many seconds, one line tells."""
SILENT_S = 20.0
"""After so many seconds without one, a line tells what still goes on: a compiler on a busy machine, or one
save of a slow system."""


class Lines:
    """A context manager: until it is left, no longer than `silent_s` pass without a line.

    total: how often `advance` will be called. out: default, stderr as it is now.
    """

    def __init__(self, total: int, out: TextIO | None = None, silent_s: float = SILENT_S) -> None:
        self._total = total
        self._out = sys.stderr if out is None else out
        self._silent_s = silent_s
        self._start = time.monotonic()
        self._done = 0
        self._last = -QUIET_S
        self._doing = "starting"
        self._since = 0.0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def say(self, text: str) -> None:
        """What has happened, or begins."""
        with self._lock:
            self._now(text)
            self._tell(text)

    def advance(self, text: str) -> None:
        """One step more is done; text: what comes next, empty if that is nothing."""
        with self._lock:
            self._done += 1
            if not text:
                return
            step = f"{self._done}/{self._total}  {text}"
            self._now(step)
            if self._elapsed() - self._last >= QUIET_S:
                self._tell(step)

    def _now(self, doing: str) -> None:
        self._doing, self._since = doing, self._elapsed()

    def _tell(self, text: str) -> None:
        self._last = self._elapsed()
        print(f"{self._last:5.0f} s  {text}", file=self._out, flush=True)

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _watch(self) -> None:
        while not self._ended.wait(self._left()):
            with self._lock:
                if self._left() <= 0:
                    self._tell(f"{self._doing}: {self._elapsed() - self._since:.0f} s so far")

    def _left(self) -> float:
        return max(0.0, max(self._last, 0.0) + self._silent_s - self._elapsed())

    def __enter__(self) -> Lines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
