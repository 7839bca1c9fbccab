from __future__ import annotations

import ctypes

import numpy as np
import pytest

from ckptengine.storage import memcopy
from ckptengine.storage.memcopy import HELD_NBYTES, SHORT_NBYTES, WORTH_IT_NBYTES, Copier, move


@pytest.mark.parametrize(
    "nbytes", [0, 1, SHORT_NBYTES - 1, SHORT_NBYTES + 1, WORTH_IT_NBYTES, WORTH_IT_NBYTES + SHORT_NBYTES + 5]
)
def test_every_byte_is_copied_and_none_beside_them(nbytes: int) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 2, np.uint8)
    copier = Copier()
    for _ in range(10):  # tried in both ways, then settled
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


@pytest.mark.parametrize("slow", ["short", "long"])
def test_it_settles_on_the_way_that_was_faster(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    calls: list[int] = []

    def memmove(to: int, source: int, nbytes: int) -> None:
        nonlocal now
        calls.append(nbytes)
        now += nbytes * (2 if (nbytes <= SHORT_NBYTES) == (slow == "short") else 1)

    monkeypatch.setattr(ctypes, "memmove", memmove)
    monkeypatch.setattr(memcopy.time, "perf_counter", lambda: now)
    copier = Copier()
    for _ in range(8):
        copier.copy(0, 0, WORTH_IT_NBYTES)
    assert {SHORT_NBYTES, WORTH_IT_NBYTES} == set(calls)
    calls.clear()
    for _ in range(8):
        copier.copy(0, 0, WORTH_IT_NBYTES)
    assert set(calls) == {WORTH_IT_NBYTES if slow == "short" else SHORT_NBYTES}
