"""Do ranks that train on while their state is copied save the state at the call?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptengine as ck
from tests.dist import cases, overlap_cases
from tests.helpers.ranks import Ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("state", overlap_cases.STATES)
@pytest.mark.parametrize("wrap", overlap_cases.WRAPS)
def test_training_goes_on_at_once(pair: Ranks, root: str, wrap: str, state: str) -> None:
    assert min(pair.call(overlap_cases.training_goes_on_at_once, root, wrap, state)) > 0
    assert ck.verify(root, level="data").ok


@pytest.mark.parametrize("wrap", ["fsdp1, original parameters", "fsdp1, flat parameters", "fsdp2"])
def test_a_change_on_one_rank_fails_the_save_on_all(pair: Ranks, root: str, wrap: str) -> None:
    for error in pair.call(overlap_cases.a_change_on, 1, root, wrap):
        assert isinstance(error, ck.SaveFailedError)
        assert error.rank == 1
        assert "while it was being copied" in str(error)
        assert "train.model" in str(error)
        assert "handle.wait_staged()" in str(error)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_copy_that_fails_on_one_rank_fails_the_save_on_all(pair: Ranks, root: str, failing: int) -> None:
    errors = pair.call(overlap_cases.a_copy_fails_on, failing, root, "fsdp2")
    assert type(errors[failing]) is RuntimeError
    other = errors[1 - failing]
    assert isinstance(other, ck.SaveFailedError)
    assert other.rank == failing
    assert "the device is gone" in str(other)
