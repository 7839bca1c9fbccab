"""Can a part of a checkpoint be restored, by its own ranks and by others? Real processes in real gloo groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ck
from tests.dist import cases, partial_cases
from tests.helpers.ranks import Ranks

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pair: Ranks) -> str:
    root = str(tmp_path_factory.mktemp("trained") / "root")
    pair.call(partial_cases.save_trained, root)
    return root


def test_parameters_only(pair: Ranks, trio: Ranks, trained: str) -> None:
    pair.call(partial_cases.restore_parameters_only, trained)
    trio.call(partial_cases.restore_parameters_only, trained)


def test_keys_of_one_side_are_returned(pair: Ranks, trio: Ranks, trained: str) -> None:
    for ranks in (pair, trio):
        for missing, unexpected in ranks.call(partial_cases.restore_what_fits, trained):
            assert missing == ("train.more",)
            assert unexpected == ("train.optimizer", "step")


def test_other_names_and_another_dtype_on_other_ranks(pair: Ranks, trained: str) -> None:
    rename = {"weights": "train.model"}
    ours = partial_cases.restore_elsewhere(trained, rename, torch.bfloat16)
    theirs = pair.call(partial_cases.restore_elsewhere, trained, rename, torch.bfloat16)
    with ck.open_checkpoint(Path(trained)) as c:
        for name, tensor in ours.items():
            expected = c.get_tensor(f"train.model.{name}").to(torch.bfloat16)
            for found in (tensor, *(one[name] for one in theirs)):
                assert torch.equal(found, expected)


def test_patterns_are_looked_for_on_all_ranks(pair: Ranks, root: str) -> None:
    """Some rank has what each of them means."""
    alike = {"include": ["stage0", "stage1.weight", "all"], "exclude": ["stage1.bias", "stage0.bias"]}
    own = [{"exclude": "stage0"}, {"exclude": "stage1", "rename": {"all": "all"}}]
    for options in ([alike] * 2, own, [{"include": ["all", "stage0"]}, {"include": "all"}], [{}, {"exclude": "all"}]):
        for logged, error, _ in pair.call(partial_cases.restore_by_patterns, root, options):
            assert (logged, error) == ([], None)


def test_a_pattern_that_no_rank_has_is_an_error_where_it_asks_for_something(pair: Ranks, root: str) -> None:
    """On all ranks, whichever has it, and before anything is touched."""
    typed = {"include": ["all", "stge0"]}
    for options in ([typed, typed], [typed, {}], [{}, typed]):
        for _, error, held in pair.call(partial_cases.restore_by_patterns, root, options):
            assert error is not None
            assert "in 1 place:\n  include='stge0': nothing is called that, on any rank" in error
            assert held == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exclude": ["zzz", "stage0"]}, "exclude='zzz'"),
        ({"rename": {"zzz": "all"}}, "rename='zzz'"),
        ({"streaming": True, "priority": ["stage1", "zzz"]}, "priority='zzz'"),
        ({"include": ["all", "zzz"], "strict": False}, "include='zzz'"),
    ],
)
def test_other_patterns_that_no_rank_has_are_said_once(
    pair: Ranks, root: str, options: dict[str, Any], said: str
) -> None:
    strict = options.pop("strict", True)
    results = pair.call(partial_cases.restore_by_patterns, root, [options] * 2, strict)
    assert [(error, held) for _, error, held in results] == [(None, [1.0, 1.0])] * 2
    (line,), nothing = (logged for logged, _, _ in results)
    assert line == f"restoring step 1: nothing is called that, on any rank: {said}"
    assert nothing == []


def test_names_of_values_that_no_rank_had_are_said_too(pair: Ranks, trio: Ranks, root: str) -> None:
    pair.call(cases.save_steps, root, [1])
    policy = {"rank": "rank0", "zzz": "drop", "*": "rank0"}
    results = trio.call(partial_cases.restore_with_policy, root, policy)
    assert results == [["restoring step 1: nothing is called that, on any rank: per_rank='zzz'"], [], []]
