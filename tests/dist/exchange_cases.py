"""What runs on every rank of `test_exchange.py`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ckptengine as ck
from ckptengine import read_once
from ckptengine.adapters.restore import RestoreTarget
from ckptengine.read import reader
from native_bench import page_cache
from tests.adapters.fake import same
from tests.dist.cases import checkpointer, rank
from tests.helpers.ranks import kept


class Net(nn.Module):
    """Parameters over several blocks, tiny and empty ones, and a buffer that each rank has of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = (5000, 1, 3, 0, 70_001, 2, 12_345)
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(n, generator=generator)) for n in sizes])
        self.wide = nn.Parameter(torch.randn(90, 300, generator=generator).to(torch.bfloat16))
        self.register_buffer("seen", torch.full((100,), float(rank() + seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def ddp(seed: int) -> dict[str, Any]:
    return {"model": DistributedDataParallel(Net(seed)), "rank": rank()}


def transposed(seed: int) -> dict[str, Any]:
    """As `ddp`, with a parameter whose memory is in another order than that of the file."""
    state = ddp(seed)
    wide = state["model"].module.wide
    wide.data = wide.data.t().contiguous().t()
    assert not wide.is_contiguous()
    return state


def hsdp(seed: int) -> dict[str, Any]:
    """Replicated over two, sharded over the others; beside it what all have, and what each has alone."""
    half = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard"))
    full = torch.randn(301, 200, generator=torch.Generator().manual_seed(seed))
    return {
        "sharded": distribute_tensor(full, mesh, [Replicate(), Shard(0)]),
        "buffer": distribute_tensor(full[:40].clone(), mesh, [Replicate(), Replicate()]),
        "own": torch.full((5000,), float(seed * 10 + rank())),
    }


STATES: dict[str, Callable[[int], dict[str, Any]]] = {"ddp": ddp, "transposed": transposed, "hsdp": hsdp}


def plain(state: Any) -> Any:
    if isinstance(state, nn.Module):
        return {name: value.detach() for name, value in state.state_dict().items()}
    if isinstance(state, DTensor):
        return state.to_local()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return state


def network_only() -> None:
    """From now on, each rank takes itself for the only one on its host."""
    read_once.host_id = lambda: bytes([rank()]) * 8  # type: ignore[assignment]


def same_host_again() -> None:
    read_once.host_id = kept.setdefault("host_id", read_once.host_id)


def save(
    root: str, kind: str, steps: tuple[int, ...] = (1,), options: Mapping[str, Any] = MappingProxyType({})
) -> None:
    with checkpointer(root, **options) as ckpt:
        for step in steps:
            ckpt.save(step, STATES[kind](step))


def restore(root: str, kind: str, options: dict[str, Any]) -> tuple[ck.RestoreInfo, int]:
    """Into a fresh target, which must be what was saved. Also how many blocks this rank read."""
    target = STATES[kind](999)
    count = 0
    read = reader.ShardReader.read

    def counting(self: Any, *args: Any, **more: Any) -> bool:
        nonlocal count
        count += 1
        return read(self, *args, **more)

    with pytest.MonkeyPatch.context() as patch, checkpointer(root, **options) as ckpt:
        patch.setattr(reader.ShardReader, "read", counting)
        before = threading.active_count()
        info = ckpt.restore(target)
        assert threading.active_count() <= before
    assert same(plain(target), plain(STATES[kind](info.step)))
    return info, count


def restore_twice(
    root: str, kind: str, options: dict[str, Any], forgetful: int | None = None
) -> list[ck.RestoreInfo]:
    """forgetful: a rank that gives up its connections after the first one."""
    infos = []
    with checkpointer(root, **options) as ckpt:
        for _ in range(2):
            if infos and rank() == forgetful:
                assert ckpt._network is not None and ckpt._network._groups
                ckpt._network.close()
            target = STATES[kind](999)
            infos.append(ckpt.restore(target))
            assert same(plain(target), plain(STATES[kind](infos[-1].step)))
    return infos


def in_rounds(root: str, options: dict[str, Any]) -> tuple[ck.RestoreInfo, int]:
    """With a buffer for pieces that has room for few blocks."""
    from ckptengine.adapters import rounds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "BUFFER_NBYTES", 20_000)
        patch.setattr(rounds, "PIECE_NBYTES", 10_000)
        return restore(root, "transposed", options)


def restore_measured(root: str, options: dict[str, Any]) -> ck.RestoreInfo:
    """The ranks read a block each, to see how fast the storage is."""
    with pytest.MonkeyPatch.context() as patch, checkpointer(root, direct_io="auto", **options) as ckpt:
        patch.setattr(read_once, "MEASURE_NBYTES", 0)
        patch.setattr(reader.ShardReader, "are_cached", lambda *_: False)
        return ckpt.restore(ddp(999))


def restore_without_threads(root: str, victim: int, options: dict[str, Any]) -> ck.RestoreInfo:
    """Which the victim's channel would need."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name in ("ckptengine-ring", "ckptengine-exchange"):
            raise RuntimeError("no new thread")
        start(self)

    with pytest.MonkeyPatch.context() as patch, checkpointer(root, **options) as ckpt:
        if rank() == victim:
            patch.setattr(threading.Thread, "start", refuse)
        target = ddp(999)
        info = ckpt.restore(target)
        assert same(plain(target), plain(ddp(1)))
        return info


def restore_without_memory(root: str, victim: int, options: dict[str, Any]) -> None:
    """The victim has none for its part."""

    def refuse(*_: object) -> None:
        raise MemoryError("no memory for this")

    with pytest.MonkeyPatch.context() as patch, checkpointer(root, **options) as ckpt:
        if rank() == victim:
            patch.setattr(RestoreTarget, "begin", refuse)
        ckpt.restore(ddp(999))


def restore_held(root: str, ready: str, victim: int, options: dict[str, Any]) -> None:
    """Restore; the victim says so in a file when it has read a block, and holds there."""
    read = reader.ShardReader.read
    taken = [0]

    def holding(self: Any, wanted: Any, buffers: Any, *, keep: bool = False) -> bool:
        cached = read(self, wanted, buffers, keep=keep)
        taken[0] += 1
        if taken[0] == 3:
            Path(ready).touch()
            threading.Event().wait()
        return cached

    with pytest.MonkeyPatch.context() as patch, checkpointer(root, **options) as ckpt:
        if rank() == victim:
            patch.setattr(reader.ShardReader, "read", holding)
        ckpt.restore(ddp(999))


def read_from_the_device(root: str, options: dict[str, Any]) -> int:
    """How many bytes the kernel says that a restore of 64 MiB has read for this rank."""
    def state(value: float) -> dict[str, Any]:
        model = nn.ParameterList([nn.Parameter(torch.full((4 << 20,), value + i)) for i in range(4)])
        return {"model": DistributedDataParallel(Holding(model))}

    with checkpointer(root, block_nbytes=1 << 18) as ckpt:
        ckpt.save(1, state(1.0))
    target = state(0.0)
    with checkpointer(root, block_nbytes=1 << 18, **options) as ckpt:
        if rank() == 0:
            page_cache.evict([root])
        dist.barrier()
        before = counted()
        ckpt.restore(target)
        after = counted()
    assert same(plain(target), plain(state(1.0)))
    return after - before


class Holding(nn.Module):
    def __init__(self, parts: nn.ParameterList) -> None:
        super().__init__()
        self.parts = parts


def counted() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def left_behind() -> tuple[list[str], int]:
    """Threads of ours, and descriptors of arenas."""
    threads = [one.name for one in threading.enumerate() if one.name.startswith("ckptengine-")]
    arenas = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            arenas += "ckptengine-arena" in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    return threads, arenas


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
