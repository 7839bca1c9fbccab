"""What runs in the writer process: one call per task, with arenas and connections kept between them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time

import msgspec

from ckptengine.adapters import c10d
from ckptengine.comm.group import COORDINATOR
from ckptengine.comm.transport import Transport
from ckptengine.staging.arena import Arena, attach
from ckptengine.storage.posix import PosixStore
from ckptengine.write.messages import Outcome, TransportSpec, WriteTask
from ckptengine.write.save import forget, run_save

logger = logging.getLogger(__name__)

PARENT_POLL_S = 0.2


def warm_up(trainer_pid: int) -> None:
    """The first task of every writer process: bind its life to the trainer's. Its imports are done with it,
    too."""
    _bind_to(trainer_pid)


def run(data: bytes) -> None:
    """Carry out the encoded `WriteTask`; called by NVRx's worker in its main thread. Never raises."""
    task = msgspec.msgpack.decode(data, type=WriteTask)
    try:
        arena = _process.arena(task)
    except OSError as error:
        # Without the arena there is no page to report on; the trainer is gone or has given the save up.
        logger.error(
            "step %d: cannot open the staged bytes of process %d: %s", task.step, task.arena.pid, error
        )
        return
    store = PosixStore(direct_io=task.direct_io)
    try:
        transport = _process.transport(task.transport)
    except ConnectionError as error:
        transport = _Unreachable(str(error))
    outcome = run_save(task, store, transport, arena.status, arena.payload)
    if task.rank == COORDINATOR:
        _process.tidy(task, transport, outcome)


class _Process:
    """What one writer process keeps between tasks: attaching and mapping gigabytes again would cost page
    faults each time."""

    def __init__(self) -> None:
        self._arenas: dict[int, Arena] = {}
        self._transports: dict[TransportSpec, Transport] = {}
        self._past_attempts: list[str] = []

    def arena(self, task: WriteTask) -> Arena:
        for serial in [serial for serial in self._arenas if serial not in task.live_arenas]:
            # A mapping kept here keeps the memory, though the trainer has let it go.
            self._arenas.pop(serial).close()
        ref = task.arena
        if ref.serial not in self._arenas:
            self._arenas[ref.serial] = attach(ref.pid, ref.fd, ref.capacity)
        return self._arenas[ref.serial]

    def transport(self, spec: TransportSpec) -> Transport:
        if spec not in self._transports:
            self._transports[spec] = c10d.connect(spec)
        return self._transports[spec]

    def tidy(self, task: WriteTask, transport: Transport, outcome: Outcome) -> None:
        """Keep the transport from growing with every save."""
        if outcome.committed and task.world_size > 1:
            with contextlib.suppress(ConnectionError):
                for attempt in self._past_attempts:
                    forget(attempt, task.world_size, transport)
            self._past_attempts.clear()
        self._past_attempts.append(task.attempt)


_process = _Process()


class _Unreachable:
    """A transport that could not be joined: the save fails with the reason instead of the process."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def set(self, key: str, value: bytes) -> None:
        raise ConnectionError(self._reason)

    def get(self, key: str, timeout_s: float) -> bytes:
        raise ConnectionError(self._reason)

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        raise ConnectionError(self._reason)

    def delete(self, key: str) -> None:
        raise ConnectionError(self._reason)

    def close(self) -> None:
        pass


def _bind_to(pid: int) -> None:
    """End this process when the trainer ends, however it ends.

    `PR_SET_PDEATHSIG` would fire when the *thread* that started us ends; a pidfd speaks of the process. A
    half-written attempt is never listed, so there is nothing to clean up.
    """
    # Ctrl-C goes to the whole foreground group; the trainer decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(pid,), name="ckpt-watch-trainer", daemon=True).start()


def _watch(pid: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.pidfd_open(pid)
        if os.getppid() == pid:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            while not poll.poll():
                pass
        os._exit(1)
    while os.getppid() == pid:
        time.sleep(PARENT_POLL_S)
    os._exit(1)
