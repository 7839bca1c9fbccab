"""The engine's front door: one object per job and root that saves in the background and restores in place."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, overload

import torch.distributed as dist

from ckptengine.adapters import c10d
from ckptengine.adapters.delivery import Priority, priority_of
from ckptengine.adapters.guard import wait_for_copies
from ckptengine.catalog.catalog import latest, list_steps
from ckptengine.comm.group import Group
from ckptengine.comm.neighbours import Neighbours
from ckptengine.config import Config
from ckptengine.errors import CheckpointError, CommitTimeoutError
from ckptengine.format.names import RunId
from ckptengine.handle import SaveHandle
from ckptengine.info import CommitInfo, RestoreInfo
from ckptengine.opening import agree_on_setup, connect, exchange_directory, leave_exchange, open_root
from ckptengine.read.partial import Partial, Rename
from ckptengine.read.per_rank import PerRankPolicy, PerRankSpec
from ckptengine.read_once import Rates, Sharing
from ckptengine.restore_handle import RestoreHandle
from ckptengine.restore_options import RestoreOptions
from ckptengine.restorer import begin_restore, restore
from ckptengine.run import Run
from ckptengine.saver import Saver
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import Store
from ckptengine.storage.traced import TracedStore
from ckptengine.streaming import end_failed_streams, finish_streams
from ckptengine.tracing import recorder

logger = logging.getLogger(__name__)

_RESTORE = "the restore"
ABNORMAL_CLOSE_TIMEOUT_S = 30.0


class Checkpointer:
    """Saves and restores the state of one job under `root`, a directory all ranks share.

    root: made if missing. config: the same on all ranks. process_group: the ranks that save together; by
    default torch.distributed's default group if it is initialised, else this process alone.

    Every rank makes one, and all ranks call `async_save`, `save` and `restore` in the same order.
    `async_save` joins no collective and does no I/O; making a Checkpointer and `restore` wait for all ranks:
    at most `config.agree_timeout_s` each time they agree, and `config.restore_timeout_s` for the slowest to
    have read. Use it as a context manager, or `close()` it: that waits for the saves under way.

    Raises `StorageError` if the root cannot be used, `CommitTimeoutError` if a rank does not come, and
    `CheckpointError` if the ranks' Configs differ in what they must share (see `Config`).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        config: Config | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"config is a ckptengine.Config, not a {type(config).__name__}")
        self.root = os.path.abspath(os.fsdecode(root))
        self.config = config if config is not None else Config()
        self._store: Store = PosixStore(direct_io=self.config.direct_io)
        member = c10d.membership(process_group)
        run = open_root(self._store, self.root, member, self.config)
        self.rank, self.world_size = member.rank, member.world_size
        spec = member.spec(exchange_directory(self.root, run), prefix=f"ckptengine/{run}/")
        directory = None if self.config.trace is None else os.path.abspath(self.config.trace)
        self._run = Run(
            self.root, member.rank, member.world_size, self.config, RunId.parse(run), spec, directory
        )
        self._transport = connect(spec, member.rank)
        self._neighbours = Neighbours(member.rank, member.world_size, self._transport, f"{run}/at")
        self._group = Group(
            member.rank,
            member.world_size,
            self._transport,
            f"{run}/group",
            self.config.agree_timeout_s,
            self._neighbours,
        )
        with contextlib.suppress(ConnectionError):  # the agreement says it better
            self._neighbours.publish()
        self._rates = Rates()
        self._network = c10d.network(
            member, self._transport, f"{run}/exchange", self.config.restore_timeout_s
        )
        try:
            agree_on_setup(self.root, self.config, self._group)
        except BaseException:
            self._neighbours.close()
            raise
        if directory is not None:
            self._store = TracedStore(self._store, self.root)
        self._saver = Saver(self._run, self._store, self._transport, process_group)
        self._trace = None if directory is None else recorder.start(directory, self.rank, "trainer")
        self._restoring: RestoreHandle | None = None
        self._closed = False
        self._pid = os.getpid()
        # Otherwise multiprocessing would wait at exit for a writer process that waits for tasks.
        atexit.register(self._close_at_exit)

    def async_save(self, step: int, state: Any, *, metadata: Mapping[str, Any] | None = None) -> SaveHandle:
        """Capture `state` now, write and commit it in the background.

        step: an integer in [0, 2^63), also numpy's; a step saved again replaces its older commit once the new
        one is committed. state: nested dicts, lists and tuples of tensors (also DTensor, ShardedTensor),
        values, and objects with `state_dict`/`load_state_dict`.
        metadata: anything a value may be; rank 0's is kept in the manifest, shown by `ckpt inspect`.

        Returns once the state is copied, so that changing it is safe; waits longer only for memory, and logs
        that: while `max_arenas` snapshots are being written, or there is no room for one more. With
        `Config(snapshot="overlap")` it returns before, and only optimizer steps may change the state until
        `handle.staged()`: they wait for the copy. Any other change that is found fails the save.

        Raises `UnsupportedStateError` naming the key of a value that cannot be stored (nothing is written,
        and the save fails on all ranks); `SaveFailedError` if memory has no room for a snapshot and what the
        writer process takes, and `CommitTimeoutError` if none became free in time (with "overlap" both are
        the handle's); `ValueError` or `TypeError` for a step that is none; and the error of an earlier save
        that failed without anybody having asked its handle (`Config.on_error`).
        """
        self._check_open()
        finish_streams()
        with recorder.span("async_save", "whole", {"step": step}):
            return self._saver.save(step, state, metadata)

    def save(self, step: int, state: Any, *, metadata: Mapping[str, Any] | None = None) -> CommitInfo:
        """`async_save(...).result()`: return when the checkpoint is committed, and that a little sooner: as
        the caller waits anyway, a raw shard begins to be written while the state is still being copied.
        Raises what those two raise."""
        self._check_open()
        finish_streams()
        with recorder.span("save", "whole", {"step": step}):
            return self._saver.save(step, state, metadata, at_once=True).result()

    @overload
    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        strict: bool = True,
        verify: bool = True,
        per_rank: PerRankSpec = "error",
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        parameters_only: bool = False,
        rename: Rename | None = None,
        cast: bool = False,
        streaming: Literal[False] = False,
    ) -> RestoreInfo: ...

    @overload
    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        strict: bool = True,
        verify: bool = True,
        per_rank: PerRankSpec = "error",
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        parameters_only: bool = False,
        rename: Rename | None = None,
        cast: bool = False,
        streaming: Literal[True],
        priority: Priority = None,
    ) -> RestoreHandle: ...

    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        strict: bool = True,
        verify: bool = True,
        per_rank: PerRankSpec = "error",
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        parameters_only: bool = False,
        rename: Rename | None = None,
        cast: bool = False,
        streaming: bool = False,
        priority: Priority = None,
    ) -> RestoreInfo | RestoreHandle:
        """Fill `state` in place from the newest commit, or from `step`.

        state: with the keys that were saved, by any number of ranks and sharded in any way. Tensors are
        filled where they are, from whichever shards hold their elements; values are replaced in the dicts and
        lists that hold them; objects get `load_state_dict`. Every byte is checked against its digest. All
        ranks restore the same step. If a shard of the newest commit is damaged, all ranks fall back to the
        commit before it together (`RestoreInfo.fell_back_from`); not when `step` is given.

        strict: differences between target and checkpoint are an error; else keys on one side only are left
        alone and returned in `RestoreInfo`.

        verify: False does not check the tensors' bytes against their digests, so damage to them goes unseen
        into the state; manifest and headers are still checked. For benchmarks, and for storage that checks
        from end to end itself. `RestoreInfo.verified` keeps it.

        per_rank: of use where another number of ranks saved: what becomes of values, and whole tensors, of
        which not all of these held the same. `"error"` lists them; `"rank0"` gives all ranks rank 0's;
        `"drop"` leaves the target's as they are. Or a dict from patterns of names to one of these, as
        `{"rng": "drop", "*": "error"}`: the first that matches counts, a name also stands for all below it,
        and what is dropped by name is dropped whether it differs or not (a single rank's never does). An
        object that is loaded as a whole is dropped as a whole. `RestoreInfo.from_rank0` and `dropped` tell.

        include, exclude: restore only what is included, by default everything, and not excluded; nothing else
        of the target is touched, nor compared. Patterns of names, as errors and `ckpt inspect` have them:
        `*`, `?` and `[…]` match as in file names, and a name also stands for all below it. An object that is
        loaded as a whole (an optimizer, a scheduler) is included as a whole.

        parameters_only: restore only the parameters of modules, and tensors that are `nn.Parameter`: no
        buffers, no optimizer, no values.

        rename: under which name something was stored; a function from the name here to that, or a dict of
        names or of their first parts: `{"model": "model.module"}` for what was saved from a wrapped model.
        The optimizer of a `training_state` goes with its model.

        A pattern that no name of any rank has, in target or checkpoint, is an error in `include` (without
        `strict`, a warning); in `exclude`, `priority`, a mapping's names in `rename`, and where another
        number of ranks saved in `per_rank`, the coordinator logs a warning before anything is changed.

        cast: tensors of float16, bfloat16, float32 or float64 may have been stored in another of these, and
        are cast. Not the state that an optimizer loads, which stays as it was stored.

        streaming: return a `RestoreHandle` once training can begin, and read the rest behind it. Then values
        are in place, objects have got their state, and optimizers their options (learning rate and so on).
        Parameters and buffers come next, in the order of the modules: the forward of each module of the state
        waits for its own. Every optimizer's step waits for all, and loads the optimizers' state, or
        `handle.result()` does. What uses a parameter outside of its module's forward has to call
        `handle.wait(module)` before. Once the call has returned there is no falling back to an older step.
        priority: what to read first instead: patterns of FQNs, or a function that gives a number for an FQN,
        the lowest first. Only with streaming.

        Raises `CheckpointNotFoundError` if nothing was ever committed, `StateMismatchError` listing every
        difference (the target is untouched, unless tensors of it share memory and were stored with different
        values, which shows only while they are filled), `CorruptCheckpointError` if no commit is whole
        (tensors of the target may have been overwritten), and `CommitTimeoutError` if a rank does not come.
        An error on one rank is raised on all, also if it ends there (`SystemExit`, `KeyboardInterrupt`). All
        ranks give the same options, else all raise `CheckpointError`; but `include`, `exclude`, `rename` and
        `priority` speak of the names of the rank's own target and may be its own, as those of the stages of a
        pipeline. Of a `step` that is not there, `NotCommittedError` or
        `CheckpointNotFoundError`; of one that is none, `TypeError` or `ValueError`. Waits first for the saves
        under way.
        """
        self._check_open()
        try:
            partial = Partial.of(
                include=include, exclude=exclude, parameters_only=parameters_only, rename=rename, cast=cast
            )
            first = priority_of(priority)
            if first is not None and not streaming:
                raise ValueError(
                    "priority says what a streaming restore reads first: pass streaming=True, or no priority"
                )
            options = RestoreOptions(strict, verify, PerRankPolicy.of(per_rank), partial)
        except Exception as error:
            self._group.leave(error, what=_RESTORE)
            raise
        with self._group.told_if_left(_RESTORE):
            self._saver.wait(None)
            # Another Checkpointer's save may be copying what this one overwrites.
            wait_for_copies()
        end_failed_streams()
        self._restoring = None
        try:
            with recorder.span("restore", "whole"), self._group.told_if_left(_RESTORE):
                target = (self.root, state, step, options, self._store, self._group, self.config)
                if not streaming:
                    return restore(
                        *target,
                        sharing=lambda: Sharing(self._group, self.config, self._rates, self._network),
                    )
                self._restoring = begin_restore(*target, priority=first)
                return self._restoring
        finally:
            recorder.flush()

    @property
    def latest(self) -> int | None:
        """The newest committed step, None if there is none. Looks at the disk each time."""
        entry = latest(self._store, self.root)
        return None if entry is None else entry.step

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return [entry.step for entry in list_steps(self._store, self.root)]

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is under way, `timeout` in seconds.

        Raises `CommitTimeoutError` if `timeout` passes first, and the error of a failed save nobody has asked
        about.
        """
        self._check_process()
        if not self._saver.wait(timeout):
            raise CommitTimeoutError(f"a save is still under way after {timeout:g} s", path=self.root)
        self._saver.raise_earlier_failure()

    @property
    def writer_pid(self) -> int | None:
        """Process id of this rank's writer, for health checks; None before the first save."""
        return self._saver.writer_pid

    def close(self) -> None:
        """Wait for a streaming restore and for the saves under way, end the writer process, free the arenas.
        Raises like `wait`, and what the restore's `result` does. Idempotent."""
        if not self._closed:
            try:
                if self._restoring is not None and self._restoring.exception() is None:
                    self._restoring.result()
            finally:
                self._close(None, "the checkpointer was closed")
            self._saver.raise_earlier_failure()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            # Other ranks may be gone, and with them the hope of a commit; the error must not wait for a
            # deadline.
            self._close(ABNORMAL_CLOSE_TIMEOUT_S, f"the checkpointer was left by {type(error).__name__}")

    def _close(self, timeout_s: float | None, reason: str) -> None:
        self._closed = True
        atexit.unregister(self._close_at_exit)
        if os.getpid() != self._pid:
            return  # a forked child's copy: the writer, and the thread that looks after it, are its parent's
        try:
            if self._restoring is not None:
                self._restoring._abandon()
            self._saver.close(timeout_s, reason)
        finally:
            if self._trace is not None:
                recorder.stop(self._trace)
        if self._network is not None:
            self._network.close()
        self._neighbours.close()
        leave_exchange(self._run, self._transport)
        self._transport.close()

    def _close_at_exit(self) -> None:
        if os.getpid() == self._pid:
            logger.warning("the Checkpointer for %s was not closed; use it in a with statement", self.root)
        self._close(ABNORMAL_CLOSE_TIMEOUT_S, "the process exited")

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError("this Checkpointer is closed", path=self.root, hint="make a new one")
        self._check_process()

    def _check_process(self) -> None:
        """A fork shares the arena's memory with its parent, and neither the monitor nor the writer is its
        own."""
        if os.getpid() != self._pid:
            raise CheckpointError(
                f"this Checkpointer belongs to process {self._pid}, of which this one is a fork",
                path=self.root,
                hint="save in the process that made it (async_save does not block), or make one here",
            )
