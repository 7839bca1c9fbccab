"""What runs on every rank of `test_streaming.py`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard

import ckptengine as ck
from ckptengine.format.shard import decode_header
from tests.adapters.sharded_cases import Block, adamw, bare, fsdp1, local_state, model, paired, train
from tests.dist.cases import WRAPS as OF_CASES
from tests.dist.cases import checkpointer, rank
from tests.helpers.checkpoints import flip, read_manifest
from tests.helpers.held_blocks import IN_TIME_S, held_blocks

BFLOAT16 = torch.bfloat16
WRAPS = {
    **OF_CASES,
    "fsdp1, mixed precision": fsdp1(True, mixed_precision=MixedPrecision(param_dtype=BFLOAT16)),
    "fsdp1, prefetch": fsdp1(True, forward_prefetch=True),
    "fsdp2, mixed precision": lambda module: fully_shard(
        module, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16)
    ),
}
STATES = {"paired": paired, "bare": bare}


class Wide(Block):
    """Of several blocks of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 900)
        self.b = nn.Linear(900, 5)


def wide(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Wide(), Wide(), nn.Linear(5, 3))


def saved(
    root: str, wrap: str, state: str, make: Callable[[int], nn.Module] = model, steps: tuple[int, ...] = (1, 2)
) -> tuple[nn.Module, Any]:
    """A job that has saved at each of the steps, and is at the last one."""
    module = WRAPS[wrap](make(1))
    optimizer = adamw(module)
    with checkpointer(root) as ckpt:
        for step in steps:
            train(module, optimizer, 1)
            ckpt.save(step, STATES[state](module, optimizer))
    return module, optimizer


def job(
    wrap: str, make: Callable[[int], nn.Module] = model
) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = WRAPS[wrap](make(2))
    return module, adamw(module)


def training_goes_on_as_after_a_full_restore(root: str, wrap: str, state: str) -> None:
    module, optimizer = saved(root, wrap, state)
    wanted = [train(module, optimizer, 1) for _ in range(3)]
    expected = local_state(module, optimizer)
    again, other = job(wrap)
    with checkpointer(root) as ckpt:
        for _ in range(2):  # the second time into an optimizer that has a state, and a module that has run
            handle = ckpt.restore(STATES[state](again, other), streaming=True)
            assert [train(again, other, 1) for _ in range(3)] == wanted
            assert local_state(again, other) == expected
            info = handle.result()
            assert info.step == 2
            assert info.rank == rank()
            assert not any(one._forward_pre_hooks for one in plain_modules(again))
    blocks = [one for one in again.modules() if isinstance(one, Block)]
    assert [block.note for block in blocks] == ["made with 1"] * 2
    dist.barrier()


def plain_modules(module: nn.Module) -> list[nn.Module]:
    """Those to which FSDP has no hooks of its own."""
    return [one for one in module.modules() if not type(one).__name__.startswith("FSDP")]


def buffers_are_there_when_the_call_returns(root: str) -> None:
    """DDP sends them to all ranks before the module inside, which alone is in the state, begins."""
    module, optimizer = WRAPS["ddp"](wide(1)), None
    again = WRAPS["ddp"](wide(2))
    for block in module.module[:2]:
        block.seen.fill_(7.0)
    with checkpointer(root) as ckpt, held_blocks("model.1.b") as gate:
        ckpt.save(1, {"model": module.module, "optimizer": optimizer})
        handle = ckpt.restore({"model": again.module, "optimizer": optimizer}, streaming=True)
        assert [block.seen.tolist() for block in again.module[:2]] == [[7.0] * 3] * 2
        assert not handle.done()
        gate.open()
        x = torch.ones(1, 5)
        assert torch.equal(again(x), module(x))
    dist.barrier()


def a_forward_needs_no_optimizer(root: str, wrap: str) -> None:
    """Forward and backward are done before a byte of the optimizer's state is read, and the step waits."""
    saved(root, wrap, "paired", wide)
    again, other = job(wrap, wide)
    with checkpointer(root, io_threads=2) as ckpt, held_blocks(late_block(root, wrap)) as gate:
        handle = ckpt.restore(paired(again, other), streaming=True)
        torch.manual_seed(rank())
        other.zero_grad()
        again(torch.randn(4, 5)).square().sum().backward()
        assert not handle.done()
        assert not other.state
        threading.Timer(0.1, gate.open).start()
        other.step()
        assert other.state
        handle.result()
    dist.barrier()


def late_block(root: str, wrap: str) -> str:
    """A tensor of the optimizer's state in a block that holds none of the model."""
    header = header_of(root, 2, rank())
    model_end = max(entry.stop for entry in header.tensors if ".model." in entry.name)
    first = -(-model_end // header.block_nbytes) * header.block_nbytes
    return next((one.name for one in header.tensors if one.start >= first), header.tensors[-1].name)


def header_of(root: str, step: int, of_rank: int) -> Any:
    (path,) = Path(root).glob(f"step-{step:010d}/*/shard-{of_rank:05d}.safetensors")
    ref = read_manifest(path.parents[1]).shards[of_rank]
    return decode_header(path.read_bytes()[: ref.header_nbytes], path=str(path))


def damaged(root: str, of_rank: int, name: str) -> None:
    """Flip a bit of a tensor in one rank's shard of step 2."""
    if rank() == of_rank:
        header = header_of(root, 2, of_rank)
        entry = next(one for one in header.tensors if name in one.name and one.stop > one.start)
        (path,) = Path(root).glob(f"step-0000000002/*/shard-{of_rank:05d}.safetensors")
        flip(path, header.header_nbytes + entry.start)
    dist.barrier()


def damage_is_heard_of_everywhere(root: str, wrap: str, name: str) -> ck.CheckpointError:
    """In rank 1's shard; both ranks raise it, and restore the step before together."""
    saved(root, wrap, "paired", wide)
    damaged(root, 1, name)
    again, other = job(wrap, wide)
    with checkpointer(root) as ckpt:
        handle = ckpt.restore(paired(again, other), streaming=True)
        with pytest.raises(ck.CheckpointError) as caught:
            handle.result(IN_TIME_S)
        with pytest.raises(ck.CheckpointError):
            other.step()
        info = ckpt.restore(paired(again, other))
        assert info.step == 1
        train(again, other, 1)
        ckpt.save(3, paired(again, other))
    return caught.value


def a_failed_apply_is_everybodys(root: str) -> ck.CheckpointError:
    """One rank's optimizer does not take its state."""
    saved(root, "fsdp2", "bare")
    again, other = job("fsdp2")

    def refuse(state: Any) -> None:
        raise RuntimeError("not this one")

    with checkpointer(root) as ckpt:
        handle = ckpt.restore(bare(again, other), streaming=True)
        if rank() == 1:
            other.load_state_dict = refuse  # type: ignore[method-assign]
        with pytest.raises(ck.CheckpointError, match="not this one") as caught:
            handle.result(IN_TIME_S)
        if rank() == 1:
            del other.load_state_dict
        assert ckpt.restore(bare(again, other)).step == 2
        train(again, other, 1)
    dist.barrier()
    assert (type(caught.value.__cause__) is RuntimeError) == (rank() == 1)
    return caught.value


def a_killed_rank_is_named(root: str, victim: int) -> ck.CheckpointError:
    """It dies while it reads; the other raises long before a deadline."""
    saved(root, "ddp", "paired", wide)
    again, other = job("ddp", wide)
    ckpt = checkpointer(root, restore_timeout_s=600.0, agree_timeout_s=600.0)
    with held_blocks(*([late_block(root, "ddp")] if rank() == victim else [])):
        handle = ckpt.restore(paired(again, other), streaming=True)
        dist.barrier()
        if rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ck.CheckpointError) as caught:
            handle.result()
    handle._abandon()
    assert not [one for one in threading.enumerate() if one.name.startswith("ckptengine-stream")]
    # Closing may find that the store is gone.
    with contextlib.suppress(ck.CheckpointError, ConnectionError):
        ckpt.close()
    return caught.value
