"""Can a part of a checkpoint be restored, by its own ranks and by others? Real processes in real gloo groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
