from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from ckptengine.storage import memcopy
from ckptengine.storage.memcopy import (
    HELD_NBYTES,
    SHORT_NBYTES,
    STREAM_NBYTES,
    WORTH_IT_NBYTES,
    Copier,
    mover_past,
)
from ckptengine.storage.streaming import Helper


@pytest.fixture(params=["with the helper", "without"])
def helper(request: pytest.FixtureRequest) -> Helper | None:
    # What streams is tested in test_streaming.py; here, it is only one way more.
    return Helper(ctypes.memmove, ctypes.memmove) if request.param == "with the helper" else None


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
def test_move_copies_every_byte_and_none_beside_them(nbytes: int, helper: Helper | None) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 2, np.uint8)
    target = np.full(nbytes + 2, 7, np.uint8)
    move = mover_past(helper)
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
    copier = Copier(Helper(clock.stream, clock.stream) if streams else None)
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
    copier = Copier(Helper(clock.stream, clock.stream))
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
    Copier(Helper(clock.stream, clock.stream)).copy(0, 0, WORTH_IT_NBYTES - 1)
    Copier(None).copy(0, 0, SHORT_NBYTES + 1)
    assert clock.used == ["stream", "short", "short"]


def test_what_is_short_is_moved_by_libc_and_what_is_long_gives_the_lock_away() -> None:
    used: list[tuple[str, int]] = []
    helper = Helper(
        lambda to, source, nbytes: used.append(("given", nbytes)),
        lambda to, source, nbytes: used.append(("held", nbytes)),
    )
    source, target = np.ones(HELD_NBYTES + 1, np.uint8), np.zeros(HELD_NBYTES + 1, np.uint8)
    for nbytes in (STREAM_NBYTES - 1, STREAM_NBYTES, HELD_NBYTES, HELD_NBYTES + 1):
        mover_past(helper)(target.ctypes.data, source.ctypes.data, nbytes)
    assert used == [("held", STREAM_NBYTES), ("held", HELD_NBYTES), ("given", HELD_NBYTES + 1)]
    assert target.sum() == STREAM_NBYTES - 1
