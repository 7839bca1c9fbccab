"""Is a value replaced, or changed in place, by exactly what was stored?"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest

from ckptengine.errors import UnsupportedStateError
from tests.adapters.fake import Saved, same


def test_values_come_back_in_the_dicts_and_lists_that_hold_them() -> None:
    state = {"a": 1, "b": [1.5, {"c": "x"}], "t": (1, [2]), "n": None, "s": {1, 2}}
    inner: dict[str, Any] = {"c": ""}
    middle = [0.0, inner]
    nested = [0]
    target = {"a": 0, "b": middle, "t": (0, nested), "n": 5, "s": set()}
    Saved(state).restore(target)
    assert same(target, state)
    assert target["b"] is middle
    assert middle[1] is inner
    assert target["t"][1] is nested  # type: ignore[index]


def test_mutable_values_are_changed_in_place() -> None:
    state = {"l": [1, 2, 3], "s": {1}, "b": bytearray(b"xyz"), "a": np.arange(3), "big": np.arange(1000)}
    target = {"l": [], "s": set(), "b": bytearray(), "a": np.zeros(3, int), "big": np.zeros(1000, int)}
    held = dict(target)
    Saved(state).restore(target)
    assert same(target, state)
    assert all(target[key] is held[key] for key in held)


def test_an_array_of_another_shape_is_replaced() -> None:
    target = {"a": np.zeros(2), "r": np.zeros(3)}
    target["r"].flags.writeable = False
    Saved({"a": np.arange(3), "r": np.ones(3)}).restore(target)
    assert same(target, {"a": np.arange(3), "r": np.ones(3)})


def test_a_value_may_change_its_type() -> None:
    state = {"x": 1.5, "y": "text", "z": [1, (2,)], "w": None, "v": b"x" * 5000}
    target = {"x": 1, "y": 5, "z": None, "w": [1], "v": 0}
    Saved(state).restore(target)
    assert same(target, state)


def test_equal_values_of_other_types_are_told_apart() -> None:
    state = [1.0, True, -0.0, 0, 1]
    target = [1, 1, 0.0, False, True]
    Saved(state).restore(target)
    assert same(target, state)


def test_pickled_values_are_restored_on_request_only() -> None:
    Point = collections.namedtuple("Point", "x y")
    globals()["Point"] = Point
    Point.__module__, Point.__qualname__ = __name__, "Point"
    state = {"p": Point(1, 2), "d": collections.defaultdict(list, a=[1]), "c": collections.Counter("ab")}
    saved = Saved(state, allow_pickle=True)
    target: dict[str, Any] = {"p": None, "d": collections.defaultdict(list), "c": collections.Counter()}
    with pytest.raises(UnsupportedStateError, match="allow_pickle"):
        saved.match(target)
    saved.restore(target, allow_pickle=True)
    assert target == state
    assert type(target["d"]) is collections.defaultdict
