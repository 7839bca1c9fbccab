"""Which rank stores what several ranks hold alike?

A `DTensor` is the same on all ranks along the mesh dimensions it is replicated over, and a parameter of a
`DistributedDataParallel` module on all ranks of its process group. Each is stored by one of them. Every rank
of such a group sees the same tensors in the same order, so all come to the same assignment without a word.

A DDP module's buffers are not among them: each rank's forward pass updates its own (running statistics), and
they are alike only while the pass begins. Nor is a bare tensor, whatever its name on other ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

Ranks = tuple[int, ...]
"""Global ranks that hold the same bytes, each in the same order."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is stored together: a tensor and its views. ranks: who holds it."""

    nbytes: int
    ranks: Ranks


def assign(units: Sequence[Unit]) -> list[int]:
    """The global rank that stores each unit: in every group of ranks the largest first, to whom has the
    least.

    Only units of the same ranks are weighed against each other, as other ranks know nothing of the rest.

    """
    owners = [0] * len(units)
    groups: dict[Ranks, list[int]] = defaultdict(list)
    for index, unit in enumerate(units):
        groups[unit.ranks].append(index)
    for ranks, members in groups.items():
        load = dict.fromkeys(ranks, 0)
        for index in sorted(members, key=lambda index: -units[index].nbytes):
            # min() takes the first of equals, in the order of the ranks.
            owner = min(ranks, key=lambda rank: load[rank])
            owners[index] = owner
            load[owner] += units[index].nbytes
    return owners


class Replication:
    """What this process knows of who else holds its tensors."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._group = process_group
        # Parameters of DDP modules and their optimizer state, by the address of their memory, as a state dict
        # holds other tensors of the same memory.
        self._ddp: dict[tuple[int, torch.Size], Ranks] = {}

    def enter(self, module: nn.Module) -> None:
        """Note the parameters of the DDP modules in a module whose state is about to be walked."""
        for child in module.modules():
            if isinstance(child, DistributedDataParallel):
                ranks = tuple(dist.get_process_group_ranks(child.process_group))
                ignored = set(child.parameters_to_ignore)
                for name, param in child.module.named_parameters():
                    if name not in ignored and type(param) is nn.Parameter and param.numel():
                        self._ddp[param.data_ptr(), param.shape] = ranks

    def enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer's state of the parameters that are noted: the same gradients have made it on all
        ranks."""
        for param, values in optimizer.state.items():
            ranks = self._ddp.get((param.data_ptr(), param.shape))
            if ranks is not None:
                for value in values.values():
                    if type(value) is torch.Tensor and value.numel():
                        self._ddp[value.data_ptr(), value.shape] = ranks

    def ranks_of(self, value: Any) -> Ranks | None:
        """Who else holds a tensor, if it is known and all of them take part in the checkpoint."""
        if isinstance(value, DTensor):
            ranks = _along_replicated(value)
        elif type(value) is torch.Tensor and value.numel():
            ranks = self._ddp.get((value.data_ptr(), value.shape), ())
        else:
            return None
        if len(ranks) < 2 or any(self.group_rank(rank) is None for rank in ranks):
            return None
        return ranks

    def group_rank(self, rank: int) -> int | None:
        """A global rank's place among those that checkpoint together; None if it is not one of them."""
        if self._group is None:
            return rank
        try:
            return dist.get_group_rank(self._group, rank)
        except ValueError:
            return None


def _along_replicated(value: DTensor) -> Ranks:
    """The ranks that differ from this one only along the mesh dimensions the tensor is replicated over."""
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    index = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(value.placements, coordinate, strict=True)
    )
    return tuple(value.device_mesh.mesh[index].flatten().tolist())
