"""The workers of one system: started together, ordered together, ended together, never waited for without
end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from native_bench import sessions
from native_bench.cases import Case
from native_bench.nursery import Child, Nursery
from native_bench.worker import Answer, Order, Setup

START_S = 300.0
"""All systems start at once, and some import for ten seconds of CPU time."""
END_S = 30.0
GRACE_S = 10.0
"""For the other ranks to fail, too, once one has."""


class TeamError(Exception):
    """A system failed: raised an error, died, or did not answer in time. killed: by SIGKILL, which nobody
    here sends to a worker that is waited for."""

    def __init__(self, message: str, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class Missing(Exception):
    """A system cannot be measured here."""


class Team:
    """One process per rank. After a `TeamError` or `Missing` its processes are gone."""

    def __init__(
        self, system: str, case: Case, memories: Sequence[tuple[int, int]], nursery: Nursery
    ) -> None:
        """Start them, so that they import what they need while others do; `wait` before ordering anything.

        memories: each rank's descriptors of state and target.
        """
        self.system = system
        port = _free_port()
        self._logs = [tempfile.TemporaryFile() for _ in memories]  # noqa: SIM115  closed in `kill`
        self._processes: list[Child] = []
        self._dismissed = False
        self._buffers = [b""] * len(memories)
        threads = max(1, len(os.sched_getaffinity(0)) // len(memories))
        try:
            for rank, (state_fd, target_fd) in enumerate(memories):
                setup = Setup(
                    system=system,
                    case=case,
                    rank=rank,
                    port=port,
                    state_fd=state_fd,
                    target_fd=target_fd,
                    threads=threads,
                )
                self._processes.append(nursery.start(setup, self._logs[rank].fileno()))
        except BaseException:
            self.kill()
            raise
        self.traits: dict[str, Any] = {}

    def wait(self) -> None:
        """Until all ranks are ready."""
        try:
            answers = self._gather(START_S, "start")
        except BaseException:
            self.kill()
            raise
        self.traits = answers[0].traits
        for answer in answers:
            if answer.missing is not None:
                self.kill()
                raise Missing(answer.missing)

    def order(self, order: Order, timeout_s: float) -> dict[str, float]:
        """Have all ranks do it. Returns the slowest rank's figures."""
        try:
            self._send(order)
            answers = self._gather(timeout_s, order.do)
        except BaseException:
            self.kill()
            raise
        names = answers[0].figures
        return {name: max(answer.figures[name] for answer in answers) for name in names}

    def dismiss(self) -> None:
        """Have it end by itself, and do not wait for that yet."""
        self._send(Order(do="end"))
        self._dismissed = True

    def close(self) -> None:
        """Let it end by itself, then make sure."""
        if not self._dismissed:
            self.dismiss()
        try:
            if self._processes:
                self._gather(END_S, "end")
        except TeamError:
            pass  # it did what was asked of it before
        self.kill()

    def _send(self, order: Order) -> None:
        line = msgspec.json.encode(order) + b"\n"
        for process in self._processes:
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it has died; `_gather` says how

    def terminate(self) -> None:
        """Ask what is left of each worker's session to end: one that has ended may have left helpers
        behind."""
        for process in self._processes:
            sessions.send(process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End them, gently at first."""
        self.terminate()
        deadline = time.monotonic() + sessions.GENTLE_S
        for process in self._processes:
            sessions.end(process.pid, deadline)
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        for log in self._logs:
            log.close()
        self._processes, self._logs = [], []

    def _gather(self, timeout_s: float, what: str) -> list[Answer]:
        """One answer from each rank. The first that fails decides, after the others had the time to fail,
        too."""
        answers: dict[int, Answer] = {}
        problems: dict[int, str] = {}
        killed = False
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) + len(problems) < len(self._processes):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                for key, _ in selector.select(left):
                    rank = key.data
                    data = os.read(key.fd, 1 << 16)
                    self._buffers[rank] += data
                    line, newline, rest = self._buffers[rank].partition(b"\n")
                    if newline:
                        self._buffers[rank] = rest
                        answer = msgspec.json.decode(line, type=Answer)
                        if answer.error is None:
                            answers[rank] = answer
                        else:
                            problems[rank] = answer.error
                    elif data:
                        continue
                    else:
                        code = self._processes[rank].wait()
                        killed = killed or code == -signal.SIGKILL
                        problems[rank] = f"{_how_died(code)}{self._last(rank)}"
                    selector.unregister(key.fileobj)
                    if problems:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in range(len(self._processes)):
            if rank not in answers and rank not in problems and not problems:
                raise TeamError(
                    f"{what}: no answer from rank {rank} within {timeout_s:.0f} s{self._last(rank)}"
                )
        if problems:
            # Which rank's problem was the cause, and which the effect, is for the reader to see.
            told = [
                f"rank {rank}: {problem}" if len(self._processes) > 1 else problem
                for rank, problem in sorted(problems.items())
            ]
            raise TeamError(f"{what}: {'; '.join(told)}", killed)
        return [answers[rank] for rank in range(len(self._processes))]

    def _last(self, rank: int) -> str:
        """The last line of a worker's log."""
        log = self._logs[rank]
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - 4096))
        lines = log.read().decode(errors="replace").strip().splitlines()
        return f"; its last words: {lines[-1][:300]}" if lines else ""


def _how_died(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was ended by SIGKILL, most likely by the kernel as memory ran out (dmesg tells)"
    if code < 0:
        return f"died of signal {-code}"
    return f"died with exit status {code}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
