"""What runs on the ranks of `test_combinations.py`: a job of four that saves, and four or two of them that restore."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckptengine as ck
from ckptengine.adapters.tensors import LocalChunk, extract
from tests.adapters.fake import bits
from tests.adapters.sharded_cases import adamw, train
from tests.dist.cases import checkpointer, rank
from tests.dist.reshard_cases import part
from tests.dist.streaming_cases import wide
from tests.helpers.held_blocks import IN_TIME_S
from tests.helpers.ranks import kept

TWO = [2, 3]
"""A smaller world, in which their numbers are 0 and 1."""

OWN = "rng"
"""What each rank has of its own."""


def prepare() -> None:
    kept["two"] = dist.new_group(TWO)
    kept["plane"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def job(kind: str, seed: int, ranks: int, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    group = kept["two"] if ranks == 2 else dist.group.WORLD
    module: nn.Module = wide(seed).to(dtype)
    if kind == "ddp":
        module = DistributedDataParallel(module, process_group=group)
    elif kind == "hsdp":
        fully_shard(module, mesh=kept["plane"])
    elif kind == "fsdp2":
        fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
    return module, adamw(module)


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer, step: int, own: int) -> dict[str, Any]:
    return {"train": ck.training_state(module, optimizer), "step": step, OWN: torch.full((4,), own)}


def tensors(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """By names without what a wrapper adds to them."""
    if isinstance(state, torch.Tensor | LocalChunk):
        yield name.replace("module.", "")[1:], state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors(value, f"{name}.{key}")
    elif isinstance(state, nn.Module):
        yield from tensors(state.state_dict(), name)
    elif hasattr(state, "state"):
        yield from tensors(state.state(), name)


def save(root: str, kind: str, steps: list[int]) -> None:
    """Remembers all tensors of each step, whole."""
    module, optimizer = job(kind, 1, 4, torch.float32)
    with checkpointer(root) as ckpt:
        for step in steps:
            train(module, optimizer, 1)
            state = state_of(module, optimizer, step, rank())
            kept[f"whole {step}"] = {
                name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
                for name, value in tensors(state)
            }
            ckpt.save(step, state)


def restore(
    root: str,
    kind: str,
    ranks: int,
    options: dict[str, Any],
    taken: str = "train",
    dtype: str = "float32",
    *,
    forward: bool = True,
) -> ck.RestoreInfo:
    """Into a job that has trained otherwise. Whatever is below `taken` (`parameters` stands for those) must be
    what was saved, all of it or the part that is here, and all else as it was."""
    module, optimizer = job(kind, 2, ranks, getattr(torch, dtype))
    if dtype == "float32":
        train(module, optimizer, 1)
    state: dict[str, Any] = state_of(module, optimizer, 0, 100 + rank())
    if dtype != "float32":
        state = {"train": {"model": module}}
    before = {name: [bits(one.tensor) for one in extract(value)] for name, value in tensors(state)}
    parameters = {"train.model." + name.removeprefix("module.") for name, _ in module.named_parameters()}
    config = {"exchange": "on", "process_group": kept["two"] if ranks == 2 else None}
    with checkpointer(root, **config) as ckpt:
        found = ckpt.restore(state, **options)
        if isinstance(found, ck.RestoreHandle):
            if forward:
                with torch.no_grad():
                    module(torch.ones(2, 5, dtype=getattr(torch, dtype)))
            found = found.result(IN_TIME_S)
    whole = kept[f"whole {found.step}"]
    compared = 0
    for name, value in tensors(state):
        is_taken = name in parameters if taken == "parameters" else name.startswith(taken)
        for one, old in zip(extract(value), before[name], strict=True):
            if is_taken:
                compared += 1
                assert bits(one.tensor) == bits(part(whole[name], one.chunk).to(one.tensor.dtype)), name
            elif name != OWN:
                assert bits(one.tensor) == old, name
    assert compared
    if OWN in state:
        is_taken = taken == "train" and OWN not in (options.get("exclude", ""), *found.dropped)
        own = 0 if OWN in found.from_rank0 else rank() if is_taken else 100 + rank()
        assert state[OWN].tolist() == [own] * 4
    return found


def fails(root: str, *args: Any) -> BaseException:
    """A restore that begins to stream, whose error comes while all wait; in a collective of the model they would
    wait for those that have raised."""
    began = time.monotonic()
    with pytest.raises(ck.CheckpointError) as caught:
        restore(root, *args, forward=False)
    assert time.monotonic() - began < IN_TIME_S
    return caught.value
