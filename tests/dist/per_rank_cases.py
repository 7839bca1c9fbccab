"""What runs on every rank of `test_per_rank.py`."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

import ckptengine as ck
from ckptengine.adapters.tensors import LocalChunk
from tests.adapters.fake import same
from tests.dist.cases import checkpointer, rank

NUMEL = 24


class Loader:
    """An object whose state is taken as a whole."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def state(of_rank: int, step: int) -> dict[str, Any]:
    """A part of a global tensor, what all ranks hold alike, and what each has of its own."""
    part = NUMEL // world_size()
    whole = torch.arange(NUMEL, dtype=torch.float64) * step
    return {
        "sharded": LocalChunk(whole[rank() * part : (rank() + 1) * part].clone(), (NUMEL,), (rank() * part,)),
        "alike": torch.full((5,), float(step)),
        "step": step,
        "rng": torch.Generator().manual_seed(of_rank).get_state(),
        "table": bytes([of_rank]) * 2000,
        "loader": Loader(position=step, seed=of_rank),
    }


OWN = {"rng", "table", "loader.seed"}


def save(root: str, step: int) -> None:
    with checkpointer(root) as ckpt:
        ckpt.save(step, state(rank(), step))


def restore(root: str, step: int, spec: Any, expected_rank: int | None) -> tuple[Any, ...]:
    """Restore what another number of ranks has saved, into what differs from it in everything.

    expected_rank: whose own values come back; None: the target's stay. Returns what was told of it."""
    target = state(100 + rank(), step + 1)
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("ckptengine.restorer")
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with checkpointer(root) as ckpt:
            info = ckpt.restore(target, per_rank=spec)
    finally:
        logger.removeHandler(handler)
    expected = state(100 + rank() if expected_rank is None else expected_rank, step)
    loader, expected_loader = target.pop("loader"), expected.pop("loader")
    if expected_rank is None:
        expected_loader.state["position"] = step + 1
    assert loader.state == expected_loader.state
    for one in (target, expected):
        one["sharded"] = one["sharded"].tensor
    assert same(target, expected)
    return info.world_size, info.from_rank0, info.dropped, [record.getMessage() for record in records]


def restore_own(root: str, step: int, spec: Any) -> tuple[Any, ...]:
    """Restore with as many ranks as saved."""
    return restore(root, step, spec, rank())


def refused(root: str, step: int, spec: Any = "error") -> str:
    """The error of a restore that changes nothing."""
    target, before = state(100 + rank(), step + 1), state(100 + rank(), step + 1)
    with checkpointer(root) as ckpt:
        try:
            ckpt.restore(target, per_rank=spec)
        except ck.StateMismatchError as error:
            assert target.pop("loader").state == before.pop("loader").state
            for one in (target, before):
                one["sharded"] = one["sharded"].tensor
            assert same(target, before)
            return str(error)
    raise AssertionError("it was restored")
