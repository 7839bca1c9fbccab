"""The only place that touches nvidia-resiliency-ext's checkpointing: its queue and persistent worker, made
safe to rely on.

NVRx schedules: `TorchAsyncCheckpoint` holds an `AsyncCallsQueue`, whose persistent caller is one spawned
process per rank. What that process runs is our module-level writer, and what it is given is one `bytes`
object, so that nothing can fail to pickle later in the queue's feeder thread and nothing shares memory by
accident. Differences between versions (0.4.1 to 0.7) are probed from signatures, not from version numbers.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import multiprocessing.process
import multiprocessing.spawn
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from nvidia_resiliency_ext.checkpointing.async_ckpt.core import (
    AsyncCallsQueue,
    AsyncRequest,
    PersistentAsyncCaller,
)
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

from ckptengine.adapters import lifeline

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
CLOSE_BUSY_TIMEOUT_S = 30.0
"""For a process that still uses its processor when the first is over: it may be deleting old steps, or have
few turns on a machine that is busy. A job that is to end often has no more than this."""
KILL_TIMEOUT_S = 10.0


class _Caller(PersistentAsyncCaller):  # type: ignore[misc]  # NVRx has no types
    """NVRx's, of which the destructor has what it asks for also if it could not be made."""

    rank: int | None = None
    process: Any = None


class WriterProcess(TorchAsyncCheckpoint):  # type: ignore[misc]  # NVRx has no types
    """One persistent writer process, scheduled by NVRx. Methods may be called from any thread.

    `async_save` queues one task; `finalize_async_save` never waits. The process ends with `close`, with
    `kill`, with NVRx's `abort_nvrx_checkpoint()`, or when the trainer does (`lifeline`). After any of these
    the object is spent: make a new one.
    """

    def __init__(self, rank: int, async_fn: Callable[[bytes], None], warm_up: Callable[[], None]) -> None:
        """Both are module-level functions that run in the process: `warm_up` once, when their module has been
        imported, then `async_fn` with each task. They must not raise: NVRx's worker dies of an exception
        without a word to the trainer."""
        # Not super().__init__(): it resets TorchAsyncCheckpoint.async_fn for every other user in this
        # process.
        self._fn = async_fn
        self._warm_up = warm_up
        self._caller = _Caller(**_caller_options())
        # Else the caller asks torch.distributed, which need not be initialised.
        self._caller.rank = rank
        self._async_calls_queue = AsyncCallsQueue(persistent=True)
        # Given, not asked for: since 0.6 the queue would take the process another user has warmed up for
        # itself; and a queue made with `cpu_shm_mode` makes all of NVRx's other writers drain it first.
        self._async_calls_queue.persistent_caller = self._caller
        self._process: multiprocessing.process.BaseProcess | None = None
        self._warm = False
        self._at_exit: multiprocessing.util.Finalize | None = None
        self._lock = threading.RLock()

    def start(self) -> None:
        """Start the process; returns after milliseconds, while its imports go on for seconds."""
        with self._lock:
            if self._process is not None:
                return
            try:
                with _lifeline_as_main_module(), _interrupts_blocked():
                    self._schedule(self._warm_up)
            except BaseException:
                if self._caller.process is not None and self._caller.process.pid is not None:
                    self._caller.process.kill()
                self._disarm()
                raise
            self._process = self._caller.process
            # A worker of 0.4.1 is not a daemon: at exit, multiprocessing would wait for it to end by itself,
            # and then NVRx's destructor for the tasks it has not done.
            self._at_exit = multiprocessing.util.Finalize(None, self.kill, exitpriority=0)

    def async_save(self, task: bytes) -> None:
        """Queue `task` for the process, which is started if need be."""
        with self._lock:
            self.start()
            self._schedule(self._fn, bytes(task))

    def _schedule(self, fn: Callable[..., None], *arguments: bytes) -> None:
        if self._async_calls_queue.persistent_caller is not self._caller:
            # The queue would silently start another process, with defaults of its own.
            raise RuntimeError("this writer process was closed or aborted")
        self._async_calls_queue.schedule_async_request(AsyncRequest(fn, arguments, [], {}))

    def finalize_async_save(
        self, blocking: bool = False, no_dist: bool = True, terminate: bool = False
    ) -> None:
        """Let NVRx forget the calls that are done. It never blocks: a dead worker would make NVRx poll for
        ever, and that a call is done says nothing about the other ranks (the commit does)."""
        with self._lock:
            if (
                self._process is not None
                and self._process.is_alive()
                and self._async_calls_queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
            ):
                self._warm = True
        if terminate:
            self.close()

    @property
    def warm(self) -> bool:
        """The process has done its imports: it works on a task, or would begin with one at once."""
        if not self._warm:
            self.finalize_async_save()
        return self._warm

    @property
    def exitcode(self) -> int | None:
        """The process's exit code (negative: the signal that ended it), None while it lives or before it has
        started."""
        return None if self._process is None else self._process.exitcode

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def close(
        self,
        abort: bool = False,
        timeout_s: float = CLOSE_TIMEOUT_S,
        busy_timeout_s: float = CLOSE_BUSY_TIMEOUT_S,
    ) -> None:
        """End the process after the tasks it has, or at once with `abort`. It is killed if it does nothing
        for `timeout_s`, or has not ended after the longer of the two."""
        process = self._process
        if process is not None and not abort and process.is_alive():
            self._caller.queue.put("DONE")
            _await_end(process, timeout_s, max(timeout_s, busy_timeout_s))
        if process is not None and process.is_alive():
            process.kill()
            process.join(KILL_TIMEOUT_S)
        self._disarm()

    def kill(self) -> None:
        """SIGKILL: the process writes nothing more."""
        self.close(abort=True)

    def _disarm(self) -> None:
        """Leave nothing that NVRx's destructors could wait for."""
        with self._lock:
            if self._at_exit is not None:
                self._at_exit.cancel()
            queue = self._async_calls_queue
            queue.async_calls.clear()
            queue.persistent_caller = None
            # Its destructor calls it, and since 0.6 that ends a process another user has warmed up.
            queue.close = _do_nothing
            self._caller.process = None
            for pipe in (self._caller.queue, self._caller.preload_q, self._caller.comp_q):
                pipe.cancel_join_thread()
                pipe.close()

    def __del__(self) -> None:
        # From 0.5 on, NVRx's destructor finalizes every open call, blocking, with collectives.
        pass


def _caller_options() -> dict[str, Any]:
    """What this version's caller takes, of what we want."""
    wanted: dict[str, Any] = {
        # A daemonic worker is ended by the interpreter's exit instead of being waited for.
        "is_daemon": True,
        # The staged bytes are host memory; without this, 0.6 and later pick a device by `rank %
        # device_count()`, and make a context on it.
        "cpu_shm_mode": True,
    }
    known = inspect.signature(PersistentAsyncCaller.__init__).parameters
    return {name: value for name, value in wanted.items() if name in known}


def _await_end(process: multiprocessing.process.BaseProcess, timeout_s: float, longest_s: float) -> None:
    """Wait for a process that was told to end; if in vain, the log says whether it hangs or is only slow."""
    who = f"writer process {process.pid}"
    began = looked = time.monotonic()
    used = _cpu_ticks(process.pid)
    while process.is_alive():
        process.join(min(timeout_s, max(began + longest_s - looked, 0.0)))
        if not process.is_alive():
            return
        now, now_used = time.monotonic(), _cpu_ticks(process.pid)
        if now_used == used:
            logger.warning("%s, told to end, has done nothing for %.3g s and is killed", who, now - looked)
            return
        if now - began >= longest_s:
            logger.warning("%s, told to end, still works after %.3g s and is killed", who, now - began)
            return
        logger.info(
            "%s, told to end, still works after %.3g s and has %g s in all (is the machine busy?)",
            who,
            now - began,
            longest_s,
        )
        looked, used = now, now_used


def _cpu_ticks(pid: int | None) -> int:
    """The processor time a process has used, in clock ticks; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])  # utime, stime


def _do_nothing(abort: bool = False) -> None:
    pass


_patching = threading.Lock()


@contextlib.contextmanager
def _lifeline_as_main_module() -> Iterator[None]:
    """Processes that this thread starts meanwhile run `lifeline` in place of the trainer's `__main__`.

    `multiprocessing` runs the main module again in a spawned child: a script without an `if __name__ ==
    "__main__"` guard would start its training there. The writer needs nothing of it. Other threads, which may
    be starting data loaders, see no difference.
    """
    thread = threading.get_ident()
    with _patching:
        original = multiprocessing.spawn.get_preparation_data

        def get_preparation_data(name: str) -> dict[str, Any]:
            data = original(name)
            if threading.get_ident() == thread:
                data.pop("init_main_from_path", None)
                data["init_main_from_name"] = lifeline.__name__
                data["sys_argv"] = ["ckptengine-writer", str(os.getpid())]
            return data

        multiprocessing.spawn.get_preparation_data = get_preparation_data
        try:
            yield
        finally:
            multiprocessing.spawn.get_preparation_data = original


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes that this thread starts meanwhile never see Ctrl-C, which goes to the whole foreground group:
    the trainer decides what it means."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
