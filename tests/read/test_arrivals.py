"""Does a wait end when, and only when, what it waits for is there?"""

from __future__ import annotations

import threading
import time

import pytest

from ckptengine.errors import CommitTimeoutError, CorruptCheckpointError
from ckptengine.read.arrivals import Arrivals

LONG_S = 30.0


def test_a_parcel_is_there_when_its_last_piece_is() -> None:
    arrivals = Arrivals([2, 1])
    arrivals.arrive([0])
    assert not arrivals.are_there([0])
    assert not arrivals.wait([0], LONG_S, timeout_s=0.0)
    arrivals.arrive([0, 1])
    assert arrivals.wait([0, 1], LONG_S, timeout_s=0.0)
    assert arrivals.all_there()


def test_a_parcel_of_nothing_is_there_from_the_start() -> None:
    arrivals = Arrivals([0, 1])
    assert arrivals.are_there([0])
    assert not arrivals.all_there()
    assert Arrivals([]).all_there()


def test_a_wait_is_for_its_own_parcels_only() -> None:
    arrivals = Arrivals([1, 1])
    ended = threading.Event()

    def wait() -> None:
        arrivals.wait([1], LONG_S)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    arrivals.arrive([0])
    assert not ended.wait(0.05)
    arrivals.arrive([1])
    assert ended.wait(LONG_S)
    thread.join()


def test_nobody_hears_of_a_parcel_before_it_is_whole() -> None:
    seen: list[bool] = []

    def look(parcel: int) -> None:
        seen.append(arrivals.are_there([parcel]))

    arrivals = Arrivals([1], look)
    arrivals.arrive([0])
    assert seen == [False]
    assert arrivals.are_there([0])


def test_a_failure_is_raised_by_who_waits_and_by_who_comes_later() -> None:
    arrivals = Arrivals([1, 1])
    arrivals.arrive([0])
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            arrivals.wait([1], LONG_S)
        except CorruptCheckpointError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    first = CorruptCheckpointError("first")
    arrivals.fail(first)
    arrivals.fail(CorruptCheckpointError("second"))
    thread.join(LONG_S)
    assert raised == [first]
    with pytest.raises(CorruptCheckpointError, match="first"):
        arrivals.wait([0], LONG_S)


def test_a_wait_ends_where_nothing_moves() -> None:
    arrivals = Arrivals([1])
    began = time.monotonic()
    with pytest.raises(CommitTimeoutError, match=r"no block was read for 0\.01 s"):
        arrivals.wait([0], stalled_s=0.01)
    assert time.monotonic() - began < LONG_S
