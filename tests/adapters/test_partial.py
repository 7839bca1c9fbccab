"""Is only that part of a target filled that was asked for, from where it was asked to be?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ckptengine as ck
from ckptengine.adapters.restore import Match, RestoreTarget
from ckptengine.adapters.world import World
from ckptengine.format.index import index_from_headers
from ckptengine.read.held import HeldTensors
from ckptengine.read.partial import Partial
from ckptengine.read.patterns import matches_any
from ckptengine.read.per_rank import PerRankPolicy
from tests.adapters.fake import Saved, read_all, same

Restore = Callable[..., Match]


def as_own(saved: Saved, target: Any, *, strict: bool = True, **options: Any) -> Match:
    """As a rank restores that has saved it."""
    return saved.restore(target, strict=strict, partial=Partial.of(**options))


def as_world(saved: Saved, target: Any, *, strict: bool = True, **options: Any) -> Match:
    """As one of another number of ranks restores it."""
    headers = [saved.header]
    world = World(headers[0], HeldTensors(index_from_headers(headers), lambda: headers), headers.__getitem__,
                  reader=0, own=False)  # fmt: skip
    into = RestoreTarget(target, partial=Partial.of(**options))
    match = into.match_world(world, PerRankPolicy(), strict=strict)
    read_all(match, lambda rank: saved)
    match.apply()
    return match


@pytest.fixture(params=[as_own, as_world])
def restore(request: pytest.FixtureRequest) -> Restore:
    return request.param  # type: ignore[no-any-return]


def state(seed: int) -> dict[str, Any]:
    value = float(seed)
    return {
        "model": {
            "a": {"weight": torch.full((3,), value), "bias": torch.full((1,), value)},
            "b": [seed, [seed]],
        },
        "list": [torch.full((2,), value), seed],
        "step": seed,
        "rng": (seed, [seed]),
    }


def mismatch(restore: Restore, saved: Saved, target: Any, **options: Any) -> ck.StateMismatchError:
    before = copy.deepcopy(target)
    with pytest.raises(ck.StateMismatchError) as caught:
        restore(saved, target, **options)
    assert same(target, before)
    return caught.value


def test_only_what_is_included_is_filled(restore: Restore) -> None:
    target = state(0)
    match = restore(Saved(state(1)), target, include=["model.a", "list.1"], exclude="*.bias")
    expected = state(0)
    expected["model"]["a"]["weight"] = torch.ones(3)
    expected["list"][1] = 1
    assert same(target, expected)
    assert (match.missing, match.unexpected) == ((), ())


def test_what_is_not_included_is_not_compared_either(restore: Restore) -> None:
    target = {"model": {"a": {"weight": torch.zeros(3), "bias": torch.zeros(9)}}, "step": 0, "new": {"x": 1}}
    restore(Saved(state(1)), target, include=["step", "model.a.weight"])
    assert target["step"] == 1
    assert same(target["model"]["a"], {"weight": torch.ones(3), "bias": torch.zeros(9)})
    assert target["new"] == {"x": 1}


def test_keys_of_one_side_are_told_as_far_as_they_are_included(restore: Restore) -> None:
    target = {"model": {"a": {"weight": torch.zeros(3), "scale": torch.zeros(1)}}, "more": 1}
    error = mismatch(restore, Saved(state(1)), target, include="model")
    assert error.missing == ("model.a.scale",)
    assert set(error.unexpected) <= {"model.a.bias", "model.b"}
    match = restore(Saved(state(1)), target, include="model", strict=False)
    assert match.missing == ("model.a.scale",)
    assert set(match.unexpected) == {"model.a.bias", "model.b"}
    assert same(target["model"], {"a": {"weight": torch.ones(3), "scale": torch.zeros(1)}})
    error = mismatch(restore, Saved(state(1)), {"step": 0, "absent": {"x": torch.zeros(1)}}, include="absent")
    assert error.missing == ("absent.x",)


def test_patterns_that_mean_nothing_are_an_error(restore: Restore) -> None:
    error = mismatch(restore, Saved(state(1)), state(0), include="modle")
    assert "nothing of the target is selected by include=['modle']" in str(error)


class Loader:
    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def test_an_object_is_restored_as_a_whole_or_not_at_all(restore: Restore) -> None:
    saved = Saved({"loader": Loader(position=1, seed=2), "step": 1})
    target = {"loader": Loader(position=0, seed=0), "step": 0}
    restore(saved, target, exclude="loader")
    assert (target["loader"].state, target["step"]) == ({"position": 0, "seed": 0}, 1)  # type: ignore[attr-defined]
    restore(saved, target, include="loader")
    assert target["loader"].state == {"position": 1, "seed": 2}  # type: ignore[attr-defined]
    for options in ({"exclude": "loader.seed"}, {"include": ["step", "loader.seed"]}):
        with pytest.raises(ck.StateMismatchError, match=r"loader: is restored as a whole.*loader\.\w+"):
            restore(saved, target, **options)


def model(value: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(dtype)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.fill_(value)
    return made


def adam(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.5)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_parameters_only(restore: Restore) -> None:
    source = model(1)
    saved = Saved({"train": ck.training_state(source, adam(source)), "loose": torch.ones(2), "step": 1})
    into = model(7)
    optimizer = torch.optim.Adam(into.parameters(), lr=0.25)
    loose, parameter = torch.zeros(2), nn.Parameter(torch.zeros(2))
    restore(
        saved, {"train": ck.training_state(into, optimizer), "loose": loose, "step": 0}, parameters_only=True
    )
    stored = source.state_dict()
    for name, tensor in into.state_dict().items():
        buffer = name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
        assert torch.equal(tensor, torch.full_like(tensor, 7) if buffer else stored[name])
    assert (optimizer.state, optimizer.param_groups[0]["lr"]) == ({}, 0.25)
    assert loose.tolist() == [0, 0]
    restore(saved, {"loose": parameter}, parameters_only=True)
    assert parameter.tolist() == [1, 1]
    error = mismatch(restore, saved, {"train": {"model": {"9.weight": nn.Parameter(torch.ones(1))}}},
                     parameters_only=True)  # fmt: skip
    assert error.missing == ("train.model.9.weight",)


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("into_wrapped", [False, True])
def test_a_wrapped_model_and_its_optimizer_go_into_a_bare_one_and_back(
    restore: Restore, into_wrapped: bool
) -> None:
    source = model(1) if into_wrapped else Wrapped(model(1))
    trained = adam(source)
    saved = Saved({"train": ck.training_state(source, trained)})
    into = Wrapped(model(0)) if into_wrapped else model(0)
    optimizer = torch.optim.Adam(into.parameters())
    target = {"train": ck.training_state(into, optimizer)}
    rename = {"train.model.module": "train.model"} if into_wrapped else {"train.model": "train.model.module"}
    match = restore(saved, target, rename=rename)
    assert (match.missing, match.unexpected) == ((), ())
    for one, other in zip(source.state_dict().values(), into.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for here, there in zip(into.parameters(), source.parameters(), strict=True):
        assert same(dict(optimizer.state[here]), dict(trained.state[there]))
    assert optimizer.param_groups[0]["lr"] == 0.5


class Noted(nn.Linear):
    """Has a dict beside its tensors."""

    note = "none"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def test_an_extra_state_that_is_a_dict_goes_with_its_module(restore: Restore) -> None:
    source, into = Noted(2, 2), Noted(2, 2)
    source.note = "stored"
    match = restore(Saved({"old": Wrapped(source)}), {"new": into}, rename={"new": "old.module"})
    assert into.note == "stored"
    assert (match.missing, match.unexpected) == ((), ())
    bare = Saved({"m": nn.Linear(2, 2)})
    with pytest.raises(ck.StateMismatchError, match=r"m\._extra_state: not in the checkpoint"):
        restore(bare, {"m": into}, include="m")
    restore(bare, {"m": into}, include="m", strict=False)
    assert into.note == "stored"


def test_names_may_be_mapped_by_a_function_and_in_dicts(restore: Restore) -> None:
    saved = Saved({"old": {"w": torch.ones(2), "n": {"v": 3}}, "step": 1, "unused": {"x": 5}})
    target: dict[str, Any] = {"new": {"w": torch.zeros(2), "n": {"v": 0}}, "step": 0}

    def old(name: str) -> str:
        return name.replace("new", "old")

    if restore is as_own:  # elsewhere another rank's target may have it
        assert mismatch(restore, saved, target, rename=old).unexpected == ("unused.x",)
    match = restore(saved, target, rename=old, strict=False)
    assert match.unexpected == ("unused.x",)
    assert same(target, {"new": {"w": torch.ones(2), "n": {"v": 3}}, "step": 1})
    match = restore(saved, target, rename={"new.w": "old.q"}, strict=False)
    assert set(match.missing) == {"new.w", "new.n.v"}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_floats_are_cast_where_that_is_asked_for(
    restore: Restore, stored: torch.dtype, wanted: torch.dtype
) -> None:
    values = torch.randn(4, 5, dtype=torch.float64)
    saved = Saved({"w": values.to(stored), "t": values.to(stored).t()})
    target = {"w": torch.zeros(4, 5, dtype=wanted), "t": torch.zeros(5, 4, dtype=wanted)}
    if stored != wanted:
        name = str(wanted).removeprefix("torch.")
        assert f"w: dtype {name}, in the checkpoint" in str(mismatch(restore, saved, target))
    restore(saved, target, cast=True)
    assert same(target, {"w": values.to(stored).to(wanted), "t": values.to(stored).to(wanted).t()})


def test_a_tied_weight_is_cast_once_for_both_names(restore: Restore) -> None:
    weight = torch.randn(3)
    into = torch.zeros(3, dtype=torch.bfloat16)
    target = {"a": into, "b": into}
    restore(Saved({"a": weight, "b": weight}), target, cast=True)
    assert torch.equal(into, weight.to(torch.bfloat16))


def test_integers_and_floats_are_not_cast_into_one_another(restore: Restore) -> None:
    saved = Saved(
        {"f": torch.ones(2), "i": torch.ones(2, dtype=torch.int64), "c": torch.ones(2).to(torch.complex64)}
    )
    target = {"f": torch.zeros(2, dtype=torch.int32), "i": torch.zeros(2), "c": torch.zeros(2)}
    error = mismatch(restore, saved, target, cast=True)
    assert [line.partition(":")[0] for line in error.mismatched] == ["f", "i", "c"]
    assert "dtype int32, in the checkpoint float32, which is not cast: only float16, bfloat16" in str(error)
    assert "cast" not in str(mismatch(restore, saved, target))


names = st.sampled_from("abc")
patterns = st.lists(st.sampled_from(["a", "b", "a.b", "*.c", "?", "*", "b.?.a", "c*", "a.b.c"]), max_size=3)
trees = st.recursive(
    st.integers(0, 1),
    lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3),
    max_leaves=9,
)


def filled(tree: Any, value: int) -> Any:
    """A state of this shape: 0 is a tensor, 1 a number."""
    if isinstance(tree, dict):
        return {key: filled(child, value) for key, child in tree.items()}
    return value if tree else torch.full((2,), value)


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {
        name: leaf
        for key, child in tree.items()
        for name, leaf in flat(child, f"{path}.{key}".lstrip(".")).items()
    }


@given(
    st.dictionaries(names, trees, min_size=1, max_size=3),
    st.none() | patterns,
    patterns,
    st.sampled_from([as_own, as_world]),
)
def test_every_leaf_is_filled_just_if_the_patterns_say_so(
    shape: Any, include: list[str] | None, exclude: list[str], restore: Restore
) -> None:
    target = filled(shape, 5)
    wanted = {
        name: (include is None or matches_any(include, name)) and not matches_any(exclude, name)
        for name in flat(shape)
    }
    saved = Saved(filled(shape, 9))
    if not any(wanted.values()):
        assert "nothing of the target" in str(
            mismatch(restore, saved, target, include=include, exclude=exclude)
        )
        return
    restore(saved, target, include=include, exclude=exclude)
    for name, leaf in flat(target).items():
        assert int(leaf if isinstance(leaf, int) else leaf[0]) == (9 if wanted[name] else 5)


def test_a_mapping_of_every_name_restores_the_same(restore: Restore) -> None:
    saved = Saved({f"old{key}": value for key, value in state(3).items()})
    target = state(0)
    restore(saved, target, rename=lambda name: f"old{name}")
    assert same(target, state(3))


UNMATCHED: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "include": ({"include": ["model.a", "modle.b"]}, [("include", "modle.b")]),
    "exclude": ({"exclude": ["rgn", "rng"]}, [("exclude", "rgn")]),
    "rename": ({"rename": {"model": "model", "modle": "m", "model.a": "model.a"}}, [("rename", "modle")]),
    "all have one": ({"include": ["model", "*.weight"], "exclude": "model.b", "rename": {"": ""}}, []),
    "in the checkpoint only": ({"include": ["model", "more"]}, []),
    "in the target only": ({"include": ["model", "less"]}, []),
    "of an item": ({"include": ["list.1", "list.2"]}, [("include", "list.2")]),
    "but no parameter": (
        {"include": ["parameter", "rng", "rgn"], "parameters_only": True},
        [("include", "rgn")],
    ),
    "by a function": ({"rename": lambda name: name}, []),
}


@pytest.mark.parametrize("case", UNMATCHED)
def test_patterns_that_no_name_has_are_known_after_the_comparison(case: str) -> None:
    options, expected = UNMATCHED[case]
    stored, target = ({**state(seed), "parameter": nn.Parameter(torch.ones(2))} for seed in (1, 0))
    stored["more"] = 1
    target["less"] = 1
    partial = Partial.of(**options)
    Saved(stored).restore(target, strict=False, partial=partial)
    assert partial.unmatched() == expected
