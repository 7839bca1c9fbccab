"""A job's processes end with it, orphans too, and its wait is bounded."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.helpers.ranks import wait_until
from trainer.launch import Job

ORPHAN = """
import os, subprocess, sys, time
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print(sleeper.pid, flush=True)
{then}
"""


def start(then: str, log: Path) -> Job:
    return Job([sys.executable, "-c", ORPHAN.format(then=then)], log=log)


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            # A killed orphan may stay a zombie where nothing reaps it; it is gone all the same.
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_an_orphan_is_a_member_and_ends_with_the_job(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start("sys.exit(3)", log) as job:
        assert job.wait(60) == 3
        orphan = int(log.read_text())
        assert job.members() == [orphan]
    assert gone(orphan)
    assert job.members() == []


def test_a_job_that_does_not_end_is_a_timeout_that_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    polls = iter(range(3))
    with start("time.sleep(300)", log) as job:
        with pytest.raises(StopIteration):
            job.wait(30, lambda: next(polls))
        with pytest.raises(TimeoutError, match=str(log)):
            job.wait(0.5)
        wait_until(lambda: log.read_text().endswith("\n"))
        members = job.members()
        assert len(members) == 2
    assert all(gone(pid) for pid in members)


def test_semaphores_of_a_job_that_is_killed_are_removed(tmp_path: Path) -> None:
    """By its resource tracker, which must not be killed with the others."""
    log = tmp_path / "log"
    script = """
import multiprocessing, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, flush=True)
time.sleep(300)
"""
    leader = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {script!r}])"
    with Job([sys.executable, "-c", leader], log=log) as job:
        assert job.wait(60) == 0
        wait_until(lambda: log.read_text().endswith("\n"))
        file = Path("/dev/shm") / f"sem.{log.read_text().strip().lstrip('/')}"
        assert file.exists()
        assert len(job.members()) == 2
    assert not file.exists()
    assert job.members() == []
