"""Do two mappings of a ring see the same, and is a slot free only when all have released it?"""

from __future__ import annotations

import errno
import os
from itertools import pairwise

import pytest

from ckptengine.errors import StorageError
from ckptengine.staging import ring
from ckptengine.staging.ring import Ring

SLOTS, NBYTES, MEMBERS = 3, 8192, 4


@pytest.fixture
def pair() -> tuple[Ring, Ring]:
    mine = Ring.make(SLOTS, NBYTES, MEMBERS)
    return mine, Ring.join(os.getpid(), mine.fd, mine.arena_nbytes, SLOTS, NBYTES, MEMBERS)


def test_what_the_owner_publishes_is_there_for_the_others(pair: tuple[Ring, Ring]) -> None:
    mine, theirs = pair
    for number in range(1, 8):
        mine.view(number)[:] = bytes([number]) * NBYTES
        assert not theirs.is_published(number)
        mine.publish(number)
        assert theirs.is_published(number)
        assert theirs.view(number) == bytes([number]) * NBYTES
        assert theirs.address(number) % 4096 == 0


def test_slots_do_not_overlap_each_other_or_the_words(pair: tuple[Ring, Ring]) -> None:
    mine, theirs = pair
    for number in range(1, SLOTS + 1):
        mine.view(number)[:] = b"\xff" * NBYTES
    assert not theirs.given_up
    assert not any(theirs.is_published(number) for number in range(1, SLOTS + 1))
    addresses = sorted(mine.address(number) for number in range(1, SLOTS + 1))
    assert all(b - a >= NBYTES for a, b in pairwise(addresses))


def test_each_member_releases_for_itself(pair: tuple[Ring, Ring]) -> None:
    mine, theirs = pair
    theirs.release(2, 1)
    assert mine.has_released(2, 1)
    assert not mine.has_released(2, 3)
    assert not mine.has_released(2 + SLOTS, 1)


def test_an_owner_that_gives_up_says_so(pair: tuple[Ring, Ring]) -> None:
    mine, theirs = pair
    mine.give_up(5)
    assert theirs.given_up == 5


def test_a_ring_of_a_process_that_has_closed_it_cannot_be_joined() -> None:
    mine = Ring.make(SLOTS, NBYTES, MEMBERS)
    fd, capacity = mine.fd, mine.arena_nbytes
    mine.close()
    with pytest.raises(StorageError):
        Ring.join(os.getpid(), fd, capacity, SLOTS, NBYTES, MEMBERS)


@pytest.mark.parametrize("allowed", [0, 1, 99])
def test_its_slots_get_their_pages_as_long_as_they_are_wanted(
    allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "POPULATE_NBYTES", NBYTES)
    mine = Ring.make(SLOTS, NBYTES, MEMBERS)
    before = os.fstat(mine.fd).st_blocks
    mine.view(1)[:] = b"\x01" * NBYTES  # a thread that fills it comes first
    asked: list[bool] = []

    def goes_on() -> bool:
        asked.append(len(asked) < allowed)
        return asked[-1]

    mine.populate(goes_on)
    there = (os.fstat(mine.fd).st_blocks - before) * 512
    assert there == NBYTES * max(1, min(allowed, SLOTS))
    assert mine.view(1) == b"\x01" * NBYTES


def test_slots_that_cannot_get_their_pages_beforehand_keep_what_is_in_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before Linux 5.14."""

    def refuse(address: int, nbytes: int, advice: int) -> None:
        raise OSError(errno.EINVAL, "madvise")

    mine = Ring.make(SLOTS, NBYTES, MEMBERS)
    mine.view(1)[:] = b"\x01" * NBYTES
    monkeypatch.setattr(ring, "madvise", refuse)
    with pytest.raises(OSError, match="madvise"):
        mine.populate(lambda: True)
    assert mine.view(1) == b"\x01" * NBYTES
