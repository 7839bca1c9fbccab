"""How is everybody in a worker's session ended, the helpers it has left included? Gently, then by force, and
multiprocessing's resource trackers last: they remove the others' semaphores from /dev/shm."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

GENTLE_S = 3.0
TIDY_S = 5.0
"""For resource trackers to tidy up after the others."""


def send(leader: int, number: int) -> bool:
    """Signal all in the session's group. Whether there is anybody left."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return False
    return True


def end(leader: int, deadline: float) -> None:
    """End what does not end by itself, after SIGTERM, until `deadline` (of the monotonic clock)."""
    while send(leader, 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    # Killed with the others, a resource tracker would leave their semaphores.
    while (left := members(leader)) and time.monotonic() < deadline + TIDY_S:
        for pid in left:
            if not is_tracker(pid):
                _kill(pid)
        time.sleep(0.02)
    send(leader, signal.SIGKILL)


def is_tracker(pid: int) -> bool:
    """Is it a resource tracker of multiprocessing?"""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def lives(pid: int) -> bool:
    """Not if it has ended and is only waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def members(leader: int) -> list[int]:
    """The processes of the leader's group that are alive."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue  # it has just ended
            state, _, group = stat.rpartition(")")[2].split()[:3]
            if int(group) == leader and state not in "ZX":
                found.append(int(name))
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has just ended
