"""What runs on every rank of `test_partial.py`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
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


def restore_by_patterns(
    root: str, options_by_rank: list[dict[str, Any]], strict: bool = True
) -> tuple[list[str], str | None, list[float]]:
    """Of a state of which each rank has keys of its own: what was logged as a warning, the error, and what
    the target holds then."""

    def stage(value: float) -> dict[str, Any]:
        return {f"stage{rank()}": nn.Linear(2, 2), "all": torch.full((2,), value), "step": 3}

    target, error = stage(0.0), None
    options = options_by_rank[rank()]
    with warnings_logged() as logged, checkpointer(root) as ckpt:
        is_new = ckpt.latest is None
        dist.barrier()
        if is_new:
            ckpt.save(1, stage(1.0))
        try:
            restored = ckpt.restore(target, strict=strict, **options)
            if options.get("streaming"):
                restored.result()
        except ck.StateMismatchError as raised:
            error = str(raised)
    return logged, error, target["all"].tolist()


def restore_with_policy(root: str, policy: dict[str, Any]) -> list[str]:
    target = {"step": 0, "rank": 0, "note": None}
    with warnings_logged() as logged, checkpointer(root) as ckpt:
        ckpt.restore(target, per_rank=policy, strict=False)
    return logged


@contextlib.contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """Those about patterns."""
    logged: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "called that" in record.getMessage():
                logged.append(record.getMessage())

    handler = Kept(logging.WARNING)
    logging.getLogger("ckptengine").addHandler(handler)
    try:
        yield logged
    finally:
        logging.getLogger("ckptengine").removeHandler(handler)
