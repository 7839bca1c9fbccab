"""The digests that two runs are compared by see every difference of bits, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.digest import digest_of, final_digests, write_final
from trainer.rng import seed_everything


def test_equal_values_have_equal_digests_wherever_they_lie() -> None:
    a = torch.arange(12.0).reshape(3, 4)
    spread = torch.zeros(3, 8)[:, ::2]
    spread.copy_(a)
    assert digest_of({"x": a, "y": [1, None]}) == digest_of({"y": [1, None], "x": spread})


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.tensor([0.0, 2.0]), "n": 1},
        {"x": torch.tensor([-0.0, 1.0]), "n": 1},
        {"x": torch.tensor([[0.0, 1.0]]), "n": 1},
        {"x": torch.tensor([0.0, 1.0], dtype=torch.float64), "n": 1},
        {"z": torch.tensor([0.0, 1.0]), "n": 1},
        {"x": torch.tensor([0.0, 1.0]), "n": 2},
        {"x": np.array([0.0, 1.0], dtype=np.float32), "n": 1, "m": 0},
    ],
)
def test_any_difference_shows(other: dict[str, Any]) -> None:
    assert digest_of({"x": torch.tensor([0.0, 1.0]), "n": 1}) != digest_of(other)


def test_final_digests_tell_parameters_optimizer_and_generators_apart(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        seed_everything(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = make()
    first = final_digests(model, optimizer)
    assert first == final_digests(*make())
    next(iter(optimizer.state.values()))["exp_avg"][0] += 1
    second = final_digests(model, optimizer)
    assert {key for key in first if first[key] != second[key]} == {"optimizer"}
    torch.rand(1)
    third = final_digests(model, optimizer)
    assert {key for key in first if second[key] != third[key]} == {"rng"}
    write_final(str(tmp_path / "new"), 3, {"step": 9, **first})
    assert json.loads((tmp_path / "new" / "final-rank3.json").read_text()) == {"rank": 3, "step": 9, **first}
