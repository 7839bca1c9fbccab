"""What runs on every rank of `test_agreement.py`."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptengine as ck
from ckptengine.adapters.restore import RestoreTarget
from ckptengine.format.names import shard_filename, step_dirname
from ckptengine.read.reader import ShardReader
from tests.dist.cases import checkpointer, rank
from tests.helpers.ranks import wait_until

BEHIND_HEADERS = 1 << 16

Raised = tuple[str, str, int | None]


class Hooked:
    """An object whose hooks do what a test says."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.on_take: Callable[[], object] = lambda: None
        self.on_load: Callable[[], object] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        self.on_take()
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.on_load()
        self.value = state["value"]


def target(value: int = 0) -> dict[str, Any]:
    return {"hooked": Hooked(value), "model": nn.Linear(4, 4), "mine": torch.full((3,), float(value))}


def save(root: str) -> None:
    with checkpointer(root) as ckpt:
        ckpt.save(1, target(7))


def raised(work: Callable[[], object]) -> Raised:
    try:
        work()
    except BaseException as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)
    raise AssertionError("nothing was raised")


def restores_again(ckpt: ck.Checkpointer) -> None:
    """All ranks are still at the same call."""
    state = target()
    assert ckpt.restore(state).step == 1
    assert (state["hooked"].value, state["mine"].tolist()) == (7, [7.0] * 3)


def restore_differently(root: str, options: list[dict[str, Any]]) -> Raised:
    """By rank; then all the same."""
    state = target()
    with checkpointer(root) as ckpt:
        error = raised(lambda: ckpt.restore(state, **options[rank()]))
        assert (state["hooked"].value, state["mine"].tolist()) == (0, [0.0] * 3)
        restores_again(ckpt)
    return error


def restore_own_parts(root: str) -> tuple[Any, ...]:
    """As stages of a pipeline do: each has its own names, and takes its own part."""
    with checkpointer(root) as ckpt:
        ckpt.save(1, {"stage": [{"w": torch.full((2,), float(rank()))}], f"only {rank()}": rank(), "step": 1})
        stage, own = torch.zeros(2), f"only {rank()}"
        state = {"layers": stage, own: -1, "step": -1}
        names = {"layers": "stage.0.w"} if rank() else {"layers": "stage.0.w", "nothing": "else"}
        info = ckpt.restore(state, include=["layers", own], exclude=f"step{rank()}", rename=names)
    return stage.tolist(), state[own], state["step"], info.step


def open_differently(root: str, configs: list[dict[str, Any]]) -> None:
    checkpointer(root, **configs[rank()]).close()


def leave(root: str, victim: int, hook: str, kind: type[BaseException], streaming: bool) -> Raised:
    """A hook of `victim`'s object ends its restore; nobody else waits, and then all restore together."""
    state = target()

    def end() -> None:
        raise kind(4)

    if rank() == victim:
        setattr(state["hooked"], hook, end)

    def work() -> None:
        done = ckpt.restore(state, streaming=streaming)
        if streaming:
            done.result()

    with checkpointer(root) as ckpt:
        error = raised(work)
        restores_again(ckpt)
    return error


def leave_at_the_end_of_a_stream(root: str, victim: int) -> Raised:
    """An optimizer loads its state only then."""

    def state(steps: int) -> tuple[dict[str, Any], torch.optim.Optimizer]:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}, optimizer

    def end(_: object) -> None:
        raise SystemExit(4)

    with checkpointer(root) as ckpt:
        ckpt.save(1, state(1)[0])
        mine, optimizer = state(0)
        if rank() == victim:
            optimizer.load_state_dict = end  # type: ignore[method-assign]
        error = raised(lambda: ckpt.restore(mine, streaming=True).result())
        assert ckpt.restore(state(0)[0]).step == 1
    return error


def interrupted_in_a_wait(root: str, victim: int) -> Raised:
    """A signal ends the victim's restore while it waits for the other rank, which is at work until then."""
    state, ended = target(), Path(f"{root}.ended")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if rank() != victim:
        state["hooked"].on_take = lambda: wait_until(ended.exists)
    with checkpointer(root) as ckpt:
        ckpt.restore(target())
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            if rank() == victim:
                signal.setitimer(signal.ITIMER_REAL, 0.4)
            error = raised(lambda: ckpt.restore(state))
        finally:
            if rank() == victim:
                ended.touch()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        restores_again(ckpt)
    return error


def killed_in(method: str, root: str, victim: int, streaming: bool) -> Raised:
    """Of the ranks that restore what all need, one is killed when it comes to a method. Deadlines pass long
    after the test's own."""

    def die(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    exchange = "on" if method == "are_cached" else "off"
    ckpt = checkpointer(root, agree_timeout_s=600.0, restore_timeout_s=600.0, exchange=exchange)
    state = replicated(9.0)
    with pytest.MonkeyPatch.context() as patch:
        if rank() == victim:
            patch.setattr(RestoreTarget if method == "match" else ShardReader, method, die)
        error = raised(lambda: in_full(ckpt.restore(state, streaming=streaming)))  # type: ignore[call-overload]
    with contextlib.suppress(ck.CheckpointError, ConnectionError):
        ckpt._close(1.0, "the test is over")
    return error


def replicated(value: float) -> dict[str, Any]:
    return {"model": DistributedDataParallel(nn.Linear(30, 900)), "value": value}


def save_replicated(root: str) -> None:
    with checkpointer(root) as ckpt:
        ckpt.save(1, replicated(1.0))


def in_full(restored: Any) -> Any:
    return restored.result() if isinstance(restored, ck.RestoreHandle) else restored


def fall_back_where_one_rank_cannot_read(root: str, options: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Rank 1 gets an I/O error from rank 0's shard of step 2, which itself is whole."""

    def state(value: float) -> dict[str, Any]:
        module = nn.ParameterList([nn.Parameter(torch.full((9000,), value)) for _ in range(8)])
        return {"model": DistributedDataParallel(_Holding(module))}

    preadv = os.preadv
    shard = shard_filename(0, compressed=False)

    def refuse(fd: int, outs: Any, offset: int, *flags: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if step_dirname(2) in path and path.endswith(shard) and offset >= BEHIND_HEADERS:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, outs, offset, *flags)

    with pytest.MonkeyPatch.context() as patch, checkpointer(root, **options) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(float(step)))
        if rank() == 1:
            patch.setattr(os, "preadv", refuse)
        info = ckpt.restore(state(0.0))
    return [(one.step, one.rank, one.met_by, one.reason) for one in info.fell_back_from]


class _Holding(nn.Module):
    def __init__(self, parts: nn.ParameterList) -> None:
        super().__init__()
        self.parts = parts
