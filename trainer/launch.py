"""How a job of several ranks is started on this machine, watched, and ended with no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

TIDY_S = 5.0
"""For multiprocessing's resource trackers to tidy up after the others."""

REPOSITORY = Path(__file__).resolve().parent.parent

QUIET = (
    "ignore:The pynvml package is deprecated:FutureWarning",
    "ignore:resource_tracker:UserWarning",  # multiprocessing's, tidying up after a killed rank
)

TOKEN = "TRAINER_JOB"
"""Environment variable that marks every process of a job, also one whose parent has died."""


def quiet_environment() -> dict[str, str]:
    """This process's environment, with what keeps torch to one thread, to the loopback device, and quiet."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": ",".join(QUIET),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
    }


def torchrun(arguments: Sequence[str], *, ranks: int, max_restarts: int = 0) -> list[str]:
    """The command that runs the trainer on `ranks` local processes, on a free port of the loopback device."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}", "--monitor-interval=0.1",
        "-m", "trainer", *arguments,
    ]  # fmt: skip


class Job:
    """A command and all its descendants, which end with the context; its output goes to a log file."""

    def __init__(self, command: Sequence[str], *, log: Path) -> None:
        self._token = f"{TOKEN}={uuid.uuid4().hex}"
        name, _, value = self._token.partition("=")
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**quiet_environment(), name: value},
                # Ctrl-C in the terminal reaches us only; `end` then stops the launcher, and that its ranks.
                start_new_session=True,
            )

    def wait(self, timeout_s: float, on_poll: Callable[[], None] | None = None) -> int:
        """The launcher's exit code; calls `on_poll` ten times a second. `TimeoutError` after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (code := self.process.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the job did not end within {timeout_s:g} s; its log is {self.log}")
            if on_poll is not None:
                on_poll()
            time.sleep(0.1)
        return code

    def members(self) -> list[int]:
        """The processes of this job that are alive, orphans too."""
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                # Processes of others cannot be read, and any process may end while it is looked at.
                with suppress(OSError):
                    if self._token.encode() in Path(entry.path, "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def end(self) -> None:
        """Stop the launcher, then whatever of the job is still there."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10.0)
        # A resource tracker ends by itself when all whose semaphores it keeps have ended; killed before, it
        # would leave them in /dev/shm.
        deadline = time.monotonic() + TIDY_S
        while members := self.members():
            trackers = [pid for pid in members if _is_tracker(pid)]
            for pid in members:
                if pid not in trackers or time.monotonic() > deadline:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        self.process.wait(timeout=10.0)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
