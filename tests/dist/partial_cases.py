"""What runs on every rank of `test_partial.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckptengine as ck
from tests.adapters.sharded_cases import adamw, fsdp2, local_state, model, train
from tests.dist.cases import checkpointer, rank


def state(module: nn.Module, optimizer: torch.optim.Optimizer, of_rank: int) -> dict[str, Any]:
    return {"train": ck.training_state(module, optimizer), "step": 7, "rng": torch.full((4,), of_rank)}


def save_trained(root: str) -> None:
    module = fsdp2(model(1))
    optimizer = adamw(module)
    train(module, optimizer)
    with checkpointer(root) as ckpt:
        ckpt.save(7, state(module, optimizer, rank()))


def restore_parameters_only(root: str) -> None:
    """Into a model that has been trained otherwise, whose optimizer and buffers stay as they are."""
    module = fsdp2(model(2))
    optimizer = adamw(module)
    train(module, optimizer, 1)
    target = state(module, optimizer, 50)
    before = local_state(module, optimizer)
    whole_before = local_state(module, optimizer)
    with checkpointer(root) as ckpt:
        info = ckpt.restore(target, parameters_only=True)
    assert (info.step, info.missing, info.unexpected) == (7, (), ())
    parameters = {name for name, _ in module.named_parameters()}
    after = local_state(module, optimizer)
    assert {name for name in after if after[name] != before[name]} == parameters
    assert after.keys() == whole_before.keys()
    assert target["rng"].tolist() == [50] * 4


def restore_what_fits(root: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A target that has something more and something less, of which a part is asked for."""
    module = fsdp2(model(2))
    target: dict[str, Any] = {"train": {"model": module, "more": 1}, "rng": torch.zeros(9)}
    with checkpointer(root) as ckpt:
        with pytest.raises(ck.StateMismatchError) as caught:
            ckpt.restore(target, exclude="rng")
        assert "train.more: not in the checkpoint" in str(caught.value)
        info = ckpt.restore(target, exclude="rng", strict=False, step=7)
    assert target["train"]["more"] == 1
    assert target["rng"].tolist() == [0] * 9
    return info.missing, info.unexpected


def restore_elsewhere(root: str, rename: dict[str, str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A plain model of another dtype, in a state of another form. Returns its parameters."""
    module = model(3).to(dtype)
    target = {"weights": module, "step": 0}
    with checkpointer(root) as ckpt:
        with pytest.raises(ck.StateMismatchError, match="dtype bfloat16, in the checkpoint float32"):
            ckpt.restore(target, include="weights", rename=rename, parameters_only=True)
        ckpt.restore(target, include="weights", rename=rename, parameters_only=True, cast=True)
    assert target["step"] == 0
    return {name: tensor.detach() for name, tensor in module.named_parameters()}
