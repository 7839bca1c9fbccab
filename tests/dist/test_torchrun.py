"""A job under torchrun loses a rank in the middle of a save, twice, and goes on by itself each time."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest

import ckptengine as ck
from tests.helpers.checkpoints import read_manifest
from tests.helpers.ranks import wait_until
from tests.helpers.scripts import Script

JOB = Path(__file__).with_name("job.py")
MARK = "CKPT_TEST_JOB"


def processes_of(job: str) -> list[psutil.Process]:
    """torchrun's workers have sessions of their own, but they and theirs keep the environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == job and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_a_job_that_loses_a_rank_in_the_middle_of_a_save_resumes_from_the_last_commit(tmp_path: Path) -> None:
    root = tmp_path / "root"
    torchrun = [
        *("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        *("--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1"),
    ]
    with Script(*torchrun, str(JOB), str(tmp_path), "4", env={MARK: str(tmp_path)}) as script:
        try:
            assert script.ends(220) == 0, script.stdout + script.stderr
            wait_until(lambda: not processes_of(str(tmp_path)))
        finally:
            for process in processes_of(str(tmp_path)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        said = set(script.stdout.splitlines())
    assert {f"rank {rank} goes on from step {step}" for step in range(3) for rank in range(2)} <= said
    assert (tmp_path / "killed-in-2").exists()
    assert (tmp_path / "killed-in-3").exists()
    steps = sorted(path.name for path in root.glob("step-*") if any(path.iterdir()))
    assert steps == ["step-0000000003", "step-0000000004"]
    for name in steps:
        assert ck.verify(root / name, level="data").ok
        manifest = read_manifest(root / name)
        # Nothing is left of the attempts that were cut short.
        assert [path.name for path in (root / name).iterdir() if path.is_dir()] == [manifest.attempt]
