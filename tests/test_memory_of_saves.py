"""What do many saves leave behind, in the trainer and in its writer? Nothing that grows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptengine import Config
from tests.helpers.ranks import ENVIRONMENT, ROOT

MIB = 1 << 20
KINDS = [("copy", "raw"), ("overlap", "raw"), ("copy", "zstd")]
GROWTH_NBYTES = 2 * MIB
"""Between two windows of saves; what an allocator keeps differs by that much."""


def saves(root: Path, count: int, snapshot: str, codec: str) -> list[dict[str, Any]]:
    """What is held before the first save of a state, and after each."""
    run = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "tests.helpers.steady_saves"),
            *(str(root), str(count), snapshot, codec),
        ],
        # Else the C library keeps as much of what was freed as it last saw asked for at once.
        env={**os.environ, **ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_": "65536"},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    held = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(held) == 1 + count
    return held


def check(held: list[dict[str, Any]], codec: str, *, warm: int, window: int) -> None:
    """Least of the saves just after the first `warm`, against the least of the last: the writer may still be
    deleting an older step when a save has committed."""
    first, last = held[warm : warm + window], held[-window:]
    for process in ("trainer", "writer"):
        for what, allowed in (
            ("anonymous", GROWTH_NBYTES),
            ("shared", GROWTH_NBYTES),
            ("fds", 0),
            ("threads", 0),
            ("shm", 0),
        ):
            then, now = (min(line[process][what] for line in part) for part in (first, last))
            assert now <= then + allowed, (
                f"{what} of the {process}: {then}, {len(held) - warm} saves later {now}"
            )
    before = held[0]
    arenas = max(line["arenas"] for line in held)
    assert arenas <= before["state"] * 1.01 + 4 * MIB, "one save at a time needs one arena"
    added = {
        (process, what): max(line[process][what] for line in held) - before[process][what]
        for process in ("trainer", "writer")
        for what in ("anonymous", "shared")
    }
    # Both processes map the arena; it is there once.
    shared = max(added["trainer", "shared"], added["writer", "shared"])
    config = Config()
    # To compress, each thread has a block as it becomes and as it is written.
    buffers = 0 if codec == "raw" else 2 * config.io_threads * config.block_nbytes
    beyond = added["trainer", "anonymous"] + added["writer", "anonymous"] + shared - arenas
    assert beyond <= 64 * MIB + buffers, added


@pytest.mark.parametrize(("snapshot", "codec"), KINDS)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_saves_leave_nothing_behind(tmp_path: Path, snapshot: str, codec: str) -> None:
    check(saves(tmp_path / "root", 200, snapshot, codec), codec, warm=20, window=10)


@pytest.mark.parametrize(("snapshot", "codec"), KINDS)
@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.timeout(300)
def test_thirty_saves_leave_nothing_behind(tmp_path: Path, snapshot: str, codec: str) -> None:
    check(saves(tmp_path / "root", 30, snapshot, codec), codec, warm=12, window=6)
