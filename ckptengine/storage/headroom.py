"""How much memory can still be taken, before the kernel ends a process for it?

Pages of shared memory are not refused when they are asked for: the kernel finds out when they are touched,
and then ends whatever it thinks best, which may be the training. So it is asked before.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

SHARERS = 16
"""Memory is short if there is not so many times as much as one process takes: a host has up to so many ranks,
which take theirs at once."""
TURN_TIMEOUT_S = 60.0
"""For others to take theirs: who holds the turn may be stopped."""
_POLL_S = 0.02


def available_memory() -> int | None:
    """Bytes that the machine has available, swap included, or that the cgroups of this process leave it,
    whichever is less; None if the kernel tells neither.

    Page cache counts as available, since the kernel gives it up first. It is an estimate: others take and
    give back memory meanwhile.
    """
    memory = meminfo()
    least = memory["MemAvailable"] + memory.get("SwapFree", 0) if "MemAvailable" in memory else None
    for group in cgroups("memory"):
        left = _left_in(group, least)
        if left is not None and (least is None or left < least):
            least = left
    return least


@contextlib.contextmanager
def in_turn(nbytes: int) -> Iterator[None]:
    """Around asking for `nbytes` and taking them: where memory is short, processes of one limit do so one
    after the other, so that each sees what the others have taken. Longer than `TURN_TIMEOUT_S` none waits."""
    available = available_memory()
    if available is None or nbytes * SHARERS <= available:
        yield
        return
    with contextlib.ExitStack() as held:
        place = next((group for group in cgroups("memory") if group.is_dir()), PROC)
        with contextlib.suppress(OSError):  # a lock that cannot be had must not cost the save
            fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            held.callback(os.close, fd)
            if not _locked(fd):
                logger.warning("others have been taking memory for %g s: not waited for", TURN_TIMEOUT_S)
        yield


def _locked(fd: int) -> bool:
    deadline = time.monotonic() + TURN_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def meminfo() -> dict[str, int]:
    """The sizes in /proc/meminfo, in bytes."""
    lines = (_text(PROC / "meminfo") or "").splitlines()
    fields = ((name, rest.split()) for name, _, rest in (line.partition(":") for line in lines))
    return {name: int(values[0]) * 1024 for name, values in fields if values[1:] == ["kB"]}


def cgroups(controller: str) -> list[Path]:
    """The directories, from this process's cgroup up to the root, that may hold a limit of `controller`."""
    found = []
    for line in (_text(PROC / "self" / "cgroup") or "").splitlines():
        _, names, path = line.split(":", 2)
        if not names:  # version 2
            base = CGROUPS
        elif controller in names.split(","):
            base = CGROUPS / names
        else:
            continue
        inner = Path(path.lstrip("/"))
        found += [base / inner, *(base / parent for parent in inner.parents)]
    return found


def _left_in(group: Path, least: int | None) -> int | None:
    """None if it has no limit, or leaves no less than `least` whatever it has in the page cache: to ask for
    that takes the kernel longer than all else here."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
    ):
        limit, usage = _text(group / limit_name), _text(group / usage_name)
        if limit and usage and limit.isdecimal():  # or "max"
            left = int(limit) - int(usage)
            if least is not None and left >= least:
                return None
            return max(0, left + _page_cache(group))
    return None


def _page_cache(group: Path) -> int:
    lines = (_text(group / "memory.stat") or "").splitlines()
    fields = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    # Version 1 has `total_` before what includes the groups below.
    file, shared = ("total_cache", "total_shmem") if "total_cache" in fields else ("file", "shmem")
    return max(0, fields.get(file, 0) - fields.get(shared, 0))


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
