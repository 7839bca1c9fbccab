"""The training thread's side of a save: flatten, lay out, copy into the arena, hand over. No I/O, no
collective."""

from __future__ import annotations

import multiprocessing
import operator
import os
import time
from collections.abc import Mapping
from typing import Any

from ckptengine.adapters.c10d import ProcessGroup
from ckptengine.adapters.pinning import pin_arena
from ckptengine.adapters.stage import copy_items
from ckptengine.adapters.state import StateItem, flatten
from ckptengine.adapters.values import encode_value
from ckptengine.comm.transport import Transport
from ckptengine.errors import SaveFailedError
from ckptengine.format.layout import PAD_PREFIX, lay_out
from ckptengine.format.names import AttemptId
from ckptengine.format.shard import ShardHeader, TensorEntry, encode_header
from ckptengine.handle import SaveHandle
from ckptengine.info import SaveTimes
from ckptengine.monitor import Monitor, PendingSave, Run
from ckptengine.staging.arena import Arena, ArenaPool
from ckptengine.storage.store import Store
from ckptengine.write.messages import ArenaRef, WriteTask


class Saver:
    """Saves of one Checkpointer. `save` is called from the training thread, in the same order on every
    rank."""

    def __init__(
        self, run: Run, store: Store, transport: Transport, process_group: ProcessGroup | None
    ) -> None:
        self._run = run
        self._process_group = process_group
        config = run.config
        self._pool = ArenaPool(config.max_arenas, config.arena_budget_nbytes)
        self._monitor = Monitor(run, store, self._pool, transport)
        self._saves = 0
        self._handles: list[SaveHandle] = []
        self._serials: list[int] = []

    def save(self, step: int, state: Any, metadata: Mapping[str, Any] | None) -> SaveHandle:
        """Capture `state` and return once nothing that happens to it can change the checkpoint."""
        handle = SaveHandle(step, requested=time.time())
        # Counted before anything can fail, so that attempt ids stay the same on all ranks.
        self._saves += 1
        pending = PendingSave(
            handle=handle,
            attempt=AttemptId(self._run.run, self._saves),
            deadline=handle.times.requested + self._run.config.commit_timeout_s,
        )
        try:
            handle.step = operator.index(step)
            if not 0 <= handle.step < 1 << 63:
                raise ValueError(f"step must be in [0, 2^63), not {step!r}")
            earlier = self._earlier_failure()
            if earlier is not None:
                pending.repeats_earlier = True
                raise earlier
            if multiprocessing.current_process().daemon:
                raise SaveFailedError(
                    "a daemonic process may not have children, and a save needs its writer process",
                    hint="start the trainer's process with daemon=False",
                )
            self._monitor.start_writer()
            self._stage(pending, state, metadata)
        except BaseException as error:
            # The other ranks are under way: without a word from this one they would wait for their deadline.
            pending.refused = error
            if pending.arena is not None:
                self._pool.release(pending.arena)
                pending.arena = None
            self._monitor.add(pending)
            raise
        self._handles = [*(h for h in self._handles if not (h.done() and h._error is None)), handle]
        self._monitor.add(pending)
        return handle

    def raise_earlier_failure(self) -> None:
        """Raise the first failed save that nobody has asked about; with `on_error="warn"` it has been logged
        instead."""
        error = self._earlier_failure()
        if error is not None:
            raise error

    def _earlier_failure(self) -> BaseException | None:
        # Asked once: a save that ends right now must not fall between the two lists.
        ended = [h for h in self._handles if h.done()]
        self._handles = [h for h in self._handles if h not in ended]
        failed = [h for h in ended if h._error is not None and not h._observed]
        if not failed or self._run.config.on_error != "raise":
            return None
        failed[0]._observed = True
        return failed[0]._error

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no save is under way; False if `timeout_s` passes first."""
        return self._monitor.wait(timeout_s)

    @property
    def writer_pid(self) -> int | None:
        return self._monitor.writer_pid

    def close(self, timeout_s: float | None, reason: str) -> None:
        try:
            self._monitor.close(timeout_s, reason)
        except BaseException as error:
            # Interrupted in the wait, and with the writer left behind the process could not end.
            self._monitor.kill(f"{reason}, and that was cut short by {type(error).__name__}")
            raise
        self._pool.close()

    def _stage(self, pending: PendingSave, state: Any, metadata: Mapping[str, Any] | None) -> None:
        run, config, handle = self._run, self._run.config, pending.handle
        metadata_tree = encode_value(dict(metadata or {}), path="metadata", allow_pickle=False)
        flat = flatten(
            state,
            allow_pickle=config.allow_pickle,
            dedup_replicas=run.world_size > 1,
            process_group=self._process_group,
        )
        placed, data_nbytes = lay_out([(item.name, item.nbytes, item.alignment) for item in flat.items])
        spans = {name: (start, stop) for name, start, stop in placed}
        template = encode_header(
            ShardHeader(
                run=str(run.run),
                attempt=str(pending.attempt),
                step=handle.step,
                rank=run.rank,
                world_size=run.world_size,
                codec="raw" if config.codec == "raw" else "zstd",
                block_nbytes=config.block_nbytes,
                data_nbytes=data_nbytes,
                tensors=tuple(_entry(item, *spans[item.name]) for item in flat.items),
                views=tuple(flat.views),
                replicas=flat.replicas,
                tree=flat.tree,
            )
        )
        data_offset = template.nbytes
        arena = self._pool.acquire(data_offset + data_nbytes, config.commit_timeout_s)
        pending.arena = arena
        if any(item.on_cuda for item in flat.items):
            pin_arena(arena)
        payload = arena.payload
        payload[:data_offset] = template.data
        data = payload[data_offset : data_offset + data_nbytes]
        # The arena is reused: whatever a pad covers is another snapshot's bytes.
        for name, start, stop in placed:
            if name.startswith(PAD_PREFIX):
                data[start:stop] = bytes(stop - start)
        copy_items(flat.items, [spans[item.name][0] for item in flat.items], data)
        handle._times = SaveTimes(requested=handle.times.requested, staged=time.time())
        pending.rank_nbytes = flat.nbytes
        pending.task = WriteTask(
            root=run.root,
            step=handle.step,
            attempt=str(pending.attempt),
            rank=run.rank,
            world_size=run.world_size,
            arena=ArenaRef(pid=os.getpid(), fd=arena.fd, capacity=arena.capacity, serial=self._serial(arena)),
            live_arenas=tuple(self._serials),
            header_nbytes=template.nbytes,
            digests_at=template.digests_at,
            stored_at=template.stored_at,
            methods_at=template.methods_at,
            data_offset=data_offset,
            data_nbytes=data_nbytes,
            block_nbytes=config.block_nbytes,
            codec="raw" if config.codec == "raw" else "zstd",
            auto=config.codec == "auto",
            zstd_level=config.zstd_level,
            direct_io=config.direct_io,
            io_threads=config.io_threads,
            transport=run.spec,
            deadline_unix=pending.deadline,
            metadata=metadata_tree,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
        )

    def _serial(self, arena: Arena) -> int:
        """The memory's inode: a descriptor number is reused, this is not while anybody maps the memory."""
        serial = os.fstat(arena.fd).st_ino
        self._serials = [*(s for s in self._serials if s != serial), serial][-self._run.config.max_arenas :]
        return serial


def _entry(item: StateItem, start: int, stop: int) -> TensorEntry:
    return TensorEntry(
        name=item.name,
        dtype=item.dtype,
        shape=item.shape,
        start=start,
        stop=stop,
        chunk=item.chunk,
        stride=item.stride,
        placement=item.placement,
        kind=item.kind,
        descr=item.descr,
    )
