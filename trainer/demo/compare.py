"""Whether two runs ended the same, bit for bit: by their digests, their losses, and their checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ckptengine as ck
from trainer.demo.runs import RANKS, Place, losses
from trainer.digest import digest_of


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared, and one line for each thing that differs."""

    n_tensors: int
    nbytes: int
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.differences


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (NaNs too, which are not equal as numbers)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def compare_checkpoints(a: Path, b: Path) -> Comparison:
    """The newest checkpoints of two roots, as the engine's own reader returns them: every tensor whole, and
    everything each rank saved."""
    differences: list[str] = []
    n_tensors = nbytes = 0
    with ck.open_checkpoint(a) as left, ck.open_checkpoint(b) as right:
        names, others = set(left.keys()), set(right.keys())
        differences += [f"{name} is in one checkpoint only" for name in sorted(names ^ others)]
        for name in sorted(names & others):
            mine, theirs = left.get_tensor(name), right.get_tensor(name)
            n_tensors += 1
            nbytes += mine.numel() * mine.element_size()
            if not same_bytes(mine, theirs):
                differences.append(f"{name} differs between the checkpoints")
        if left.world_size != right.world_size:
            differences.append(f"{left.world_size} ranks saved one checkpoint, {right.world_size} the other")
        else:
            # Tensors that ranks have under one name (generators), and all values: step, position, schedule.
            differences += [
                f"what rank {rank} saved differs between the checkpoints"
                for rank in range(left.world_size)
                if digest_of(left.load(rank)) != digest_of(right.load(rank))
            ]
    return Comparison(n_tensors, nbytes, tuple(differences))


def compare_runs(
    a: Place, b: Place, events_a: list[dict[str, Any]], events_b: list[dict[str, Any]]
) -> Comparison:
    """The final digests of every rank, the loss at every step, and the last checkpoints."""
    differences: list[str] = []
    for rank in range(RANKS):
        mine, theirs = (json.loads((place.final / f"final-rank{rank}.json").read_text()) for place in (a, b))
        differences += [
            f"rank {rank}: the digest of {key} differs" for key in mine if mine[key] != theirs[key]
        ]
    mine_losses, their_losses = losses(events_a), losses(events_b)
    for rank, step in sorted(mine_losses.keys() | their_losses.keys()):
        if mine_losses.get((rank, step)) != their_losses.get((rank, step)):
            differences.append(f"rank {rank}: the loss at step {step} differs")
    checkpoints = compare_checkpoints(a.root, b.root)
    return Comparison(checkpoints.n_tensors, checkpoints.nbytes, (*differences, *checkpoints.differences))
