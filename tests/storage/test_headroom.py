"""Is a snapshot that does not fit refused, where it would otherwise get a process killed?"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pytest

from ckptengine.storage import headroom
from ckptengine.storage.headroom import SHARERS, available_memory, in_turn
from tests.helpers.memory_groups import memory_group

MIB = 1 << 20


def test_the_machine_has_what_psutil_says() -> None:
    available = available_memory()
    assert available is not None
    there = psutil.virtual_memory()
    assert min(there.available / 2, 256 * MIB) < available <= there.total + psutil.swap_memory().total


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 100 MiB available and 1 MiB of swap, without cgroups."""
    monkeypatch.setattr(headroom, "PROC", tmp_path / "proc")
    monkeypatch.setattr(headroom, "CGROUPS", tmp_path / "cgroups")
    available = "MemTotal: 999999 kB\nMemAvailable: 102400 kB\nSwapFree: 1024 kB\n"
    write(tmp_path / "proc/meminfo", available)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_limits_it_is_what_the_machine_has(kernel: Path) -> None:
    assert available_memory() == 101 * MIB
    write(kernel / "proc/self/cgroup", "0::/job\n")
    write(kernel / "cgroups/job/memory.max", "max\n")
    write(kernel / "cgroups/job/memory.current", "12345\n")
    assert available_memory() == 101 * MIB
    (kernel / "proc/meminfo").unlink()
    assert available_memory() is None


@pytest.mark.parametrize("limited", ["job/pod", "job", ""])
def test_any_group_above_may_be_the_tightest(kernel: Path, limited: str) -> None:
    write(kernel / "proc/self/cgroup", "0::/job/pod\n")
    group = kernel / "cgroups" / limited
    write(group / "memory.max", f"{60 * MIB}\n")
    write(group / "memory.current", f"{50 * MIB}\n")
    # 30 MiB of files, 10 of which are shared memory and stay.
    write(group / "memory.stat", f"anon 1\nfile {30 * MIB}\nkernel 7\nshmem {10 * MIB}\n")
    assert available_memory() == 30 * MIB
    write(group / "memory.current", f"{90 * MIB}\n")  # more than the limit: it has just been lowered
    assert available_memory() == 0


def test_version_1_groups_limit_too(kernel: Path) -> None:
    write(kernel / "proc/self/cgroup", "5:cpu,cpuacct:/other\n4:memory:/job\n0::/\n")
    group = kernel / "cgroups/memory/job"
    write(group / "memory.limit_in_bytes", f"{60 * MIB}\n")
    write(group / "memory.usage_in_bytes", f"{50 * MIB}\n")
    write(group / "memory.stat", f"cache 0\nshmem 0\ntotal_cache {9 * MIB}\ntotal_shmem {4 * MIB}\n")
    assert available_memory() == 15 * MIB


def test_a_snapshot_beyond_the_limit_of_the_job_is_refused_and_nobody_is_killed() -> None:
    script = textwrap.dedent("""
        import os, sys
        with open(sys.argv[1], "w") as procs:
            procs.write(str(os.getpid()))
        from ckptengine.errors import SaveFailedError
        from ckptengine.staging.arena import Arena
        from ckptengine.staging.pool import ArenaPool
        try:
            Arena(512 << 20)
        except SaveFailedError as error:
            print(error, error.hint)
        with ArenaPool(max_arenas=2) as pool:
            first = pool.acquire(150 << 20, 1.0)
            try:
                pool.acquire(150 << 20, 0.2)
            except Exception as error:
                print(type(error).__name__)
            pool.release(first)
            # The free one is too small, and in the way.
            pool.release(pool.acquire(170 << 20, 1.0))
        print("alive")
    """)
    with memory_group(256 * MIB) as group:
        run = subprocess.run(
            [sys.executable, "-c", script, str(group / "cgroup.procs")],
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert run.returncode == 0, run.stderr
    refused, waited, end = run.stdout.splitlines()
    assert refused.startswith(f"no memory for a snapshot of {512 * MIB} bytes: ")
    assert "are available" in refused
    assert "raise the memory limit of the job" in refused
    assert waited == "CommitTimeoutError", "a save that is still being written gives its memory back"
    assert end == "alive"


def test_who_takes_short_memory_waits_for_who_is_taking_some(kernel: Path) -> None:
    entered = threading.Event()

    def take() -> None:
        with in_turn(101 * MIB // SHARERS + 1):
            entered.set()

    taking = threading.Thread(target=take)
    with in_turn(50 * MIB):
        taking.start()
        assert not entered.wait(0.3)
        with in_turn(101 * MIB // SHARERS):  # of this there is plenty
            pass
    taking.join(10.0)
    assert entered.is_set()


def test_nobody_waits_for_long(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that holds the turn may have been stopped."""
    monkeypatch.setattr(headroom, "TURN_TIMEOUT_S", 0.1)
    with in_turn(50 * MIB), in_turn(50 * MIB):
        pass


def test_a_machine_that_tells_nothing_has_no_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "PROC", tmp_path)
    with in_turn(1 << 60), in_turn(1 << 60):
        pass
