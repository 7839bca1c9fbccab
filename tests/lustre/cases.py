"""What runs on each of two ranks."""

from __future__ import annotations

from typing import Any

import torch

import ckptengine as ck
from ckptengine.adapters import worker
from tests.adapters.fake import same
from tests.dist.cases import checkpointer, lend_writers, rank
from tests.helpers import fuse_lustre, writer_functions


def begin(fuse: bool) -> None:
    """Before anything else: this rank and its writer take FUSE for Lustre, if need be."""
    lend_writers()
    if fuse:
        fuse_lustre.pretend()
        worker.run = writer_functions.on_fuse_as_lustre


def state_of(step: int, of_rank: int, nbytes: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * step + of_rank)
    return {
        "w": torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator),
        "odd": torch.full((3 + of_rank,), step, dtype=torch.float64),
        "step": step,
    }


def save(root: str, step: int, nbytes: int, options: dict[str, Any] | None = None) -> ck.CommitInfo:
    """Save `nbytes` a rank."""
    with checkpointer(root, **{"block_nbytes": 1 << 20, **(options or {})}) as ckpt:
        return ckpt.save(step, state_of(step, rank(), nbytes))


def restore(root: str, nbytes: int, options: dict[str, Any] | None = None) -> ck.RestoreInfo:
    """Restore the newest step, and compare."""
    with checkpointer(root, **{"block_nbytes": 1 << 20, **(options or {})}) as ckpt:
        target = state_of(10**6, rank(), nbytes)
        info = ckpt.restore(target)
    assert same(target, state_of(info.step, rank(), nbytes))
    return info
