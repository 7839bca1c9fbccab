"""Workers without the seconds that each would need to import torch: forked from one process that has done so.

    python -m native_bench.nursery SOCKET_FD

is that process. It has one thread of Python, makes no tensor and opens nothing, so that a worker begins as if
it had imported everything itself. It ends, and with it its workers and what they have started, when the
socket is closed or its starter dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

import msgspec

from native_bench import worker
from native_bench.sentinel import Sentinel
from native_bench.worker import Setup

PR_SET_PDEATHSIG = 1
MAX_FDS = 8
MAX_REQUEST_NBYTES = 1 << 16
START_S = 120.0

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.staging",
    "ckptengine.checkpointer",
    "safetensors.torch",
)
"""What most systems import. Others import the rest themselves."""


class Child:
    """A worker: `stdin` and `stdout` as of a `subprocess.Popen`, and how it ended."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], status: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._status = status
        self._code: int | None = None

    def wait(self) -> int:
        """Its exit status, negative for a signal, when it has ended."""
        if self._code is None:
            told = self._status.read()
            self._code = int(told) if told else -signal.SIGKILL  # the nursery has died, and so it has
            self._status.close()
        return self._code


class Nursery:
    """Starts workers. A context manager; leaving it ends those that are left."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "native_bench.nursery", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": path, "TQDM_DISABLE": "1", "JAX_PLATFORMS": "cpu"},
                start_new_session=True,
            )
        self._socket = ours
        self._socket.settimeout(START_S)

    def start(self, setup: Setup, log: int) -> Child:
        """A worker that leads a session of its own. log: a descriptor for what it prints.

        Raises OSError with the nursery's last words if that has died.
        """
        child_in, stdin = os.pipe()
        stdout, child_out = os.pipe()
        status, told = os.pipe()
        fds = [child_in, child_out, log, told, setup.state_fd, setup.target_fd]
        try:
            socket.send_fds(self._socket, [msgspec.json.encode(setup)], fds)
            answer = self._socket.recv(64)
        except OSError as exc:
            for fd in (stdin, stdout, status):
                os.close(fd)
            raise OSError(f"no worker can be started: {self._last_words() or exc}") from exc
        finally:
            for fd in (child_in, child_out, told):
                os.close(fd)
        files = [os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb", buffering=0), os.fdopen(status, "rb")]
        if not answer:
            for file in files:
                file.close()
            raise OSError(f"no worker can be started: {self._last_words()}")
        return Child(int(answer), *files)

    def _last_words(self) -> str:
        self._process.kill()
        _, said = self._process.communicate()
        lines = said.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(requests: socket.socket, sentinel: Sentinel) -> None:
    """Fork a worker for each request, and tell how each one ended, until the socket is closed."""
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not requests:
                    pid, told = key.data
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _tell(pid, told)
                    sentinel.ended(pid)
                    continue
                data, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_NBYTES, MAX_FDS)
                if not data:
                    return
                pid = os.fork()
                if pid == 0:
                    sentinel.forget()
                    # What belongs to the other workers, and is not to outlive them.
                    for other in list(selector.get_map().values()):
                        os.close(other.fd)
                        if other.data is not None:
                            os.close(other.data[1])
                    _become_worker(msgspec.json.decode(data, type=Setup), fds)
                sentinel.began(pid)
                requests.send(str(pid).encode())
                told = fds.pop(3)
                for fd in fds:
                    os.close(fd)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, told))


def _tell(pid: int, told: int) -> None:
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
    os.close(told)


def _become_worker(setup: Setup, fds: list[int]) -> None:
    try:
        os.setsid()
        stdin, stdout, log, told, state, target = fds
        for fd, number in ((stdin, 0), (stdout, 1), (log, 2)):
            os.dup2(fd, number)
            os.close(fd)
        os.close(told)
        worker.main(msgspec.structs.replace(setup, state_fd=state, target_fd=target))
    except BaseException as exc:
        sys.stderr.write(f"{type(exc).__name__}: {exc}\n")
        os._exit(1)
    os._exit(0)


def main() -> None:
    from importlib import import_module

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    sentinel = Sentinel()
    for module in PRELOADED:
        # What cannot be imported here, the systems that need it will say.
        with contextlib.suppress(ImportError):
            import_module(module)
    serve(requests, sentinel)
    sentinel.close()


if __name__ == "__main__":
    main()
