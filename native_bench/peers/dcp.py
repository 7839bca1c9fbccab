"""torch.distributed.checkpoint: all ranks save into one directory, in place on restore."""

from __future__ import annotations

import time
from typing import Any

from native_bench.peers.base import Place, SaveSeconds, Sync, Tensors, Traits, share_by_name


class Dcp1(Sync):
    traits = Traits(
        name="dcp-1",
        title="DCP, `thread_count=1`",
        how="`dcp.save` with `FileSystemWriter(thread_count=1)`; `dcp.load`",
        fsyncs=True,
    )
    threads = 1

    def write(self, directory: str, step: int, state: Tensors) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(directory, thread_count=self.threads)
        dcp.save(state, storage_writer=writer)

    def restore(self, directory: str, target: Tensors) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(target, storage_reader=dcp.FileSystemReader(directory))


class Dcp2(Dcp1):
    traits = Traits(
        name="dcp-2",
        title="DCP, `thread_count=2`",
        how="`dcp.save` with `FileSystemWriter(thread_count=2)`; `dcp.load`",
        fsyncs=True,
    )
    threads = 2


class AsyncThread(Dcp1):
    """The snapshot goes into fresh memory for each save, as `async_save` does it by default."""

    traits = Traits(
        name="dcp-async-thread",
        title="DCP `async_save`, thread",
        how="`dcp.async_save`, `thread_count=2`, default stager",
        fsyncs=True,
        group=True,
        restores_like="dcp-1",
    )
    threads = 2
    process = False

    def save(self, directory: str, step: int, state: Tensors) -> SaveSeconds:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        writer = dcp.FileSystemWriter(directory, thread_count=self.threads)
        kind = AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD
        start = time.perf_counter()
        response: Any = dcp.async_save(
            state,
            storage_writer=writer,
            async_checkpointer_type=kind,
            **self.options(),
        )
        if hasattr(response, "staging_completion"):
            response.staging_completion.result()
        stall_s = time.perf_counter() - start
        getattr(response, "upload_completion", response).result()
        return SaveSeconds(stall_s, time.perf_counter() - start)

    def options(self) -> dict[str, Any]:
        return {}


class AsyncProcess(AsyncThread):
    traits = Traits(
        name="dcp-async-process",
        title="DCP `async_save`, process",
        how="`dcp.async_save(async_checkpointer_type=PROCESS)`, `thread_count=2`, default stager",
        fsyncs=True,
        group=True,
        restores_like="dcp-1",
        fresh=True,
    )
    process = True

    def open(self, place: Place) -> None:
        super().open(place)
        share_by_name(len(place.fresh_state()))


class AsyncStager(AsyncThread):
    """A stager kept for the job reuses its memory: the fastest way DCP has to take a snapshot on the CPU."""

    traits = Traits(
        name="dcp-async-stager",
        title="DCP `async_save`, kept `DefaultStager`",
        how="`dcp.async_save`, thread, `thread_count=2`, one `DefaultStager` (shared memory; by name, "
        "where that many descriptors are not allowed) for all saves",
        fsyncs=True,
        fresh=True,
        group=True,
        restores_like="dcp-1",
    )

    def missing(self) -> str | None:
        try:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: F401
        except ImportError:
            return "this torch has no DefaultStager"
        return None

    def open(self, place: Place) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().open(place)
        share_by_name(len(place.fresh_state()))
        # Pinned memory, background staging and non-blocking copies need an accelerator.
        self._stager = DefaultStager(StagingOptions(False, True, False, False))

    def options(self) -> dict[str, Any]:
        return {"async_stager": self._stager}

    def close(self) -> None:
        self._stager.close()
