"""Who ends the workers' helpers when the runner is killed? A process that does nothing but wait for that.

The workers themselves die with the nursery, and that with its runner, as the kernel sees to it. What a worker
has started knows nothing of either, but is in its session. Then the runner's files in memory are removed,
which would take up GiB of it; those on disk wait for the next run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from native_bench import ground, sessions


class Sentinel:
    """Forked from a process that has one thread, before it makes workers. When that has closed it, or has
    died, all sessions that it was told of are ended."""

    def __init__(self) -> None:
        told, self._pipe = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                # Nothing of the others': they would wait for the end of what is open here.
                os.dup2(told, 0)
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, 1)
                os.dup2(null, 2)
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))
                os.setsid()
                _watch()
            finally:
                os._exit(0)
        os.close(told)

    def began(self, leader: int) -> None:
        self._tell(f"+{leader}\n")

    def ended(self, leader: int) -> None:
        """What it has left is still to be ended."""
        self._tell(f"-{leader}\n")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # killed: then nobody ends them, as without it
            os.write(self._pipe, line.encode())

    def forget(self) -> None:
        """In a fork, which must not keep it from noticing the end."""
        os.close(self._pipe)

    def close(self) -> None:
        os.close(self._pipe)
        os.waitpid(self._pid, 0)


def _watch() -> None:
    leaders: dict[int, bool] = {}  # whether it is alive
    with open(0) as lines:
        for line in lines:
            leaders[int(line[1:])] = line[0] == "+"
            for leader in [leader for leader, alive in leaders.items() if not alive]:
                # Its number may soon be another process's.
                if not sessions.members(leader):
                    del leaders[leader]
    for leader in leaders:
        sessions.send(leader, signal.SIGTERM)
    deadline = time.monotonic() + sessions.GENTLE_S
    for leader in leaders:
        sessions.end(leader, deadline)
    ground.sweep()
