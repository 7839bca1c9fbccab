"""Is a value that ranks did not hold alike never restored without a word about it?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.format.per_rank import PerRank
from ckptengine.read.per_rank import CHOICES, PerRankChoices, PerRankPolicy

KNOWN = PerRank(frozenset({"rng.torch", "rng.python", "loader.position"}), frozenset({"extra"}))


def choices(spec: Any, known: PerRank = KNOWN) -> PerRankChoices:
    return PerRankChoices(PerRankPolicy.of(spec), known)


def test_by_default_all_are_refused_and_the_rest_is_taken() -> None:
    asked = PerRankChoices(PerRankPolicy(), KNOWN)
    assert [asked.drop(name) for name in ("rng.torch", "step", "extra")] == [True, False, True]
    assert asked.refused == ["rng.torch", "extra"]
    assert not asked.dropped
    assert not asked.from_rank0
    assert asked.reason("rng.torch") == "rng.torch: each rank that saved it had its own"
    assert asked.reason("extra") == "extra: only some of the ranks that saved it have it"


def test_one_choice_is_for_all() -> None:
    taken = choices("rank0")
    assert not taken.drop("rng.torch")
    assert not taken.drop("step")
    assert taken.from_rank0 == ["rng.torch"]
    kept = choices("drop")
    assert kept.drop("rng.torch")
    assert not kept.drop("step")
    assert kept.dropped == ["rng.torch"]


def test_the_first_pattern_that_matches_counts_and_none_is_an_error() -> None:
    policy = PerRankPolicy.of({"rng.torch": "rank0", "rng": "drop"})
    assert [policy.choice(name) for name in ("rng.torch", "rng.python", "rngs")] == ["rank0", "drop", "error"]
    assert PerRankPolicy.of({"*": "drop", "rng": "error"}).choice("rng") == "drop"


def test_what_a_pattern_means_is_dropped_also_if_it_is_alike() -> None:
    asked = choices({"rng": "drop", "*": "drop"}, PerRank())
    assert asked.drop("rng.torch")
    assert not asked.drop("step")
    assert asked.dropped == ["rng.torch"]
    assert not choices({"rng": "error"}, PerRank()).drop("rng.torch")
    assert not choices({"rng": "rank0"}, PerRank()).drop("rng.torch")


def test_values_that_belong_together_are_taken_all_or_none() -> None:
    names = ["rng.numpy", "rng.python", "rng.torch"]
    refused = choices({"rng.python": "drop"})
    assert refused.drop_together("rng", names)
    assert refused.refused == ["rng.torch"]
    assert not refused.dropped
    dropped = choices({"rng.python": "drop", "*": "rank0"})
    assert dropped.drop_together("rng", names)
    assert dropped.dropped == ["rng"]
    taken = choices("rank0")
    assert not taken.drop_together("rng", names)
    assert taken.from_rank0 == ["rng.python", "rng.torch"]
    alike = choices("error")
    assert not alike.drop_together("scheduler", ["scheduler.last_epoch"])
    by_name = choices({"scheduler": "drop"}, PerRank())
    assert by_name.drop_together("scheduler", ["scheduler.last_epoch"])
    assert by_name.dropped == ["scheduler"]


@pytest.mark.parametrize("spec", ["rank1", {"rng": "keep"}, {"rng": None}, ""])
def test_what_is_no_choice_is_refused(spec: Any) -> None:
    with pytest.raises(ValueError, match="'error', 'rank0', 'drop'"):
        PerRankPolicy.of(spec)


@pytest.mark.parametrize("spec", [None, 3, {3: "drop"}, ["drop"]])
def test_what_is_neither_a_choice_nor_a_mapping_is_refused(spec: Any) -> None:
    with pytest.raises(TypeError, match="per_rank is one of"):
        PerRankPolicy.of(spec)


names = st.sampled_from(["a", "a.b", "a.b.c", "ab", "b", "b.a"])
patterns = st.sampled_from(["a", "a.b", "a*", "*", "b", "*.c", "?b"])


@given(
    st.dictionaries(patterns, st.sampled_from(CHOICES)), st.frozensets(names), st.frozensets(names), st.data()
)
def test_every_value_that_differs_is_accounted_for(
    spec: Any, differing: frozenset[str], some: frozenset[str], data: st.DataObject
) -> None:
    asked = choices(spec, PerRank(differing, some))
    for name in data.draw(st.lists(names, unique=True)):
        before = len(asked.refused), len(asked.from_rank0), len(asked.dropped)
        drop = asked.drop(name)
        after = len(asked.refused), len(asked.from_rank0), len(asked.dropped)
        said = tuple(b - a for a, b in zip(before, after, strict=True))
        assert said in ([(1, 0, 0), (0, 0, 1)] if drop else [(0, 1, 0), (0, 0, 0)])
        if name in differing | some:
            assert sum(said) == 1
