"""What is a streaming restore after its call has returned: who reads, who waits, and how does it end?

One thread sees the batches through, with a few more to read; another listens to the other ranks. The training
thread waits where it has to, and does at the end what only it may do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ckptengine.adapters.awaited import parcels_meant
from ckptengine.adapters.delivery import Batch, Delivery
from ckptengine.adapters.gates import Gate, anything_was_compiled
from ckptengine.adapters.holders import Holder, check_in_place
from ckptengine.adapters.pre_forward import Hooks
from ckptengine.comm.failure import Failure
from ckptengine.comm.neighbours import Neighbours
from ckptengine.comm.rollcall import RollCall
from ckptengine.errors import CheckpointError, CommitTimeoutError
from ckptengine.info import RestoreInfo
from ckptengine.read.arrivals import LOOK_S
from ckptengine.read.ordered import OrderedRead, Shard, deliver
from ckptengine.read.reader import ShardReader
from ckptengine.read.tally import ReadStats
from ckptengine.streaming_peers import Peers
from ckptengine.tracing.recorder import span

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0
"""For the blocks that are being read when nobody wants them any more."""

_HINT = (
    "the state may be partly restored, and something may have been computed from it: restore again without "
    "streaming, which falls back to the step before if this one is damaged"
)


class _StoppedError(Exception):
    """Nobody wants the rest."""


Agree = Callable[[Callable[[], object]], RestoreInfo]
"""Does what it is given on all ranks, or raises on all; makes the report."""

_live: list[Stream] = []
os.register_at_fork(after_in_child=_live.clear)


def finish_streams() -> None:
    """Wait for every streaming restore of this process; raises the error of one that has failed."""
    for stream in tuple(_live):
        stream.finish()


def end_failed_streams() -> None:
    """Another restore begins: those that have failed hold nobody up any more. Waits for the others."""
    for stream in tuple(_live):
        try:
            stream.finish()
        except Exception as error:
            logger.info("a streaming restore of step %d has failed: %s", stream.step, error)
            stream.abandon()


class Stream:
    """One rank's reading behind its training: `read_early` in the call, then `start`, and in any case
    `finish` or `abandon`.

    world_size: how many ranks saved the step. holders: all modules of the state. shards: open; what holds
    them, and whatever else `held` has, is let go of at the end. timeout_s: for the slowest rank to have read
    all once this one has, and for a block to be read.
    """

    def __init__(
        self,
        step: int,
        world_size: int,
        delivery: Delivery,
        gates: Sequence[Gate],
        holders: Sequence[Holder],
        shards: Mapping[Shard, ShardReader],
        rollcall: RollCall,
        rank: int,
        neighbours: Neighbours | None = None,
        *,
        threads: int,
        timeout_s: float,
    ) -> None:
        self.step = step
        self.world_size = world_size
        self.stats = ReadStats()
        self.read_seconds = 0.0
        self._delivery = delivery
        self._arrivals = delivery.arrivals
        self._gates = gates
        self._holders = holders
        self._shards = shards
        self._peers = Peers(rollcall, rank, timeout_s, neighbours)
        self._rank = rank
        self._threads = threads
        self._timeout_s = timeout_s
        self._held = ExitStack()
        self._hooks: Hooks | None = None
        self._agree: Agree | None = None
        self._batches: Iterator[Batch] = iter(())
        self._begun: tuple[Batch, int] | None = None
        self._reader: threading.Thread | None = None
        self._listener: threading.Thread | None = None
        self._stop = threading.Event()
        self._news = threading.Event()
        self._settled = threading.Event()
        self._finishing = threading.RLock()
        self._applying = False
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._info: RestoreInfo | None = None
        self._pid = os.getpid()

    # -- the call --

    def read_early(self) -> None:
        """What values and objects need that get it in the call."""
        began = time.perf_counter()
        early = self._delivery.early
        self._batches = self._delivery.batches(self._shards)
        while not self._arrivals.are_there(early):
            batch = next(self._batches)
            self._deliver(batch, 0, batch.early)
            if self._arrivals.are_there(early):
                self._begun = batch, batch.early
                break
            self._deliver(batch, batch.early, len(batch.reads))
        self.read_seconds += time.perf_counter() - began

    def apply_early(self) -> None:
        self._delivery.apply_early()

    def start(self, agree: Agree, held: ExitStack) -> None:
        """Have the rest read, and modules and optimizers wait for it."""
        self._agree = agree
        self._held = held
        parcels = self._delivery.parcels
        gates = [(gate, parcels.holding(gate.memory)) for gate in self._gates]
        modules = [(one.module, one.memory, parcels.holding(one.memory)) for one in self._holders]
        self._hooks = Hooks(
            [(gate, needed) for gate, needed in gates if needed],
            [one for one in modules if one[2]],
            self._delivery.optimizers,
            self._arrivals,
            self.wait,
            self._finish_before,
        )
        _live.append(self)
        self._reader = threading.Thread(target=self._read, name="ckptengine-stream", daemon=True)
        self._listener = threading.Thread(target=self._listen, name="ckptengine-stream-ranks", daemon=True)
        self._reader.start()
        self._listener.start()
        if anything_was_compiled() and not all(gate.compiled for gate, _ in gates):
            # What was compiled before goes on without hooks that came later.
            self.wait(sorted({parcel for _, needed in gates for parcel in needed}))

    # -- the threads --

    def _read(self) -> None:
        began = time.perf_counter()
        try:
            if self._begun is not None:
                (batch, done), self._begun = self._begun, None
                self._deliver(batch, done, len(batch.reads))
                del batch
            with span("read behind the training", "whole", {"step": self.step}):
                for batch in self._batches:
                    self._deliver(batch, 0, len(batch.reads))
            self.read_seconds += time.perf_counter() - began
            self._peers.done()
        except _StoppedError:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            self._batches = iter(())
            self._news.set()

    def _deliver(self, batch: Batch, first: int, last: int) -> None:
        def note(one: OrderedRead) -> None:
            batch.note(one)
            if self._stop.is_set():
                raise _StoppedError

        self.stats += deliver(self._shards, batch.reads[first:last], self._threads, note)

    def _listen(self) -> None:
        """Until all ranks are done, or one has failed."""
        try:
            while not self._stop.is_set():
                outcome = self._peers.look()
                if isinstance(outcome, Failure):
                    self._fail(outcome.to_error(), tell=False)
                if outcome is True or self._error is not None:
                    break
                self._peers.pause(self._news)
        except Exception as error:
            self._fail(error)
        finally:
            if self._error is not None or self._stop.is_set():
                assert self._reader is not None
                self._stop.set()
                self._reader.join()
                self._release()
            self._settled.set()

    def _fail(self, error: BaseException, *, tell: bool = True) -> None:
        """tell: the other ranks; if one of them has failed before, its error counts here too."""
        error = self._peers.fail(error, tell=tell)
        if isinstance(error, CheckpointError):
            error.hint = _HINT if error.hint is None else f"{error.hint}; {_HINT}"
        with self._lock:
            if self._error is None:
                self._error = error
        self._stop.set()
        self._news.set()
        self._arrivals.fail(self._error)

    def _release(self) -> None:
        with self._lock:
            held, self._held = self._held, ExitStack()
        held.close()

    # -- whoever waits --

    def wait(self, parcels: Iterable[int] | None = None, timeout_s: float | None = None) -> bool:
        """Until the parcels are there (all, if None); False if `timeout_s` pass first. Raises the error that
        ended the reading."""
        self._check_process()
        wanted = range(len(self._delivery.parcels)) if parcels is None else parcels
        try:
            return self._arrivals.wait(wanted, self._timeout_s, timeout_s)
        except CommitTimeoutError as error:
            self._fail(error)
            raise

    def wait_for(self, what: Any, timeout_s: float | None) -> bool:
        """`RestoreHandle.wait`, on the training thread."""
        with self._finishing:
            if self._info is not None:
                return True
            if self._error is not None:
                raise self._error
            hooks = self._hooks
        parcels = self._delivery.parcels
        meant = None if what is None else parcels_meant(what, parcels, self._holders)
        there = self.wait(meant, timeout_s)
        if there and hooks is not None:
            hooks.let_pass()
        return there

    def finish(self, timeout_s: float | None = None, *, in_step: bool = False) -> RestoreInfo:
        """Wait for all ranks to have read all, and do what is left to do. On the training thread.

        Raises the error of the rank that failed, `CommitTimeoutError` if `timeout_s` pass first.
        """
        self._check_process()
        with self._finishing:
            if self._info is not None:
                return self._info
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not self._settled.wait(LOOK_S if deadline is None else min(LOOK_S, timeout_s or 0.0)):
                if deadline is not None and time.monotonic() >= deadline:
                    raise CommitTimeoutError(
                        f"step {self.step} is not restored after {timeout_s:g} s; the reading goes on",
                        hint="call result() again",
                    )
                self.wait(None, 0.0)
            if self._error is not None:
                raise self._error
            assert self._agree is not None
            try:
                self._info = self._agree(self._apply)
            except BaseException as error:
                # What ends a process once must not end a later call that is told of this failure.
                left = f"this rank left the restore by {type(error).__name__}"
                told = error if isinstance(error, Exception) else CheckpointError(left, rank=self._rank)
                self._fail(told, tell=False)
                self._release()
                raise
            self._end(in_step)
            return self._info

    def _finish_before(self) -> None:
        """Before an optimizer's step, and what takes or changes its state; not before what is done here."""
        with self._finishing:
            if not self._applying:
                self.finish(in_step=True)

    def _apply(self) -> None:
        assert self._hooks is not None
        self._hooks.let_pass()
        check_in_place(self._holders, self._delivery.parcels)
        self._applying = True
        try:
            self._delivery.apply_late()
        finally:
            self._applying = False

    def abandon(self) -> None:
        """Let everybody go; whatever has not been read will not be."""
        if os.getpid() != self._pid or self not in _live:
            self.leave_steps()
            return
        if self._error is None:
            self._fail(CheckpointError("the restore was given up before its end", rank=self._rank))
        for thread in (self._reader, self._listener):
            if thread is not None:
                thread.join(STOP_TIMEOUT_S)
        self._release()
        self._end(in_step=False)

    def _end(self, in_step: bool) -> None:
        if self._hooks is not None:
            self._hooks.leave(in_step=in_step)
        if self in _live:
            _live.remove(self)
        self._release()
        self._let_go()
        with contextlib.suppress(ConnectionError):
            if self._error is None:
                self._peers.forget()

    def _let_go(self) -> None:
        """Whoever keeps this, or its handle, keeps nothing of the state."""
        self._delivery.release()
        self._gates, self._holders, self._shards = (), (), {}
        self._agree = None

    def leave_steps(self) -> None:
        """After the end, not from within an optimizer's step."""
        if self._hooks is not None and self not in _live:
            self._hooks.leave()

    # -- what a handle shows --

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def info(self) -> RestoreInfo | None:
        return self._info

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise CheckpointError(
                f"the state is being restored in process {self._pid}, of which this one is a fork",
                hint="wait with handle.result() before you fork",
            )
