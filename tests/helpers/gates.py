"""Copies behind the training that stop half way until they are let go on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ckptengine.adapters import guard
from ckptengine.adapters.stage import copy_items

IN_TIME_S = 30.0


class Gate:
    """Closed from the start: a copy does the first half of its items, says so, and waits."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._open = threading.Event()

    def wait_reached(self) -> None:
        assert self._reached.wait(IN_TIME_S)

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def open(self) -> None:
        self._open.set()

    def copy(self, items: Any, offsets: Any, payload: memoryview, **options: Any) -> None:
        half = len(items) // 2
        copy_items(items[:half], offsets[:half], payload, after=options.get("after"))
        options["on_staged"](min(offsets[half:], default=0))
        self._reached.set()
        while not self._open.wait(0.005):
            if "go_on" in options:
                options["go_on"]()
        copy_items(items[half:], offsets[half:], payload, **options)


@contextlib.contextmanager
def held_copies(*, until_a_step_waits: bool = False) -> Iterator[Gate]:
    """Small tensors are copied behind the training, too. With `until_a_step_waits`, the first optimizer step
    that would wait opens the gate."""
    gate = Gate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "LATE_NBYTES", 1)
        patch.setattr(guard, "copy_items", gate.copy)
        if until_a_step_waits:
            before_step = guard.Guard.before_step

            def opening(self: guard.Guard) -> None:
                gate.open()
                before_step(self)

            patch.setattr(guard.Guard, "before_step", opening)
        try:
            yield gate
        finally:
            gate.open()
