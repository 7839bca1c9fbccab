"""What runs on every rank of `test_overlap.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard

import ckptengine as ck
from ckptengine import snapshot
from ckptengine.adapters.stage import copy_items
from tests.adapters.sharded_cases import adamw, bare, fsdp1, fsdp2, local_state, model, paired, train
from tests.dist.cases import WRAPS as OF_CASES
from tests.dist.cases import checkpointer, rank
from tests.helpers.gates import IN_TIME_S, held_copies

BFLOAT16 = torch.bfloat16
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    **OF_CASES,
    "fsdp1, mixed precision": fsdp1(True, mixed_precision=MixedPrecision(param_dtype=BFLOAT16)),
    "fsdp1, flat, mixed precision": fsdp1(False, mixed_precision=MixedPrecision(param_dtype=BFLOAT16)),
    "fsdp2, mixed precision": lambda module: fully_shard(
        module, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16)
    ),
}
STATES = {"paired": paired, "bare": bare}


def training_goes_on_at_once(root: str, wrap: str, state: str) -> float:
    """Real steps race with copies that are half done; each checkpoint is the state at its call, bit for bit.
    Returns the seconds that steps waited."""
    make, of = WRAPS[wrap], STATES[state]
    module = make(model(1))
    optimizer = adamw(module)
    train(module, optimizer)
    expected, waited_s = {}, 0.0
    with checkpointer(root, snapshot="overlap") as ckpt:
        handles = []
        for step in range(3):
            expected[step] = local_state(module, optimizer)
            with held_copies(until_a_step_waits=True) as gate:
                handles.append(ckpt.async_save(step, of(module, optimizer)))
                train(module, optimizer, 1)
                assert gate.is_open
                train(module, optimizer, 2)
        for handle in handles:
            waited_s += handle.result().times.waited_s
        for step, wanted in expected.items():
            again = make(model(2))
            other = adamw(again)
            ckpt.restore(of(again, other), step=step)
            assert local_state(again, other) == wanted, step
    return waited_s


def a_change_on(changed: int, root: str, wrap: str) -> ck.SaveFailedError:
    """On rank `changed`, something else than a step writes to a parameter during the copy."""
    module = WRAPS[wrap](model(1))
    optimizer = adamw(module)
    train(module, optimizer)
    with checkpointer(root, snapshot="overlap", on_error="warn") as ckpt:
        ckpt.save(1, paired(module, optimizer))
        with held_copies() as gate:
            handle = ckpt.async_save(2, paired(module, optimizer))
            gate.wait_reached()
            if rank() == changed:
                with torch.no_grad():
                    next(p for p in module.parameters() if p.numel()).mul_(0.5)
            gate.open()
            with pytest.raises(ck.SaveFailedError) as caught:
                handle.result(IN_TIME_S)
        assert ckpt.latest == 1
        the_next_save_works(ckpt, wrap, module, optimizer)
    return caught.value


def the_next_save_works(
    ckpt: ck.Checkpointer, wrap: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    expected = local_state(module, optimizer)
    ckpt.save(3, paired(module, optimizer))
    again = WRAPS[wrap](model(2))
    other = adamw(again)
    assert ckpt.restore(paired(again, other)).step == 3
    assert local_state(again, other) == expected
    dist.barrier()


def a_copy_fails_on(failing: int, root: str, wrap: str) -> BaseException:
    """On rank `failing`, the copy in the call ends half way."""
    module = WRAPS[wrap](model(1))
    optimizer = adamw(module)
    train(module, optimizer)

    def half(items: Any, offsets: Any, payload: memoryview, **options: Any) -> None:
        n = len(items) // 2
        copy_items(items[:n], offsets[:n], payload)
        options["on_staged"](min(offsets[n:]))
        raise RuntimeError("the device is gone")

    with checkpointer(root, on_error="warn") as ckpt:
        ckpt.save(1, paired(module, optimizer))
        with pytest.MonkeyPatch.context() as patch, pytest.raises((RuntimeError, ck.SaveFailedError)) as caught:
            if rank() == failing:
                patch.setattr(snapshot, "copy_items", half)
            ckpt.save(2, paired(module, optimizer))
        ckpt.wait(IN_TIME_S)
        assert ckpt.latest == 1
        the_next_save_works(ckpt, wrap, module, optimizer)
    return caught.value
