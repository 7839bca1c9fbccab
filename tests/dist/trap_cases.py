"""What runs on the ranks of `test_traps.py`. A Checkpointer stays open from call to call, so that the test
can harm its writers in between."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

import ckptengine as ck
from ckptengine import checkpointer as checkpointer_module
from ckptengine import monitor
from ckptengine.adapters import worker
from ckptengine.adapters.nvrx import WriterProcess
from ckptengine.write.messages import SaveStatus
from tests.adapters.fake import same
from tests.adapters.sharded_cases import fsdp1, model
from tests.dist.cases import checkpointer, rank, state_of, target_of
from tests.helpers import writer_functions
from tests.helpers.ranks import kept

# Compressing at this level takes about a second per few megabytes: long enough to be in the middle of it.
SLOW = {"codec": "zstd", "zstd_level": 19, "block_nbytes": 1 << 18, "io_threads": 1}
SLOW_VALUES = 250_000


def open_kept(root: str, options: dict[str, Any] | None = None) -> None:
    kept["ckpt"] = checkpointer(root, **(options or {}))
    kept["handles"] = {}


def close_kept() -> None:
    kept.pop("ckpt").close()


def begin(step: int, values: int = 3000) -> None:
    """`async_save`, then change the state at once."""
    state = state_of(step, rank(), values=values)
    kept["handles"][step] = kept["ckpt"].async_save(step, state)
    for tensor in state["weights"]:
        tensor.fill_(-1)
    state["array"][:] = -1


def begin_and_stop(step: int) -> None:
    """A save whose writer stops itself in the middle of it, until it is sent SIGCONT."""
    has_it = threading.Event()

    def give(writer: WriterProcess, task: bytes) -> None:
        writer._schedule(writer_functions.stop_once_in_the_middle, bytes(task))
        has_it.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriterProcess, "async_save", give)
        begin(step)
        assert has_it.wait(30)


def finish(step: int) -> ck.CommitInfo:
    return kept["handles"].pop(step).result()  # type: ignore[no-any-return]


def save(step: int) -> ck.CommitInfo:
    begin(step)
    return finish(step)


def writer_pid() -> int:
    return kept["ckpt"].writer_pid  # type: ignore[no-any-return]


def steps() -> list[int]:
    return kept["ckpt"].steps()  # type: ignore[no-any-return]


def restore(values: int = 3000) -> ck.RestoreInfo:
    """The newest step is what was captured for it."""
    target = target_of(rank(), values=values)
    info = kept["ckpt"].restore(target)
    assert same(target, state_of(info.step, rank(), values=values))
    return info  # type: ignore[no-any-return]


def save_what_cannot_be_saved_on(bad: int, step: int) -> None:
    """Rank `bad` has a function in its state. Raises on each rank what that rank is told."""
    state = state_of(step, rank())
    if rank() == bad:
        state["note"][1] = {"made by": lambda: None}
    kept["ckpt"].async_save(step, state).result()


def save_unobserved(bad: int, step: int) -> type[BaseException] | None:
    """Like `save_what_cannot_be_saved_on`, by a training loop that never asks its handles."""
    try:
        state = state_of(step, rank())
        if rank() == bad:
            state["note"][1] = {"made by": lambda: None}
        kept["ckpt"].async_save(step, state)
    except ck.CheckpointError as error:
        return type(error)
    finally:
        with contextlib.suppress(ck.CheckpointError):
            # Else what follows depends on how fast the other rank is.
            kept["ckpt"]._saver.wait(30)
    return None


def save_at(step: Any) -> ck.CommitInfo:
    return kept["ckpt"].save(step, state_of(1, rank()))  # type: ignore[no-any-return]


def restore_at(steps_by_rank: list[Any]) -> ck.RestoreInfo:
    return kept["ckpt"].restore(target_of(rank()), step=steps_by_rank[rank()])  # type: ignore[no-any-return]


def save_at_own_step(base: int) -> ck.CommitInfo:
    return save_at(base + rank())


def save_values(step: int, values_by_rank: list[int]) -> ck.CommitInfo:
    """With states of different sizes."""
    return kept["ckpt"].save(step, state_of(step, rank(), values=values_by_rank[rank()]))  # type: ignore[no-any-return]


def save_with_a_writer_that_dies_when_it_has_published(root: str) -> ck.CommitInfo:
    """The coordinator's; the others' are as always."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "WriterProcess", WriterProcess)
        if rank() == 0:
            patch.setattr(worker, "run", writer_functions.publish_and_die)
        with checkpointer(root) as ckpt:
            info = ckpt.save(1, state_of(1, rank()))
            patch.undo()
            assert ckpt.save(2, state_of(2, rank())).step == 2
    return info


def save_with_a_writer_that_stops_when_it_waits_for_the_outcome(root: str) -> ck.CommitInfo:
    """Rank 1's; the coordinator's is as always."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "WriterProcess", WriterProcess)
        if rank() == 1:
            patch.setattr(worker, "run", writer_functions.stop_when_it_waits_for_the_outcome)
        with checkpointer(root, stall_timeout_s=3.0) as ckpt:
            info = ckpt.save(1, state_of(1, rank()))
            patch.undo()
            assert ckpt.save(2, state_of(2, rank())).step == 2
    return info


def reached(step: int) -> str:
    """The newest word of the writer."""
    pending = kept["ckpt"]._saver._monitor._pending[0]
    assert pending.handle.step == step
    page = pending.staging.arena.status.read() if pending.staging.arena is not None else None
    return "" if page is None else str(msgspec.msgpack.decode(page, type=SaveStatus).state)


def leave_with_an_error(root: str, options: dict[str, Any], values: int) -> None:
    """Rank 1 leaves its `with` by an exception while a save is under way."""
    with checkpointer(root, **options) as ckpt:
        handle = ckpt.async_save(1, state_of(1, rank(), values=values))
        if rank() == 1:
            raise ZeroDivisionError
        handle.result()


def leave_before_the_others_save(step: int) -> None:
    """Leave by an exception with a save under way that the other ranks have not begun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer_module, "ABNORMAL_CLOSE_TIMEOUT_S", 0.5)
        with kept.pop("ckpt") as ckpt:
            ckpt.async_save(step, state_of(step, rank()))
            raise ZeroDivisionError


# --- NVRx as it comes ----------------------------------------------------------------------------


@contextlib.contextmanager
def stock() -> Iterator[TorchAsyncCheckpoint]:
    """TorchAsyncCheckpoint, with what it demands of CUDA out of the way, and ended by force."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda *args: None)
        queue = None
        try:
            checkpoint = TorchAsyncCheckpoint()
            queue = checkpoint._async_calls_queue
            yield checkpoint
        finally:
            if queue is not None:
                end(queue)


def end(queue: Any) -> None:
    caller = queue._get_async_caller()
    if caller.process is not None:
        caller.process.kill()
        caller.process.join()
        caller.process = None
    queue.async_calls.clear()
    for pipe in (caller.queue, caller.preload_q, caller.comp_q):
        pipe.cancel_join_thread()
        pipe.close()


def stock_with_a_sharded_tensor(directory: str) -> int | None:
    """The exit code of NVRx's worker after it was given what FSDP1's LOCAL_STATE_DICT holds."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    module = fsdp1(True)(model(1))
    with FSDP.state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
        state = module.state_dict()
    if rank() == 1:
        return None
    with stock() as checkpoint:
        checkpoint.async_save(state, f"{directory}/stock.pt")
        process = checkpoint._async_calls_queue._get_async_caller().process
        process.join(60)
        return process.exitcode  # type: ignore[no-any-return]


def stock_with_one_dead_writer(directory: str) -> tuple[bool, bool]:
    """Rank 1's worker is killed before it has written. Does finalize end, and is the file there?"""
    path = Path(directory, f"stock-{rank()}.pt")
    with stock() as checkpoint:
        checkpoint.async_save({"w": torch.ones(3)}, path)
        if rank() == 1:
            process = checkpoint._async_calls_queue._get_async_caller().process
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        waiter = threading.Thread(
            target=checkpoint.finalize_async_save, kwargs={"blocking": True}, daemon=True
        )
        waiter.start()
        waiter.join(20 if rank() == 0 else 2)
        ended = not waiter.is_alive()
        if not ended:
            # Let the thread go, with what it polls for.
            checkpoint._async_calls_queue._get_async_caller().cur_item = 0
            waiter.join(20)
    dist.barrier()
    return ended, path.exists()
