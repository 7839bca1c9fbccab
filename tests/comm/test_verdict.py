"""Is the rank found that holds all others up, and does the first word on it stand?"""

from __future__ import annotations

import pytest

from ckptengine.comm.transport import MemoryTransport
from ckptengine.comm.verdict import Board, Verdict, at_fault

LOST = Verdict(12, "rank 12 is silent", lost=True)


@pytest.mark.parametrize(
    ("waits", "found"),
    [
        ({0: [1], 1: [2], 2: [3]}, 3),
        ({0: [1], 1: [2], 2: None, 3: []}, 2),
        ({0: [1, 3], 1: [0, 2], 2: [0], 3: [0, 1]}, 1),
        ({0: [1], 1: [3, 2], 2: None, 3: []}, 2),
        ({0: [1], 1: []}, 1),
        ({0: [1], 1: None, 2: None}, 1),
    ],
    ids=["chain", "mute", "all wait", "mute rather than busy", "busy", "nearest"],
)
def test_who_is_waited_for_in_the_end(waits: dict[int, list[int] | None], found: int) -> None:
    assert at_fault(1, waits) == found


def boards() -> tuple[Board, Board]:
    transport = MemoryTransport()
    return Board(transport, "x", (10, 11, 12), 0), Board(transport, "x", (10, 11, 12), 1)


def test_nobody_asks_and_nothing_is_wrong() -> None:
    mine, theirs = boards()
    assert mine.look() is theirs.look() is False


def test_the_first_verdict_stands() -> None:
    mine, theirs = boards()
    assert mine.decide(LOST) == LOST
    assert theirs.decide(Verdict(11, "I have failed")) == LOST
    assert mine.look() == theirs.look() == LOST


def test_who_is_asked_answers_as_often_as_it_likes() -> None:
    mine, theirs = boards()
    mine.ask()
    assert theirs.look() is True
    assert mine.answers() == {0: None, 1: None, 2: None}
    theirs.answer({0, 2})
    theirs.answer({2})
    mine.answer(())
    assert mine.answers() == {0: [], 1: [2], 2: None}
