"""Is a restore target read into only once it fits, and only where it has to be?"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn, ones, zeros

from ckptengine.adapters.restore import RestoreTarget
from ckptengine.errors import UnsupportedStateError
from tests.adapters.fake import Saved, read_all, same
from tests.adapters.mismatches import mismatch


def test_only_what_is_wanted_is_read() -> None:
    saved = Saved({"a": ones(1000), "b": torch.randn(5)})
    match = saved.match({"b": zeros(5)}, strict=False)
    assert read_all(match, lambda _: saved) == 20


def test_every_shard_is_called_by_its_rank_also_the_own() -> None:
    tensors = {"a": ones(3), "b": zeros(3)}
    owner = Saved(tensors, rank=0, world_size=2)
    header = replace(Saved({"c": ones(3)}, rank=1, world_size=2).header, replicas={"a": 0})
    header = replace(header, tree={"a": {"$": "t", "i": 1}, "c": {"$": "t", "i": 0}})
    for target, ranks in (
        ({"c": zeros(3)}, {1}),
        ({"a": zeros(3)}, {0}),
        ({"a": zeros(3), "c": zeros(3)}, {0, 1}),
    ):
        match = RestoreTarget(target).match(header, strict=False, others=lambda rank: owner.header)
        assert match.shards == {rank for rank, _, _ in match.extents()} == ranks
        assert [{*one.destinations} for one in match.rounds()] == [ranks]


def test_match_changes_nothing_and_can_be_repeated() -> None:
    model, optimizer = nn.Linear(2, 2), None
    optimizer = torch.optim.Adam(model.parameters())
    model(ones(1, 2)).sum().backward()
    optimizer.step()
    saved = Saved({"m": model, "o": optimizer, "v": [1]})
    other = nn.Linear(2, 2)
    target = {"m": other, "o": torch.optim.Adam(other.parameters()), "v": [2]}
    restore = RestoreTarget(target)
    before = copy.deepcopy(other.state_dict())
    for _ in range(3):
        match = restore.match(saved.header)
    assert same(other.state_dict(), before)
    assert target["o"].state_dict()["state"] == {}
    assert target["v"] == [2]
    read_all(match, lambda _: saved)
    match.apply()
    assert same(other.state_dict(), model.state_dict())
    assert same(target["o"].state_dict(), optimizer.state_dict())


def test_a_target_is_a_container_or_an_object() -> None:
    with pytest.raises(UnsupportedStateError, match="a restore target is"):
        RestoreTarget(ones(2))


def test_a_tuple_as_the_state_is_filled_but_cannot_be_changed() -> None:
    target = (zeros(2), 5, [1])
    Saved((ones(2), 5, [7])).restore(target)
    assert same(target, (ones(2), 5, [7]))
    error = mismatch((ones(2), 6, [1]), (zeros(2), 5, [1]))
    assert "tuple" in error.mismatched[0]
