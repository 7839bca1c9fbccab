"""Which names are restored, and where from?"""

from __future__ import annotations

from typing import Any

import pytest

from ckptengine.read.partial import ALL, Partial


def test_everything_by_default_under_its_own_name() -> None:
    assert ALL.is_all
    assert ALL.selects("anything")
    assert ALL.stored_name("anything") == "anything"


def test_included_and_not_excluded() -> None:
    part = Partial.of(include=["train.model", "step"], exclude="*.bias")
    assert not part.is_all
    names = ["train.model.a.weight", "train.model.a.bias", "step", "steps", "rng"]
    assert [part.selects(name) for name in names] == [True, False, True, False, False]
    assert [Partial.of(exclude=["rng"]).selects(name) for name in ("rng.torch", "step")] == [False, True]
    assert not Partial.of(include=()).selects("a")
    assert Partial.of(include="a").selects("a.b")


@pytest.mark.parametrize(
    ("rename", "name", "stored"),
    [
        ({"model": "model.module"}, "model.w", "model.module.w"),
        ({"model": "model.module"}, "model", "model.module"),
        ({"model": "model.module"}, "models.w", "models.w"),
        ({"model.module": "model"}, "model.module.w", "model.w"),
        ({"model": "a", "model.head": "b"}, "model.head.w", "b.w"),
        ({"model": "a", "model.head": "b"}, "model.heads", "a.heads"),
        ({"": "train"}, "model.w", "train.model.w"),
        ({"train": ""}, "train.model.w", "model.w"),
        ({"a.w": "b.v"}, "a.w", "b.v"),
        (lambda name: name.replace("new", "old"), "new.w", "old.w"),
        (None, "a", "a"),
    ],
)
def test_names_are_mapped_to_those_they_were_stored_under(rename: Any, name: str, stored: str) -> None:
    assert Partial.of(rename=rename).stored_name(name) == stored


@pytest.mark.parametrize(
    "options", [{"include": 3}, {"include": [3]}, {"exclude": [None]}, {"rename": 3}, {"rename": {"a": 1}}]
)
def test_what_is_no_pattern_and_no_mapping_is_refused(options: Any) -> None:
    with pytest.raises(TypeError, match=next(iter(options))):
        Partial.of(**options)


def test_a_function_that_gives_no_name_is_refused() -> None:
    with pytest.raises(TypeError, match="rename gave None for 'a'"):
        Partial.of(rename=lambda name: None).stored_name("a")  # type: ignore[arg-type, return-value]


def test_what_was_asked_for_can_be_told() -> None:
    assert str(Partial.of(include="a", exclude=["b", "c"])) == "include=['a'], exclude=['b', 'c']"
    assert str(Partial.of(parameters_only=True)) == "parameters_only=True"
