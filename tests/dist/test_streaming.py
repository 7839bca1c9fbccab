"""Do ranks whose training begins while they read compute what they would have, and fail together?"""

from __future__ import annotations

import pytest

import ckptengine as ck
from tests.dist import streaming_cases
from tests.helpers.ranks import RankDied, Ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("state", streaming_cases.STATES)
@pytest.mark.parametrize("wrap", streaming_cases.WRAPS)
def test_training_goes_on_as_after_a_full_restore(pair: Ranks, root: str, wrap: str, state: str) -> None:
    pair.call(streaming_cases.training_goes_on_as_after_a_full_restore, root, wrap, state)


def test_buffers_are_there_when_the_call_returns(pair: Ranks, root: str) -> None:
    pair.call(streaming_cases.buffers_are_there_when_the_call_returns, root)


@pytest.mark.parametrize("wrap", ["fsdp1, flat parameters", "fsdp2", "ddp"])
def test_a_forward_and_a_backward_need_no_optimizer(pair: Ranks, root: str, wrap: str) -> None:
    pair.call(streaming_cases.a_forward_needs_no_optimizer, root, wrap)


@pytest.mark.parametrize("name", ["model.1.b.weight", "optimizer.state.1.b.weight.exp_avg_sq"])
@pytest.mark.parametrize("wrap", ["fsdp1, original parameters", "fsdp2"])
def test_damage_is_heard_of_on_all_ranks(pair: Ranks, root: str, wrap: str, name: str) -> None:
    for error in pair.call(streaming_cases.damage_is_heard_of_everywhere, root, wrap, name):
        assert isinstance(error, ck.CorruptCheckpointError)
        assert error.rank == 1
        assert name in str(error)
        assert "restore again without streaming" in str(error)


def test_an_optimizer_that_refuses_its_state_fails_all_ranks(pair: Ranks, root: str) -> None:
    for error in pair.call(streaming_cases.a_failed_apply_is_everybodys, root):
        assert error.rank == 1
        assert "the object 'optimizer' could not take its state of step 2: RuntimeError" in str(error)
        assert "partly written" in str(error)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_named(root: str, victim: int) -> None:
    with Ranks(2) as ranks:
        results = ranks.start(streaming_cases.a_killed_rank_is_named, root, victim).results()
    assert isinstance(results[victim].error, RankDied)
    error = results[1 - victim].value
    assert isinstance(error, ck.CheckpointError), results
    # Rank 0 keeps the store that the ranks talk over.
    assert "cannot be reached" in str(error) if victim == 0 else error.rank == 1, error
