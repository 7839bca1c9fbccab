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
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 10.0


class WriterProcess(TorchAsyncCheckpoint):  # type: ignore[misc]  # NVRx has no types
    """One persistent writer process, scheduled by NVRx. Methods may be called from any thread.

    `async_save` queues one task; `finalize_async_save` never waits. The process ends with `close`, with
    `kill`, or when the trainer does (the writer watches it). After any of these the object is spent: make a
    new one.
    """

    def __init__(self, rank: int, async_fn: Callable[[bytes], None], warm_up: Callable[[int], None]) -> None:
        """Both are module-level functions that run in the process and must not raise: NVRx's worker dies of
        an exception without a word to the trainer. `warm_up` gets this process's id, once, before `async_fn`
        gets the tasks."""
        # Not super().__init__(): it resets TorchAsyncCheckpoint.async_fn for every other user in this
        # process.
        self._fn = async_fn
        self._warm_up = warm_up
        self._async_calls_queue = AsyncCallsQueue(**_queue_options())
        self._caller = self._async_calls_queue._get_async_caller()
        # Else the caller asks torch.distributed, which need not be initialised.
        self._caller.rank = rank
        self._process: multiprocessing.process.BaseProcess | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process; returns after milliseconds, while its imports go on for seconds."""
        with self._lock:
            if self._process is None:
                with _main_module_hidden():
                    self._schedule(self._warm_up, os.getpid())
                self._process = self._caller.process

    def async_save(self, task: bytes) -> None:
        """Queue `task` for the process, which is started if need be."""
        self.start()
        with self._lock:
            self._schedule(self._fn, bytes(task))

    def _schedule(self, fn: Callable[..., None], argument: bytes | int) -> None:
        self._async_calls_queue.schedule_async_request(AsyncRequest(fn, (argument,), [], {}))

    def finalize_async_save(
        self, blocking: bool = False, no_dist: bool = True, terminate: bool = False
    ) -> None:
        """Let NVRx forget the calls that are done. It never blocks: a dead worker would make NVRx poll for
        ever, and that a call is done says nothing about the other ranks (the commit does)."""
        with self._lock:
            if self._process is not None and self._process.is_alive():
                self._async_calls_queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        if terminate:
            self.close()

    @property
    def exitcode(self) -> int | None:
        """The process's exit code (negative: the signal that ended it), None while it lives or before it has
        started."""
        return None if self._process is None else self._process.exitcode

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def close(self, abort: bool = False, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the process after the tasks it has, or at once with `abort`; killed if it takes longer than
        `timeout_s`."""
        with self._lock:
            process = self._process
            if process is not None and not abort and process.is_alive():
                self._caller.queue.put("DONE")
                process.join(timeout_s)
        if process is not None and process.is_alive():
            if not abort:
                logger.warning(
                    "writer process %s did not end within %g s and is killed", process.pid, timeout_s
                )
            process.kill()
            process.join(KILL_TIMEOUT_S)
        self._disarm()

    def kill(self) -> None:
        """SIGKILL: the process writes nothing more."""
        self.close(abort=True)

    def _disarm(self) -> None:
        """Leave nothing that NVRx's destructors could wait for."""
        with self._lock:
            self._async_calls_queue.async_calls.clear()
            self._async_calls_queue.persistent_caller = None
            self._caller.process = None
            for queue in (self._caller.queue, self._caller.preload_q, self._caller.comp_q):
                queue.cancel_join_thread()
                queue.close()

    def __del__(self) -> None:
        # From 0.5 on, NVRx's destructor finalizes every open call, blocking, with collectives.
        pass


def _queue_options() -> dict[str, Any]:
    """What this version's queue takes, of what we want."""
    wanted: dict[str, Any] = {
        "persistent": True,
        # A daemonic worker is ended by the interpreter's exit instead of being waited for.
        "is_daemon": True,
        # The staged bytes are host memory; without this, 0.6 and later pick a device by `rank %
        # device_count()`.
        "cpu_shm_mode": True,
    }
    known = inspect.signature(AsyncCallsQueue.__init__).parameters
    return {name: value for name, value in wanted.items() if name in known}


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Start a process without the trainer's `__main__`.

    `multiprocessing` runs the main module again in a spawned child: a script without an `if __name__ ==
    "__main__"` guard would start its training there. The writer needs nothing of it.
    """
    main = sys.modules["__main__"]
    blank = types.ModuleType("__main__")
    blank.__spec__ = None
    sys.modules["__main__"] = blank
    try:
        yield
    finally:
        sys.modules["__main__"] = main
