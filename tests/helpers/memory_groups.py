"""A limit on the memory of processes, as a job's container has it: in a real cgroup."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ckptengine.storage.headroom import CGROUPS, cgroups
from tests.helpers.ranks import wait_until


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A real cgroup below this process's own."""
    for parent in cgroups("memory"):
        group = parent / f"ckptengine-test-{uuid.uuid4().hex[:8]}"
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                group.mkdir()
            except OSError:
                continue
            try:
                (group / name).write_text(str(limit))
            except OSError:
                group.rmdir()
                continue
            try:
                yield group
            finally:
                # A process that was killed leaves it a moment later.
                wait_until(partial(_is_empty, group))
                group.rmdir()
            return
    pytest.skip(f"no memory cgroup can be made below {CGROUPS}")


def _is_empty(group: Path) -> bool:
    return not (group / "cgroup.procs").read_text()


def kills(group: Path) -> int:
    """How many of its processes the kernel has ended for want of memory."""
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError):
            fields = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(fields["oom_kill"])
    raise AssertionError(f"{group} does not tell")
