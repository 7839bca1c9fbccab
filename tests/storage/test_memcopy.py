from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from ckptengine.storage import memcopy
from ckptengine.storage.memcopy import (
    BATCH_NBYTES,
    HELD_NBYTES,
    SHORT_NBYTES,
    WORTH_IT_NBYTES,
    Copier,
    copy_all,
    move,
)
from ckptengine.storage.streaming import Helper


@pytest.fixture(params=["with the helper", "without"])
def helper(request: pytest.FixtureRequest) -> Helper | None:
    # What streams is tested in test_streaming.py; here, it is only one way more.
    return Helper(ctypes.memmove, copy_rows) if request.param == "with the helper" else None


def copy_rows(address: int, count: int) -> None:
    """What the helper's `copy_all` does."""
    rows = np.frombuffer((ctypes.c_uint64 * (3 * count)).from_address(address), np.uint64).reshape(-1, 3)
    for to, source, nbytes in rows.tolist():
        ctypes.memmove(to, source, nbytes)


@pytest.mark.parametrize(
    "nbytes", [0, 1, SHORT_NBYTES - 1, SHORT_NBYTES + 1, WORTH_IT_NBYTES, WORTH_IT_NBYTES + SHORT_NBYTES + 5]
)
def test_every_byte_is_copied_and_none_beside_them(nbytes: int, helper: Helper | None) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 2, np.uint8)
    copier = Copier(helper)
    for _ in range(15):  # tried in all ways, then settled
        target = np.full(nbytes + 2, 7, np.uint8)
        copier.copy(target.ctypes.data + 1, source.ctypes.data + 1, nbytes)
        np.testing.assert_array_equal(target[1:-1], source[1:-1])
        assert target[0] == target[-1] == 7


@pytest.mark.parametrize("nbytes", [0, 1, HELD_NBYTES, HELD_NBYTES + 1])
def test_move_copies_every_byte_and_none_beside_them(nbytes: int) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 2, np.uint8)
    target = np.full(nbytes + 2, 7, np.uint8)
    move(target.ctypes.data + 1, source.ctypes.data + 1, nbytes)
    np.testing.assert_array_equal(target[1:-1], source[1:-1])
    assert target[0] == target[-1] == 7


class Clocked:
    """Copies that take the time they are given, and nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds_per_byte: float) -> None:
        self.seconds_per_byte = seconds_per_byte
        self.now = 0.0
        self.used: list[str] = []
        self.factors = itertools.repeat(1.0)
        monkeypatch.setattr(ctypes, "memmove", self.memmove)
        monkeypatch.setattr(memcopy.time, "perf_counter", lambda: self.now)

    def memmove(self, to: int, source: int, nbytes: int) -> None:
        self._take("short" if nbytes <= SHORT_NBYTES else "long", nbytes)

    def stream(self, to: int, source: int, nbytes: int) -> None:
        self._take("stream", nbytes)

    def _take(self, way: str, nbytes: int) -> None:
        self.used.append(way)
        self.now += nbytes * self.seconds_per_byte[way] * next(self.factors)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("fast", ["short", "long", "stream"])
def test_it_settles_on_the_way_that_was_the_fastest(
    fast: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clocked(monkeypatch, **{"short": 3.0, "long": 2.0, "stream": 4.0, fast: 1.0})
    copier = Copier(Helper(clock.stream, copy_rows) if streams else None)
    for _ in range(12):
        copier.copy(0, 0, WORTH_IT_NBYTES)
    assert set(clock.used) == ({"short", "long", "stream"} if streams else {"short", "long"})
    clock.used.clear()
    for _ in range(8):
        copier.copy(0, 0, WORTH_IT_NBYTES)
    assert set(clock.used) == {fast if streams or fast != "stream" else "long"}


@pytest.mark.parametrize(
    "factors",
    [[0.01, 1, 1, 1], [9, 9, 1, 1], [1, 9, 9, 0.5]],
    ids=["one source in a cache", "two beside other work", "one of each, and more"],
)
@pytest.mark.parametrize("fast", ["short", "long", "stream"])
def test_a_few_odd_copies_do_not_decide(
    fast: str, factors: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clocked(monkeypatch, **{"short": 1.0, "long": 1.0, "stream": 1.0, fast: 0.8})
    copier = Copier(Helper(clock.stream, copy_rows))
    disturbed = {"short": iter(factors), "long": iter(factors), "stream": iter(factors)}
    if factors[0] < 1:  # the lucky ones are those of the slower ways
        disturbed[fast] = iter([1.0] * 4)
    elif factors[0] > 1:  # the unlucky ones are those of the fastest
        disturbed = {way: iter(factors if way == fast else [1.0] * 4) for way in disturbed}
    for number in range(12):
        way = ("stream", "short", "long")[number % 3]
        clock.factors = itertools.repeat(next(disturbed[way]))
        copier.copy(0, 0, WORTH_IT_NBYTES)
    clock.used.clear()
    clock.factors = itertools.repeat(1.0)
    copier.copy(0, 0, WORTH_IT_NBYTES)
    assert set(clock.used) == {fast}


def test_short_ones_and_those_before_it_is_settled_go_the_likeliest_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clocked(monkeypatch, short=1.0, long=1.0, stream=1.0)
    Copier(Helper(clock.stream, copy_rows)).copy(0, 0, WORTH_IT_NBYTES - 1)
    Copier(None).copy(0, 0, SHORT_NBYTES + 1)
    assert clock.used == ["stream", "short", "short"]


SIZES = {
    "none": [],
    "one": [17],
    "empty ones": [0, 0, 5, 0],
    "many": [1 + 37 * i % 9000 for i in range(3000)],
    "longer than a batch": [5, BATCH_NBYTES + 3, 5, 2 * BATCH_NBYTES, 1],
    "exactly batches": [BATCH_NBYTES // 4] * 12,
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_each_of_many_copies_is_made_once_and_nothing_beside_them(
    sizes: list[int], threads: int, helper: Helper | None
) -> None:
    source = np.random.default_rng(1).integers(0, 256, sum(sizes), np.uint8)
    # Each to a place of its own, with a byte beside it that nobody may write to, and the last one first.
    ends = np.cumsum(sizes, dtype=int).tolist()
    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    target = np.full(sum(sizes) + len(sizes), 7, np.uint8)
    moves: list[int] = []
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        moves = [target.ctypes.data + start + number, source.ctypes.data + start, size, *moves]
    copy_all(moves, threads, helper=helper)
    beside = [end + number for number, end in enumerate(ends)]
    assert set(target[beside].tolist()) <= {7}
    np.testing.assert_array_equal(np.delete(target, beside), source)


def test_many_copies_are_shared_out_in_batches_that_end_when_they_are_told_to(helper: Helper | None) -> None:
    sizes = [BATCH_NBYTES // 2] * 8
    source = np.ones(sum(sizes), np.uint8)
    target = np.zeros(sum(sizes), np.uint8)
    moves = [
        value
        for i, size in enumerate(sizes)
        for value in (target.ctypes.data + i * size, source.ctypes.data + i * size, size)
    ]
    asked = itertools.count(1)

    def go_on() -> None:
        if next(asked) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_all(moves, 1, go_on, helper)
    assert target.tolist() == [1] * (2 * BATCH_NBYTES) + [0] * (2 * BATCH_NBYTES)
