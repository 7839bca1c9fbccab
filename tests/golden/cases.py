"""What two real ranks do with golden checkpoints; run by `tests.adapters.ranks`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import ckptengine as ck
from ckptengine.adapters.tensors import LocalChunk
from ckptengine.testing.strategies import blank
from tests.golden import expected
from tests.helpers.equality import check_equal


def restore_raw() -> None:
    _restore("raw")


def restore_zstd() -> None:
    _restore("zstd")


def restore_own() -> None:
    _restore("own")


def _restore(name: str) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = expected.saved_state(rank, mesh)
    target = {"model": {}} | {key: blank(value) for key, value in state.items() if key != "model"}
    for key, tensor in state["model"].items():
        _local(tensor).fill_(0)
        target["model"][key] = tensor
    with ck.Checkpointer(Path(sys.argv[1]) / name) as ckpt:
        info = ckpt.restore(target)
        assert (info.step, info.fell_back_from) == (expected.STEP, ())
    found = target | {"model": {key: _local(tensor) for key, tensor in target["model"].items()}}
    check_equal(found, expected.local_state(rank))


def _local(value: Any) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value.to_local()
    return value.tensor if isinstance(value, LocalChunk) else value
