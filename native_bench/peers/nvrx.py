"""NVRx's own asynchronous savers, used as its examples do."""

from __future__ import annotations

import os
import time
from typing import Any

from native_bench.peers.base import (
    Place,
    SaveSeconds,
    Sync,
    Tensors,
    Traits,
    not_importable,
    share_by_name,
)
from native_bench.peers.dcp import Dcp1
from native_bench.peers.torch_save import TorchSave


def _tolerate_no_gpu() -> None:
    """NVRx synchronises with the GPU wherever it saves; without one there is nothing to wait for."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None


class TorchAsync(TorchSave):
    """Its worker process gets the tensors through shared memory: a thread moves each there *after* the call
    returned.

    Each save is given new tensor objects, as a GPU's state dict copied to the host would be: those given
    would otherwise lie in shared memory from the first save on, and no later save would copy anything at all.
    """

    traits = Traits(
        name="nvrx",
        title="NVRx `TorchAsyncCheckpoint`",
        how="`async_save` (persistent worker) with `torch.save`, one file per rank, then "
        "`finalize_async_save`; `torch.load`; shares memory by name where that many descriptors are not "
        "allowed",
        copies=False,
        group=True,
        restores_like="torch",
        fresh=True,
    )

    def missing(self) -> str | None:
        return not_importable("nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt")

    def open(self, place: Place) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        super().open(place)
        share_by_name(len(place.fresh_state()))
        _tolerate_no_gpu()
        self._checkpoint = TorchAsyncCheckpoint()

    def save(self, directory: str, step: int, state: Tensors) -> SaveSeconds:
        fresh = self.place.fresh_state()
        path = self.own_file(directory, ".pt")
        start = time.perf_counter()
        self._checkpoint.async_save(fresh, path)
        stall_s = time.perf_counter() - start
        self._checkpoint.finalize_async_save(blocking=True, no_dist=True)
        seconds = time.perf_counter() - start
        if not os.path.exists(path):
            raise RuntimeError("finalize_async_save returned, but there is no file")
        return SaveSeconds(stall_s, seconds)

    def close(self) -> None:
        self._checkpoint.finalize_async_save(blocking=True, no_dist=True)
        caller = self._checkpoint._async_calls_queue.persistent_caller
        if caller is not None:
            caller.close()


class WriterAsync(Sync):
    traits = Traits(
        name="nvrx-writer",
        title="NVRx `FileSystemWriterAsync`",
        how=(
            "`save_state_dict_async_plan`, `AsyncCallsQueue` (a forked process per save), "
            "`thread_count=2`; `dcp.load`"
        ),
        fsyncs=True,
        copies=False,
        group=True,
        restores_like="dcp-1",
    )

    def missing(self) -> str | None:
        return not_importable("nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async")

    def open(self, place: Place) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        super().open(place)
        _tolerate_no_gpu()
        self._queue = AsyncCallsQueue(persistent=False)

    def save(self, directory: str, step: int, state: Tensors) -> SaveSeconds:
        import torch.distributed as dist
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
            save_state_dict_async_finalize,
            save_state_dict_async_plan,
        )
        from torch.distributed.checkpoint import DefaultSavePlanner

        start = time.perf_counter()
        writer = FileSystemWriterAsync(directory, thread_count=2)
        planned: Any = save_state_dict_async_plan(state, writer, None, 0, planner=DefaultSavePlanner())
        save, preload, arguments = writer.get_save_function_and_args()

        def finish() -> None:
            save_state_dict_async_finalize(*planned)
            dist.barrier()

        self._queue.schedule_async_request(AsyncRequest(save, arguments, [finish], preload_fn=preload))
        stall_s = time.perf_counter() - start
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        return SaveSeconds(stall_s, time.perf_counter() - start)

    restore = Dcp1.restore

    def close(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
