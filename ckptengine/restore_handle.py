"""What a streaming restore returns: what of it is there, and how did it end?"""

from __future__ import annotations

from typing import Any

from ckptengine.errors import CommitTimeoutError
from ckptengine.info import RestoreInfo
from ckptengine.streaming import Stream


class RestoreHandle:
    """A restore that goes on while training begins. `step`: the step that is being restored; `world_size`:
    how many ranks saved it.

    Modules and optimizers wait by themselves. For the training thread, as `result` may have objects load
    their state; `done` and `exception` may be called from any thread.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.step = stream.step
        self.world_size = stream.world_size

    def wait(self, what: Any = None, timeout: float | None = None) -> None:
        """Wait until tensors of this rank are there, `timeout` in seconds.

        what: a module, whose parameters and buffers (and those of modules in it) are meant; one or several
        patterns of FQNs, as `"model.embed"` or `["*.bias"]`; None: all. Only `result` loads an optimizer.

        Raises the error that ended the reading, `CommitTimeoutError` when `timeout` passes first, and
        `ValueError` for a pattern that nothing has, and for a module that is not of the state.
        """
        if not self._stream.wait_for(what, timeout):
            raise CommitTimeoutError(
                f"step {self.step} is not there after {timeout:g} s; the reading goes on"
            )

    def done(self) -> bool:
        """All is restored, optimizers too, or it has failed."""
        return self._stream.info is not None or self._stream.error is not None

    def exception(self) -> BaseException | None:
        """Why the restore failed; None if it has not (yet)."""
        return self._stream.error

    def result(self, timeout: float | None = None) -> RestoreInfo:
        """Wait until all ranks have read all, load what is loaded at the end, and describe it; `timeout` in
        seconds. All ranks call it, or make a step of an optimizer.

        Raises what a restore raises, on all ranks, and `CommitTimeoutError` when `timeout` passes first; the
        restore then goes on.
        """
        info = self._stream.finish(timeout)
        self._stream.leave_steps()
        return info

    def _abandon(self) -> None:
        self._stream.abandon()

    def __repr__(self) -> str:
        if self._stream.error is not None:
            state = "failed"
        else:
            state = "done" if self.done() else "under way"
        return f"<RestoreHandle step={self.step} {state}>"
