"""One writer process for many Checkpointers.

A writer takes seconds to start, as it imports torch, and a task tells it all it has to know about the run.
Tests that are not about its life pass one on from Checkpointer to Checkpointer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptengine.adapters.nvrx import WriterProcess

_idle: list[WriterProcess] = []


class LentWriter:
    """Stands in for `ckptengine.monitor.WriterProcess`: when it is closed in good order, its process is kept
    for the next."""

    def __init__(self, rank: int, async_fn: Callable[[bytes], None], warm_up: Callable[[], None]) -> None:
        while _idle and _idle[-1].exitcode is not None:
            _idle.pop().close()
        self._writer = _idle.pop() if _idle else WriterProcess(rank, async_fn, warm_up)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def close(self, abort: bool = False, **options: Any) -> None:
        if abort or self.exitcode is not None:
            self._writer.close(abort, **options)
        else:
            _idle.append(self._writer)

    def kill(self) -> None:
        self.close(abort=True)


def end_all() -> None:
    """End the processes nobody has borrowed."""
    while _idle:
        _idle.pop().close()
