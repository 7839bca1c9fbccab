"""What runs in the writer process: one call per task, with arenas and connections kept between them."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import time

import msgspec

from ckptengine.adapters import c10d, lifeline
from ckptengine.comm.failure import Failure
from ckptengine.comm.group import COORDINATOR
from ckptengine.comm.transport import Transport
from ckptengine.staging.arena import Arena, attach
from ckptengine.storage.lustre_policy import Striping
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import Store
from ckptengine.storage.traced import TracedStore
from ckptengine.tracing import recorder
from ckptengine.write.fate import give_up
from ckptengine.write.messages import Outcome, TransportSpec, WriteTask, gone_key
from ckptengine.write.methods import History
from ckptengine.write.save import forget, report_failure, run_save

logger = logging.getLogger(__name__)

COMMIT_S = lifeline.LAST_WORD_S - 1.0
"""For the commit that is being made when the trainer ends."""
POLL_S = 0.01


def warm_up() -> None:
    """The first task of every writer process; with it, its imports are done."""
    lifeline.last_word = _last_word
    # From 0.6 on, NVRx turns SIGTERM into an exception, to clean up what is not used here; thrown into a
    # wait or a write it would come late, and a killed writer leaves nothing behind that counts.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run(data: bytes) -> None:
    """Carry out the encoded `WriteTask`; called by NVRx's worker in its main thread.

    Raises, and with that ends the process, only if it cannot get at the staged bytes: the trainer has given
    the save up or is gone, and there is no page to report on.
    """
    task = msgspec.msgpack.decode(data, type=WriteTask)
    arena = _process.arena(task)
    _process.task, _process.ended = task, False
    store: Store = PosixStore(task.direct_io, Striping(task.stripe_count, task.stripe_nbytes))
    recorder.follow(task.trace, task.rank, "writer")
    if task.trace is not None:
        store = TracedStore(store, task.root)
    try:
        transport = _process.transport(task.transport)
    except ConnectionError as error:
        transport = _Unreachable(str(error))
    with recorder.span("save", "whole", {"step": task.step, "attempt": task.attempt}):
        outcome = run_save(task, store, transport, arena, _process.history(task.root))
    recorder.flush()
    _process.ended = True
    if task.rank == COORDINATOR:
        _process.tidy(task, transport, outcome)
    if not outcome.committed:
        # A traceback is a cycle that holds its frames' views of the arena, and NVRx 0.4.1 turns the collector
        # off in this process.
        gc.collect()


class _Process:
    """What one writer process keeps between tasks: attaching and mapping gigabytes again would cost page
    faults each time."""

    def __init__(self) -> None:
        self.task: WriteTask | None = None
        """The newest task, and whether it has ended."""
        self.ended = True
        self._arenas: dict[int, Arena] = {}
        self._transports: dict[TransportSpec, Transport] = {}
        self._past_attempts: list[str] = []
        self._histories: dict[str, History] = {}

    def arena(self, task: WriteTask) -> Arena:
        for serial in [serial for serial in self._arenas if serial not in task.live_arenas]:
            # A mapping kept here keeps the memory, though the trainer has let it go.
            self._arenas.pop(serial).close()
        ref = task.arena
        if ref.serial not in self._arenas:
            self._arenas[ref.serial] = attach(ref.pid, ref.fd, ref.capacity)
        return self._arenas[ref.serial]

    def history(self, root: str) -> History:
        return self._histories.setdefault(root, History())

    def await_end(self, timeout_s: float) -> None:
        """Wait for the newest task to end; called by another thread than carries it out."""
        until = time.monotonic() + timeout_s
        while not self.ended and time.monotonic() < until:
            time.sleep(POLL_S)

    def transport(self, spec: TransportSpec) -> Transport:
        if spec not in self._transports:
            self._transports[spec] = c10d.connect(spec)
        return self._transports[spec]

    def tidy(self, task: WriteTask, transport: Transport, outcome: Outcome) -> None:
        """Keep the transport from growing with every save."""
        if outcome.committed:
            with contextlib.suppress(ConnectionError):
                for attempt in self._past_attempts:
                    forget(attempt, task.world_size, transport)
            self._past_attempts.clear()
        self._past_attempts.append(task.attempt)


_process = _Process()


def _last_word() -> None:
    """The trainer is gone: the other ranks need not wait for their deadline to learn that."""
    task, ended = _process.task, _process.ended
    if task is None or task.world_size == 1:
        return
    failure = Failure(
        kind="SaveFailedError",
        message=f"the trainer process of rank {task.rank} has ended",
        rank=task.rank,
        hint="restart the job; the newest committed checkpoint stands",
        retryable=False,
    )
    with contextlib.suppress(ConnectionError):
        transport = _process.transport(task.transport)
        if not ended and task.rank == COORDINATOR and not give_up(transport, task.attempt, failure):
            # All shards are durable, and a commit takes milliseconds: then the others hear of it as ever.
            _process.await_end(COMMIT_S)
        elif not ended:
            report_failure(task.attempt, task.rank, failure, transport)
        transport.set_if_absent(gone_key(task.attempt), msgspec.msgpack.encode(failure))


class _Unreachable:
    """A transport that could not be joined: the save fails with the reason instead of the process."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def set(self, key: str, value: bytes) -> None:
        raise ConnectionError(self._reason)

    def get(self, key: str, timeout_s: float) -> bytes:
        raise ConnectionError(self._reason)

    def peek(self, key: str) -> bytes | None:
        raise ConnectionError(self._reason)

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        raise ConnectionError(self._reason)

    def delete(self, key: str) -> None:
        raise ConnectionError(self._reason)

    def close(self) -> None:
        pass
