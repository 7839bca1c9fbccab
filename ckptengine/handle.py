"""What `async_save` returns: a view of one save as it goes from requested to committed."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

from ckptengine.errors import CheckpointError, CommitTimeoutError
from ckptengine.info import CommitInfo, SaveTimes


class SaveHandle:
    """A save under way. Its five moments are requested → staged → written → durable → committed (`times`).

    The outcome is the same on every rank. All methods may be called from any thread, and none joins a
    collective.
    """

    def __init__(self, step: int, requested: float) -> None:
        self.step = step
        self._times = SaveTimes(requested=requested)
        self._info: CommitInfo | None = None
        self._error: BaseException | None = None
        self._staged = threading.Event()
        self._ended = threading.Event()
        self._noting = threading.Lock()
        self._observed = False
        self._pid = os.getpid()

    @property
    def times(self) -> SaveTimes:
        """The moments reached so far."""
        return self._times

    def staged(self) -> bool:
        """The state is captured; changing it no longer changes the checkpoint."""
        return self._times.staged > 0

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the state is captured, `timeout` in seconds; at once unless `Config(snapshot="overlap")`
        copies it meanwhile.

        Optimizer steps wait by themselves; this is for whatever else changes tensors of the state in place.
        Raises the save's error if it failed before, and `CommitTimeoutError` when `timeout` passes first.
        """
        self._check_process()
        if not self._staged.wait(timeout):
            raise CommitTimeoutError(f"step {self.step} is not staged after {timeout:g} s; the copy goes on")
        if not self.staged() and self._error is not None:
            self._observed = True
            raise self._error

    def durable(self) -> bool:
        """This rank's shard survives a power cut. The checkpoint counts only once it is committed."""
        return self._times.durable > 0

    def committed(self) -> bool:
        """The checkpoint exists: `restore` and `ckpt list` see it."""
        return self._info is not None

    def done(self) -> bool:
        """Committed or failed."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """Why the save failed; None if it has not (yet)."""
        if self._error is not None:
            self._observed = True
        return self._error

    def result(self, timeout: float | None = None) -> CommitInfo:
        """Wait for the commit and describe it; `timeout` in seconds.

        Raises `SaveFailedError` (or a more exact `CheckpointError`) naming the rank that failed, on every
        rank, and `CommitTimeoutError` when `timeout` passes first; the save then goes on. Without `timeout`
        the wait still ends, at `Config.commit_timeout_s` from the request.
        """
        self._check_process()
        if not self._ended.wait(timeout):
            raise CommitTimeoutError(
                f"step {self.step} is not committed after {timeout:g} s; the save is still under way",
                hint="call result() again, or look at handle.times to see how far it is",
            )
        if self._error is not None:
            self._observed = True
            raise self._error
        assert self._info is not None
        return self._info

    def _check_process(self) -> None:
        if not self.done() and os.getpid() != self._pid:
            raise CheckpointError(
                f"this handle belongs to process {self._pid}, of which this one is a fork",
                hint="ask it there; nobody would tell this process how the save ends",
            )

    def _note(self, **moments: float) -> None:
        """Training thread, copying thread and monitor each know some of the times."""
        with self._noting:
            self._times = replace(self._times, **moments)
        if self._times.staged:
            self._staged.set()

    def _end(self) -> None:
        self._ended.set()
        self._staged.set()

    def __repr__(self) -> str:
        names = ("committed", "durable", "written", "staged", "requested")
        state = "failed" if self._error else next(name for name in names if getattr(self._times, name) > 0)
        age_s = time.time() - self._times.requested
        return f"<SaveHandle step={self.step} {state} {age_s:.1f} s after the request>"
