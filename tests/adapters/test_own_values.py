"""Do values that each rank had of its own come back as the policy says, on another number of ranks?"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import ckptengine as ck
from ckptengine.adapters.matching import Matcher
from ckptengine.adapters.restore import RestoreTarget
from ckptengine.adapters.tensors import LocalChunk
from ckptengine.adapters.world import World
from ckptengine.format.columns import values_of
from ckptengine.format.index import index_from_headers
from ckptengine.format.per_rank import PerRank, PerRankFinder
from ckptengine.read.held import HeldTensors
from ckptengine.read.per_rank import PerRankPolicy
from tests.adapters.fake import Saved, read_all, same


class Loader:
    """An object whose state is taken as a whole."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.loaded = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)
        self.loaded += 1


def rng(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "torch": generator.get_state(),
        "numpy": np.random.RandomState(seed).get_state(),
        "python": random.Random(seed).getstate(),
    }


def state(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "weight": torch.arange(6.0),
        "step": 7,
        "rng": rng(rank),
        "loader": Loader(position=12, seed=rank),
        "rank": rank,
        "names": ["a", ("b", rank)],
        (1, "key"): rank,
        **more,
    }


def saved(*states: dict[str, Any]) -> tuple[Saved, PerRank]:
    """What rank 0 has saved, and what is known of all ranks, each of which says what its bytes are."""
    ranks = [Saved(one, rank=rank, world_size=len(states)) for rank, one in enumerate(states)]
    finder = PerRankFinder()
    for one in ranks:
        finder.add(one.values)
    return ranks[0], finder.found()


def restore(into: dict[str, Any], spec: Any, *states: dict[str, Any], strict: bool = True) -> Any:
    """What one of another number of ranks restores."""
    ranks = [Saved(one, rank=rank, world_size=len(states)) for rank, one in enumerate(states)]
    headers = [replace(one.header, own=one.values.digests) for one in ranks]
    held = HeldTensors(index_from_headers(headers), lambda: headers)
    world = World(headers[0], held, headers.__getitem__, reader=0, own=False)
    match = RestoreTarget(into).match_world(world, PerRankPolicy.of(spec), strict=strict)
    read_all(match, ranks.__getitem__)
    match.apply()
    return match


def target() -> dict[str, Any]:
    return state(9) | {"weight": torch.zeros(6), "step": 0}


OWN = {"rng.torch", "rng.numpy", "rng.python", "loader.seed", "rank", "names", '{"$":"tuple","v":[1,"key"]}'}


def test_what_differs_is_found_by_its_names() -> None:
    _, known = saved(state(0), state(1), state(2))
    assert known == PerRank(frozenset(OWN))


def test_values_that_differ_are_listed_in_one_error_and_nothing_is_changed() -> None:
    into, before = target(), target()
    with pytest.raises(ck.StateMismatchError) as caught:
        restore(into, "error", state(0), state(1))
    for name in OWN:
        assert f"{name}: each rank that saved it had its own" in str(caught.value)
    assert len(caught.value.mismatched) == len(OWN)
    assert 'restore(per_rank="rank0")' in str(caught.value)
    into["loader"], before["loader"] = into["loader"].state, before["loader"].state
    assert same(into, before)


def test_all_else_that_does_not_fit_is_in_the_same_error() -> None:
    into = target() | {"weight": torch.zeros(5), "more": 1}
    with pytest.raises(ck.StateMismatchError) as caught:
        restore(into, {"*": "error", "rng": "drop"}, state(0), state(1))
    assert "weight: shape (5,), in the checkpoint (6,)" in str(caught.value)
    assert "more: not in the checkpoint" in str(caught.value)
    assert "rank: each rank" in str(caught.value)


def test_all_ranks_can_have_rank_0s() -> None:
    into = target()
    match = restore(into, "rank0", state(0), state(1))
    loader = into.pop("loader")
    assert (loader.state, loader.loaded) == ({"position": 12, "seed": 0}, 1)
    expected = state(0)
    del expected["loader"]
    assert same(into, expected)
    assert set(match.from_rank0) == OWN
    assert match.dropped == ()


def test_what_is_dropped_stays_as_the_target_has_it() -> None:
    into = target()
    match = restore(into, "drop", state(0), state(1))
    loader = into.pop("loader")
    assert (loader.state, loader.loaded) == ({"position": 12, "seed": 9}, 0)
    expected = state(9) | {"weight": torch.arange(6.0), "step": 7}
    del expected["loader"]
    assert same(into, expected)
    assert set(match.dropped) == OWN - {"loader.seed"} | {"loader"}
    assert match.from_rank0 == ()


def test_each_can_be_chosen_by_name() -> None:
    into = target()
    match = restore(into, {"rng": "drop", "loader": "rank0", "*": "rank0"}, state(0), state(1))
    assert into["rank"] == 0
    assert into["loader"].state["seed"] == 0
    assert same(into["rng"], rng(9))
    assert set(match.dropped) == {"rng.torch", "rng.numpy", "rng.python"}


def test_one_rank_alone_has_nothing_that_differs_but_what_is_named_is_dropped() -> None:
    into = target()
    match = restore(into, {"rng": "drop", "*": "error"}, state(0))
    assert same(into["rng"], rng(9))
    assert (into["rank"], into["step"]) == (0, 7)
    assert set(match.dropped) == {"rng.torch", "rng.numpy", "rng.python"}


def test_an_object_is_dropped_whole_where_one_of_its_tensors_differs() -> None:
    states = [{"o": Loader(seen=torch.tensor(rank), epoch=1)} for rank in (0, 1)]
    into = {"o": Loader(seen=torch.tensor(5), epoch=3)}
    assert restore(into, "drop", *states).dropped == ("o",)
    assert into["o"].state["epoch"] == 3
    assert restore(into, "rank0", *states).from_rank0 == ("o.seen",)
    assert into["o"].state["epoch"] == 1
    assert int(into["o"].state["seen"]) == 0


@pytest.mark.parametrize("holder", [0, 1])
def test_a_row_sharded_over_two_ranks_is_no_ranks_own_whichever_has_it(holder: int) -> None:
    """The rank that has all of it stores it as a whole tensor, the other says which part of it is nothing."""
    row = torch.arange(6.0).view(1, 6)
    states = [{"row": row, "o": Loader(row=row), "step": 1} for _ in (0, 1)]
    nothing = LocalChunk(torch.empty(0, 6), (1, 6), (0, 0))
    states[1 - holder] |= {"row": nothing, "o": Loader(row=nothing)}
    for spec in ("error", "rank0", "drop", {"row": "drop", "o.row": "drop"}, {"row": "rank0", "*": "drop"}):
        into: dict[str, Any] = {"row": torch.zeros(1, 6), "o": Loader(row=torch.zeros(1, 6)), "step": 0}
        match = restore(into, spec, *states)
        assert (match.dropped, match.from_rank0) == ((), ()), spec
        assert same([into["row"], into["o"].state["row"], into["step"]], [row, row, 1]), spec


def test_a_whole_tensor_that_differs_from_parts_of_its_name_is_dropped_by_name() -> None:
    states = [{"w": torch.ones(3)}, {"w": LocalChunk(torch.ones(2), (5,), (0,))}]
    into = {"w": torch.zeros(3)}
    assert restore(into, {"w": "drop"}, *states).dropped == ("w",)
    assert into["w"].tolist() == [0, 0, 0]
    with pytest.raises(ck.StateMismatchError, match="contradict each other"):
        restore(into, "drop", *states)


def test_a_modules_buffers_are_dropped_one_by_one() -> None:
    def module(rank: int) -> torch.nn.Module:
        made = torch.nn.BatchNorm1d(2)
        made.running_mean.fill_(rank)  # type: ignore[union-attr]
        made.weight.data.fill_(3)
        return made

    into = module(9)
    into.weight.data.fill_(0)
    match = restore({"m": into}, "drop", *({"m": module(rank)} for rank in (0, 1)))
    assert match.dropped == ("m.running_mean",)
    assert into.running_mean.tolist() == [9, 9]  # type: ignore[union-attr, operator]
    assert into.weight.tolist() == [3, 3]


@pytest.mark.parametrize("first", [True, False])
def test_what_only_some_ranks_have(first: bool) -> None:
    """Rank 0 or the others; the target has it, or has not."""
    states = [{"a": 1, "extra": {"note": "x"}}, {"a": 1}]
    if not first:
        states.reverse()
    with pytest.raises(ck.StateMismatchError, match=r"extra\.note: only some of the ranks that saved"):
        restore({"a": 0, "extra": {"note": "y"}}, "error", *states)
    into: dict[str, Any] = {"a": 0, "extra": {"note": "y"}}
    assert restore(into, "drop", *states).dropped == (("extra.note",) if first else ("extra",))
    assert into == {"a": 1, "extra": {"note": "y"}}
    if first:
        assert restore(into, "rank0", *states).from_rank0 == ("extra.note",)
        assert into == {"a": 1, "extra": {"note": "x"}}
        into = {"a": 0}
        for spec in ("rank0", "drop"):
            assert restore(into, spec, *states).dropped == ("extra.note",)
            assert into == {"a": 1}
        with pytest.raises(ck.StateMismatchError, match=r"extra\.note: only some"):
            restore(into, "error", *states)
    else:
        with pytest.raises(ck.StateMismatchError, match="extra: not in the checkpoint"):
            restore(into, "rank0", *states)
        assert restore(into, "rank0", *states, strict=False).missing == ("extra",)
        with pytest.raises(ck.StateMismatchError, match=r"extra\.note: only some"):
            restore({"a": 0}, "error", *states)
        assert restore({"a": 0}, "rank0", *states).dropped == ("extra.note",)


def test_without_a_policy_nothing_is_asked() -> None:
    first, _ = saved(state(0), state(1))
    into = target()
    match = first.restore(into)
    assert (match.dropped, match.from_rank0) == ((), ())
    assert into["rank"] == 0


def test_the_matcher_names_values_as_the_format_does() -> None:
    keyed: dict[Any, Any] = {
        None: 1,
        True: 2,
        3: 4,
        1.5: 6,
        (1, None): 7,
        "é": 8,
        frozenset({2}): 9,
        b"x": 10,
    }
    states = [{"v": {key: (value, rank) for key, value in keyed.items()}} for rank in (0, 1)]
    into = {"v": dict.fromkeys(keyed, (0, 9))}
    assert len(restore(into, "drop", *states).dropped) == len(keyed)
    assert into == {"v": dict.fromkeys(keyed, (0, 9))}
    assert Matcher([], allow_pickle=False).differences.refused == []


def test_values_of_a_decoded_header_are_those_of_the_saved_state() -> None:
    one = Saved(state(0), world_size=2)
    assert values_of(one.header).own == one.values.own
    assert one.values.digests is not None
