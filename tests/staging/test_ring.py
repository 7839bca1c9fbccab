"""Do two mappings of a ring see the same, and is a slot free only when all have released it?"""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from ckptengine.errors import StorageError
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
    assert not theirs.is_given_up
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
    mine.give_up()
    assert theirs.is_given_up


def test_a_ring_of_a_process_that_has_closed_it_cannot_be_joined() -> None:
    mine = Ring.make(SLOTS, NBYTES, MEMBERS)
    fd, capacity = mine.fd, mine.arena_nbytes
    mine.close()
    with pytest.raises(StorageError):
        Ring.join(os.getpid(), fd, capacity, SLOTS, NBYTES, MEMBERS)
