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


class RngState:
    """The global generators of torch, numpy and random, as an object that a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["random"])
