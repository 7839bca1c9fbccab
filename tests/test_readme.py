"""Does the code in README.md run as printed?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
TEN_LINES, TRAIN, READ = BLOCKS


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_ten_lines_run_and_continue(tmp_path: Path) -> None:
    import ckptengine as ck

    assert len([line for line in TEN_LINES.splitlines() if line]) <= 10
    (tmp_path / "ten.py").write_text(TEN_LINES)
    for last in (1, 3):
        run([sys.executable, "ten.py"], tmp_path)
        report = ck.verify(tmp_path / "first-checkpoints")
        assert (report.ok, report.step) == (True, last)


@pytest.mark.dist
@pytest.mark.timeout(300)  # four starts of torch
def test_the_quick_start_runs_and_the_result_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "read.py").write_text(READ)

    def torchrun(ranks: int) -> list[str]:
        module = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*module, "--nproc-per-node", str(ranks), "train.py"]

    first = run(torchrun(2), tmp_path)
    assert first.count("the newest commit is step 40") == 2
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("step-"))
    assert kept == ["step-0000000030", "step-0000000040"]
    assert "rank 1 continues after step 40" in run(torchrun(2), tmp_path)
    alone = run(torchrun(1), tmp_path)
    assert "rank 0 continues after step 40" in alone
    assert "rank 1" not in alone
    assert "train.model.0.weight" in run([sys.executable, "read.py"], tmp_path)
