"""How one rank's random generators are seeded and saved."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, numpy and random."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def rank_seed(seed: int, rank: int, step: int = 0) -> int:
    """A seed of each rank's own, another one for each step that a run of other ranks begins at."""
    return int(np.random.SeedSequence((seed, rank, step)).generate_state(1)[0])


class RngState:
    """The global generators of torch, numpy and random, as an object that a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["random"])
