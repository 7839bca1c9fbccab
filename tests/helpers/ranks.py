"""Ranks of one job as real processes that do what a test tells them, one call after the other.

Importing torch takes seconds, so the processes are started once and serve many tests. Each is a session of
its own: whatever it starts can be found, and ended, even when it has lost its parent. What a call returns or
raises on each rank comes back as a value; a rank that dies or hangs is an error value too. Every wait has a
deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import psutil

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0
GROUP_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))),
    "OMP_NUM_THREADS": "1",
    # torch asks for the name of each address that connects to its store; a name server that drops the
    # question would hold up all ranks for 5 s.
    "RES_OPTIONS": "timeout:1 attempts:1",
}

Init = Literal["tcp", "agent", "file", "none"]


class RankDied(Exception):
    """The process ended before it had answered."""


class RankHung(Exception):
    """The process did not answer in time; the message has its stacks."""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a call ended on one rank."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    seconds: float = 0.0


class Calls:
    """A call that runs on some ranks."""

    def __init__(self, ranks: Ranks, asked: list[int]) -> None:
        self._ranks = ranks
        self._asked = asked
        self._started = time.monotonic()
        self._results: dict[int, Result] = {}

    def results(self, timeout_s: float = 60.0) -> list[Result]:
        """All results, in rank order; a rank that has not answered by then gives `RankHung`."""
        deadline = self._started + timeout_s
        waiting = {self._ranks.connection(rank): rank for rank in self._asked if rank not in self._results}
        while waiting:
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                self._results[rank] = self._receive(rank, connection)  # type: ignore[arg-type]
        for rank in waiting.values():
            text = f"rank {rank} did not answer within {timeout_s:g} s\n{self._ranks.stacks(rank)}"
            self._results[rank] = Result(rank, error=RankHung(text), trace=text)
        return [self._results[rank] for rank in self._asked]

    def values(self, timeout_s: float = 60.0) -> list[Any]:
        """What the call returned on each rank; fails with the traces if it raised on any."""
        results = self.results(timeout_s)
        traces = [
            f"--- rank {result.rank}:\n{result.trace}" for result in results if result.error is not None
        ]
        assert not traces, "\n".join(traces)
        return [result.value for result in results]

    def errors(self, timeout_s: float = 60.0) -> list[BaseException]:
        """What the call raised on each rank; fails if it returned on any."""
        results = self.results(timeout_s)
        returned = [result.rank for result in results if result.error is None]
        assert not returned, f"nothing was raised on ranks {returned}: {results}"
        return [result.error for result in results if result.error is not None]

    def _receive(self, rank: int, connection: Connection) -> Result:
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            how = self._ranks.exitcode(rank)
            text = f"rank {rank} ended with exit code {how}\n{self._ranks.log(rank)[-4000:]}"
            return Result(rank, error=RankDied(text), trace=text)


class Ranks:
    """`world_size` processes in one gloo group: over a TCPStore in rank 0 ("tcp") or outside the ranks, as
    torchrun's agent has it ("agent"), over a FileStore ("file"), or in none. `before` is a command to start
    them with (`unshare …`); `env` is added to the environment."""

    def __init__(
        self,
        world_size: int = 2,
        *,
        init: Init = "tcp",
        before: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self.world_size = world_size
        # Not pytest's directory: a socket's path may have 107 characters.
        self.directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._store = _serve_store(self.directory) if init == "agent" else None
        environment = {**os.environ, **ENVIRONMENT, **(env or {})}
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(self.directory / "socket"))
                listener.listen()
                for rank in range(world_size):
                    with open(self._log_path(rank), "wb") as log:
                        self._processes[rank] = subprocess.Popen(
                            [
                                *(*before, sys.executable, "-W", "ignore", "-m", "tests.helpers.ranks"),
                                *(str(self.directory), init, str(rank), str(world_size)),
                            ],
                            env=environment,
                            cwd=ROOT,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                        )
                self._accept(listener)
        except BaseException:
            self.close(check=False)
            raise

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        listener.settimeout(0.5)
        while len(self._connections) < self.world_size:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                dead = [rank for rank in self._processes if self.exitcode(rank) is not None]
                late = time.monotonic() > deadline
                assert not dead, f"rank {dead[0]} ended: {self.log(dead[0])}"
                assert not late, "\n".join(self.log(rank) for rank in self._processes)
                continue
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            self._connections[pickle.loads(connection.recv_bytes())] = connection

    def start(self, fn: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> Calls:
        """Let `fn(*args)`, a function of a module, run on `ranks` (default: all)."""
        asked = list(range(self.world_size)) if ranks is None else list(ranks)
        message = pickle.dumps((fn.__module__, fn.__qualname__, args))
        for rank in asked:
            self._connections[rank].send_bytes(message)
        return Calls(self, asked)

    def call(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """What `fn(*args)` returns on each rank."""
        return self.start(fn, *args, ranks=ranks).values(timeout_s)

    def errors(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        timeout_s: float = 60.0,
    ) -> list[BaseException]:
        """What `fn(*args)` raises on each rank."""
        return self.start(fn, *args, ranks=ranks).errors(timeout_s)

    def connection(self, rank: int) -> Connection:
        return self._connections[rank]

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def exitcode(self, rank: int) -> int | None:
        return self._processes[rank].poll()

    def kill(self, rank: int, with_signal: signal.Signals = signal.SIGKILL) -> int:
        """Kill one rank; returns how it ended."""
        self._processes[rank].send_signal(with_signal)
        return self._processes[rank].wait(END_TIMEOUT_S)

    def others(self, rank: int) -> list[psutil.Process]:
        """The processes that `rank` has started and that still run, with or without it."""
        return [process for process in session(self.pid(rank)) if process.pid != self.pid(rank)]

    def log(self, rank: int) -> str:
        return self._log_path(rank).read_text(errors="replace")

    def stacks(self, rank: int) -> str:
        """Where the threads of a rank are, by its own word."""
        if self.exitcode(rank) is None:
            self._processes[rank].send_signal(signal.SIGUSR1)
            time.sleep(0.5)
        return self.log(rank)[-8000:]

    def _log_path(self, rank: int) -> Path:
        return self.directory / f"log-{rank}"

    def close(self, *, check: bool = True) -> None:
        """End the ranks and whatever they have left; with `check`, a rank that does not end by itself is an
        error."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.close()
        deadline = time.monotonic() + END_TIMEOUT_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
        hung = [rank for rank in self._processes if self.exitcode(rank) is None]
        text = "\n".join(f"rank {rank} does not end\n{self.stacks(rank)}" for rank in hung)
        for process in self._processes.values():
            process.kill()
            process.wait()
            for left in session(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
        self._store = None
        shutil.rmtree(self.directory, ignore_errors=True)
        assert not (check and hung), text

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(check=kind is None)


def session(leader: int) -> list[psutil.Process]:
    """The living processes of one session."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def commands(processes: Iterable[psutil.Process]) -> list[str]:
    """Command lines of those that are still there when they are looked at."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(" ".join(process.cmdline()))
    return found


def lives(pid: int) -> bool:
    """Is there such a process, and not only what is left of one that has ended?"""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """The first true value of `condition`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)
    return value


def _serve_store(directory: Path) -> Any:
    """A TCPStore on a free port, told in a file: one that was found free a moment ago may be taken."""
    from datetime import timedelta

    import torch.distributed as dist

    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    (directory / "port.new").write_text(str(store.port))
    (directory / "port.new").rename(directory / "port")
    return store


# --- in the rank ---------------------------------------------------------------------------------


kept: dict[str, Any] = {}
"""What the functions of a test leave for each other on a rank."""


@contextlib.contextmanager
def _group(directory: str, init: Init, rank: int, world_size: int) -> Iterator[None]:
    if init == "none":
        yield
        return
    from datetime import timedelta

    import torch.distributed as dist

    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    if init == "file":
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/group",
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    else:
        if init == "tcp" and rank == 0:
            store = _serve_store(Path(directory))
        else:
            told = Path(directory, "port")
            port = int(wait_until(lambda: told.exists() and told.read_text(), GROUP_TIMEOUT_S))
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def serve(directory: str, init: Init, rank: int, world_size: int) -> None:
    """Do what the test says until it hangs up."""
    faulthandler.register(signal.SIGUSR1)
    with _group(directory, init, rank, world_size):
        with socket.socket(socket.AF_UNIX) as plug:
            plug.connect(f"{directory}/socket")
            connection = Connection(plug.detach())
        connection.send_bytes(pickle.dumps(rank))
        while True:
            try:
                module, name, args = pickle.loads(connection.recv_bytes())
            except EOFError:
                break
            connection.send_bytes(_answer(rank, module, name, args))
        leave = kept.pop("leave", None)
        if leave is not None:
            leave()


def _answer(rank: int, module: str, name: str, args: tuple[Any, ...]) -> bytes:
    started = time.monotonic()
    try:
        value, error, trace = getattr(importlib.import_module(module), name)(*args), None, ""
    except BaseException as raised:
        value, error, trace = None, raised, traceback.format_exc()
    seconds = time.monotonic() - started
    try:
        return pickle.dumps(Result(rank, value, error, trace, seconds))
    except Exception as problem:
        text = f"{trace}\n{error!r} or {value!r} cannot be sent: {problem}"
        return pickle.dumps(Result(rank, error=RuntimeError(text), trace=text, seconds=seconds))


if __name__ == "__main__":
    # The importable module, not this copy, is the one that tests share `kept` with.
    from tests.helpers import ranks

    ranks.serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))  # type: ignore[arg-type]
