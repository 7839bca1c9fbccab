"""How the model is spread over the ranks: FSDP1, FSDP2, DDP or not at all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from trainer.faults import current_life
from trainer.model import Block, ByteLlama


@dataclass(frozen=True, slots=True)
class World:
    """This process among the others; a run without a launcher has one rank and no process group."""

    rank: int
    size: int

    @property
    def is_distributed(self) -> bool:
        return self.size > 1


def join(fsdp: Literal["none", "1", "2"], timeout_s: float) -> World:
    """Join the launcher's process group (gloo); without a launcher, stay alone.

    The timeout is how long a collective waits for a rank that is alive and late. One that is dead is noticed
    at once, by its closed connection.

    The store is prefixed with the life: torchrun's agent keeps one store across restarts, and a rank that
    finds there the address left by a peer of an earlier life connects to nobody ("Gloo connectFullMesh
    failed", seen in two of three restarts with torch 2.13).
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        if fsdp != "none":
            raise SystemExit(
                f"trainer: error: --fsdp {fsdp} shards over two ranks or more; start it with "
                "torchrun --standalone --nproc-per-node 2 -m trainer ..."
            )
        return World(0, 1)
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    store = PrefixStore(f"life-{current_life()}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return World(rank, size)


def leave(world: World) -> None:
    if world.is_distributed:
        dist.destroy_process_group()


def distribute(model: ByteLlama, fsdp: Literal["none", "1", "2"], world: World) -> nn.Module:
    """Shard or replicate the model; every rank must have initialised it with the same values."""
    if fsdp == "1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=False,
        )
    if fsdp == "2":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model
    if world.is_distributed:
        return DistributedDataParallel(model)
    return model


def clip_gradients(model: nn.Module, max_norm: float) -> None:
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(max_norm)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def mean_over_ranks(value: float, world: World) -> float:
    if not world.is_distributed:
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / world.size


def local_part(value: Any) -> Any:
    """The bytes of a tensor that this rank holds, as a plain tensor; anything else as it is."""
    if isinstance(value, Tensor) and hasattr(value, "to_local"):
        return value.to_local()
    return value
