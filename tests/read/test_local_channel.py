"""Does a channel in shared memory end when it is closed, whatever its threads are at?"""

from __future__ import annotations

import threading

import pytest

from ckptengine.read.local_channel import LocalChannel
from ckptengine.read.sharing import Turn
from ckptengine.staging.ring import Ring

NBYTES = 1 << 20


def channel() -> LocalChannel:
    turns = [Turn((0, number), (0, 1), 0, number, number) for number in range(4)]
    return LocalChannel((0, 1), 0, turns, NBYTES, 10.0)


def populating() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ckptengine-ring"]


def test_its_pages_are_still_being_made_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread must have ended before the memory is unmapped."""
    begun, closed = threading.Event(), threading.Event()
    saw_end: list[bool] = []
    populate, close = Ring.populate, Ring.close

    def slow(self: Ring, goes_on: object) -> None:
        begun.set()
        while goes_on():  # type: ignore[operator]
            closed.wait(0.01)
        saw_end.append(closed.is_set())
        populate(self, lambda: True)

    def noted(self: Ring) -> None:
        assert not populating()
        closed.set()
        close(self)

    monkeypatch.setattr(Ring, "populate", slow)
    monkeypatch.setattr(Ring, "close", noted)
    one = channel()
    assert begun.wait(10)
    one.close()
    assert saw_end == [False]


def test_a_slot_can_be_filled_before_it_has_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Ring, goes_on: object) -> None:
        raise OSError

    monkeypatch.setattr(Ring, "populate", refuse)
    one = channel()
    try:
        slot = one.slot(Turn((0, 0), (0, 1), 0, 0, 0))
        slot.view[:] = b"\x07" * NBYTES
        assert bytes(slot.view[-3:]) == b"\x07" * 3
    finally:
        one.close()
    assert not populating()
