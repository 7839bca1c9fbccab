"""A rank's random generators, saved and set back."""

from __future__ import annotations

import random

import numpy as np
import torch

from trainer.rng import RngState, rank_seed, seed_everything


def draw() -> tuple[float, float, float, float]:
    return (
        float(torch.rand(())),
        float(np.random.random()),
        random.random(),
        float(np.random.standard_normal()),
    )


def test_all_three_generators_continue_where_they_were_saved() -> None:
    seed_everything(5)
    draw()  # leaves numpy and random with half a pair of normals in their state
    state = RngState().state_dict()
    expected = [draw() for _ in range(3)]
    RngState().load_state_dict(state)
    assert [draw() for _ in range(3)] == expected


def test_a_saved_state_is_not_changed_by_later_draws() -> None:
    seed_everything(5)
    state = RngState().state_dict()
    expected = draw()
    draw()
    RngState().load_state_dict(state)
    assert draw() == expected


def test_each_rank_and_each_step_has_a_seed_of_its_own() -> None:
    seeds = {rank_seed(seed, rank, step) for seed in range(3) for rank in range(20) for step in range(20)}
    assert len(seeds) == 3 * 20 * 20
    assert rank_seed(1, 2, 3) == rank_seed(1, 2, 3)
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_seeding_sets_all_three() -> None:
    seed_everything(9)
    first = draw()
    seed_everything(9)
    assert draw() == first
    seed_everything(10)
    assert all(mine != theirs for mine, theirs in zip(draw(), first, strict=True))
