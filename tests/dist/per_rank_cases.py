"""What runs on every rank of `test_per_rank.py`."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptengine as ck
from ckptengine.adapters.tensors import LocalChunk, is_tensor
from tests.adapters.fake import bits, same
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
    logger = logging.getLogger("ckptengine.restore_parts")
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


def few_rows(value: float, columns: bool = False) -> dict[str, Any]:
    """Tensors sharded over the ranks, one of a single row; and a whole one of each rank's own."""
    whole = {"row": torch.arange(6.0).view(1, 6) + value, "rows": torch.arange(24.0).view(4, 6) + value}
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (world_size(),))
        whole = {name: distribute_tensor(one, mesh, [Shard(int(columns))]) for name, one in whole.items()}
    return whole | {"own": torch.tensor(float(rank())), "epoch": value}


def save_few_rows(root: str, step: int) -> None:
    with checkpointer(root) as ckpt:
        ckpt.save(step, few_rows(1.0))


def restore_few_rows(root: str, step: int, spec: Any, columns: bool = False) -> tuple[Any, ...]:
    """columns: the target is sharded so, and not by rows. Returns what was dropped, what is rank 0's, and of which
    rank the own value is (None: as the target had it), with the names of all else that came back."""
    target = few_rows(2.0, columns)
    target["own"].fill_(-1.0)
    with checkpointer(root) as ckpt:
        info = ckpt.restore(target, step=step, per_rank=spec)
    expected = few_rows(1.0, columns)
    back = [name for name in ("row", "rows", "epoch") if _local(target[name]) == _local(expected[name])]
    own = int(target["own"])
    return info.dropped, info.from_rank0, [None if own < 0 else own, *back]


def _local(value: Any) -> Any:
    return bits(value.to_local() if isinstance(value, DTensor) else value) if is_tensor(value) else value
