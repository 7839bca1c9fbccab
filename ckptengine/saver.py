"""The trainer's side of a save: flatten, lay out, hand over and copy, in the call or in a thread behind the
training. No I/O, no collective."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ckptengine.adapters.c10d import ProcessGroup
from ckptengine.adapters.collector import gc_paused
from ckptengine.adapters.guard import Guard, captured, watch_steps
from ckptengine.adapters.pinning import queued_now
from ckptengine.adapters.state import StateItem, flatten
from ckptengine.adapters.values import encode_value
from ckptengine.comm.transport import Transport
from ckptengine.errors import CommitTimeoutError, SaveFailedError
from ckptengine.format.names import AttemptId, check_step
from ckptengine.handle import SaveHandle
from ckptengine.monitor import Monitor, PendingSave
from ckptengine.run import Run
from ckptengine.snapshot import Behind, Snapshot, Staging, plan_snapshot
from ckptengine.staging.arena import Arena
from ckptengine.staging.pool import ArenaPool
from ckptengine.storage.store import Store
from ckptengine.tracing.recorder import span
from ckptengine.write.messages import ArenaRef, WriteTask
from ckptengine.write.reserve import ranks_here

EARLY_NBYTES = 32 << 20
"""What an overlapping save copies in its call goes to memory of its own up to this; more goes to the arena at
once."""


class Saver:
    """Saves of one Checkpointer. `save` is called from the training thread, in the same order on every
    rank."""

    def __init__(
        self, run: Run, store: Store, transport: Transport, process_group: ProcessGroup | None
    ) -> None:
        self._run = run
        self._process_group = process_group
        config = run.config
        self._pool = ArenaPool(
            config.max_arenas,
            config.arena_budget_nbytes,
            lambda: self._monitor.needed_nbytes() * ranks_here(),
        )
        self._monitor = Monitor(run, store, self._pool, transport)
        self._saves = 0
        self._handles: list[SaveHandle] = []
        self._serials: list[int] = []
        self._staging: Staging | None = None
        self._unwatch = watch_steps() if config.snapshot == "overlap" else None
        self._behind = Behind() if config.snapshot == "overlap" else None

    def save(
        self, step: int, state: Any, metadata: Mapping[str, Any] | None, *, at_once: bool = False
    ) -> SaveHandle:
        """Capture `state` and return once nothing that happens to it can change the checkpoint.

        at_once: write what is copied while the rest is being copied, though both take longer for it.
        """
        handle = SaveHandle(step, requested=time.time())
        # Counted before anything can fail, so that attempt ids stay the same on all ranks.
        self._saves += 1
        pending = PendingSave(
            handle=handle,
            attempt=AttemptId(self._run.run, self._saves),
            deadline=time.monotonic() + self._run.config.commit_timeout_s,
        )
        try:
            handle.step = check_step(step)
            earlier = self._earlier_failure()
            if earlier is not None:
                pending.repeats_earlier = True
                raise earlier
            if multiprocessing.current_process().daemon:
                raise SaveFailedError(
                    "a daemonic process may not have children, and a save needs its writer process",
                    hint="start the trainer's process with daemon=False",
                )
            if self._run.config.snapshot == "copy":
                self._monitor.start_writer()
            self._await_last_copy()
            self._stage(pending, state, metadata, at_once)
        except BaseException as error:
            # The other ranks are under way: without a word from this one they would wait for their deadline.
            if pending.staging is None:
                pending.refused = error
                self._monitor.add(pending)
            else:
                pending.staging.cancel(
                    SaveFailedError(
                        f"step {step}: the call was ended by {type(error).__name__}", rank=self._run.rank
                    )
                )
            raise
        self._handles = [*(h for h in self._handles if not (h.done() and h._error is None)), handle]
        # More exact than what was noted before the commit could come.
        handle._note(returned=time.time())
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
        finally:
            if self._unwatch is not None:
                self._unwatch()
                self._unwatch = None
            if self._behind is not None:
                self._behind.close()
        self._pool.close()

    def _stage(
        self, pending: PendingSave, state: Any, metadata: Mapping[str, Any] | None, at_once: bool
    ) -> None:
        run, config = self._run, self._run.config
        metadata_tree = encode_value(dict(metadata or {}), path="metadata", allow_pickle=False)
        with span("flatten", "cpu"):
            flat = flatten(
                state,
                allow_pickle=config.allow_pickle,
                dedup_replicas=run.world_size > 1,
                process_group=self._process_group,
            )
        with span("lay out", "cpu"):
            snapshot = plan_snapshot(
                flat,
                attempt=pending.attempt,
                step=pending.handle.step,
                rank=run.rank,
                world_size=run.world_size,
                config=config,
            )
        pending.rank_nbytes = flat.nbytes
        if self._behind is not None:
            self._copy_behind(self._behind, pending, snapshot, metadata_tree)
            return
        with gc_paused(), span("encode header", "cpu"):
            _ = snapshot.template  # encoded now
        staging = Staging(run.rank)

        def copy(arena: Arena) -> None:
            snapshot.copy(flat.items, arena, arena.mark.reach)
            now = time.time()
            pending.handle._note(staged=now, returned=now)

        self._hand_over(pending, staging)
        staging.run(lambda: self._fill(staging, pending, snapshot, None, metadata_tree, copy, early=at_once))

    def _hand_over(self, pending: PendingSave, staging: Staging) -> None:
        """From here on the monitor brings the save to its end, however the copy ends."""
        pending.staging = staging
        self._monitor.add(pending)

    def _fill(
        self,
        staging: Staging,
        pending: PendingSave,
        snapshot: Snapshot,
        arena: Arena | None,
        metadata_tree: Any,
        copy: Callable[[Arena], None],
        *,
        early: bool,
    ) -> None:
        """Copy the state into the arena, which is acquired if there is none. The writer may start before
        (`early`), or when all is copied; from then on the monitor gives the arena back."""
        try:
            self._monitor.start_writer()
            if arena is None:
                with span("get arena", "wait", {"wanted": snapshot.nbytes}):
                    arena = self._pool.acquire(snapshot.nbytes, max(pending.deadline - time.monotonic(), 0.0))
                snapshot.begin(arena)
            task = self._task(pending, snapshot, arena, metadata_tree)
            if not early:
                copy(arena)
            staging.begin(arena, task)
        except BaseException:
            if arena is not None and staging.task is None:
                self._pool.release(arena)
            raise
        if early:
            copy(arena)

    def _copy_behind(
        self, behind: Behind, pending: PendingSave, snapshot: Snapshot, metadata_tree: Any
    ) -> None:
        """Copy now what may change at any time, and let a thread copy the rest, guarded against steps."""
        handle = pending.handle
        guard = Guard(
            snapshot.flat.items,
            snapshot.flat.optimizers,
            on_wait=lambda seconds: handle._note(waited_s=handle.times.waited_s + seconds),
        )
        staging = Staging(self._run.rank)
        arena: Arena | None = None
        try:
            items, arena = self._copy_early(snapshot, guard)
            after = queued_now(item.source for item in items)

            def copy(arena: Arena) -> None:
                offsets, data = snapshot.offsets(items), snapshot.data(arena)
                guard.copy(items, offsets, data, after, staging.go_on, arena.mark.reach)
                handle._note(staged=time.time())

            def work() -> None:
                try:
                    with after.as_there() if after is not None else contextlib.nullcontext():
                        self._fill(staging, pending, snapshot, arena, metadata_tree, copy, early=True)
                finally:
                    guard.release()

            self._staging = staging
            handle._note(returned=time.time())
            self._hand_over(pending, staging)
        except BaseException:
            guard.release()
            if arena is not None:
                self._pool.release(arena)
            raise
        behind.do(partial(staging.run_behind, work))

    def _copy_early(self, snapshot: Snapshot, guard: Guard) -> tuple[list[StateItem], Arena | None]:
        """What is left to copy, and the arena to copy it into, which is there already if much had to be
        copied."""
        if sum(item.nbytes for item in guard.early) <= EARLY_NBYTES:
            return [*captured(guard.early), *guard.late], None
        with span("get arena", "wait", {"wanted": snapshot.nbytes}):
            arena = self._pool.acquire(snapshot.nbytes, self._run.config.commit_timeout_s)
        try:
            snapshot.begin(arena)
            snapshot.copy(guard.early, arena)
        except BaseException:
            self._pool.release(arena)
            raise
        return guard.late, arena

    def _await_last_copy(self) -> None:
        """One at a time: a second one would only make both take longer."""
        timeout_s = self._run.config.commit_timeout_s
        if self._staging is not None and not self._staging.done.wait(timeout_s):
            raise CommitTimeoutError(
                f"the state of an earlier save is still being copied after {timeout_s:g} s",
                rank=self._run.rank,
            )

    def _task(self, pending: PendingSave, snapshot: Snapshot, arena: Arena, metadata_tree: Any) -> WriteTask:
        run, config, template = self._run, self._run.config, snapshot.template
        return WriteTask(
            root=run.root,
            step=pending.handle.step,
            attempt=str(pending.attempt),
            rank=run.rank,
            world_size=run.world_size,
            arena=ArenaRef(
                pid=os.getpid(),
                fd=arena.fd,
                capacity=arena.capacity,
                serial=self._serial(arena),
                huge=arena.huge,
            ),
            live_arenas=tuple(self._serials),
            header_nbytes=template.nbytes,
            digests_at=template.digests_at,
            stored_at=template.stored_at,
            methods_at=template.methods_at,
            own_at=template.own_at,
            data_offset=template.nbytes,
            data_nbytes=snapshot.data_nbytes,
            block_nbytes=config.shard_block_nbytes,
            codec="raw" if config.codec == "raw" else "zstd",
            auto=config.codec == "auto",
            zstd_level=config.zstd_level,
            direct_io=config.direct_io,
            stripe_count=config.stripe_count,
            stripe_nbytes=config.stripe_nbytes,
            io_threads=config.io_threads,
            transport=run.spec,
            deadline=pending.deadline,
            metadata=metadata_tree,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            trace=run.trace,
        )

    def _serial(self, arena: Arena) -> int:
        """The memory's inode: a descriptor number is reused, this is not while anybody maps the memory."""
        serial = os.fstat(arena.fd).st_ino
        self._serials = [*(s for s in self._serials if s != serial), serial][-self._run.config.max_arenas :]
        return serial
