"""Groups of processes: one that fails is heard of at once, and none is left."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from native_bench.rank_group import run_group
from tests.helpers.ranks import lives

LATER_S = 60.0
"""Nothing here waits for so long, unless for the wrong process."""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that a group can run; `run` gives it its text."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path / "some_task.py"


def run(task: Path, text: str, deadline_s: float = LATER_S, world: int = 3) -> dict[str, list[float]]:
    task.write_text(
        f"""
import json, os, pathlib, signal, sys, time
work, rank, quick = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
(work / f"pid-{{rank}}").write_text(str(os.getpid()))
{text}
"""
    )
    work = task.parent
    try:
        return run_group("some_task", [str(work)], world, True, work / "found.json", deadline_s)
    finally:
        assert not [pid for pid in work.glob("pid-*") if pid.read_text() and lives(int(pid.read_text()))]


def test_the_figures_are_those_that_a_rank_has_written(task: Path) -> None:
    figures = {"a": [1.0, 2.0]}
    written = f"if rank == 2: (work / 'found.json').write_text({json.dumps(json.dumps(figures))})"
    assert run(task, written) == figures


def test_without_figures_there_are_none(task: Path) -> None:
    assert run(task, "print('nothing')") == {}


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("sys.exit('THE REAL REASON')", r"^found: rank 1 ended with exit status 1: THE REAL REASON$"),
        ("raise ValueError('no room')", r"^found: rank 1 ended with exit status 1: .*ValueError: no room$"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"^found: rank 1 was ended by SIGKILL$"),
        ("print('half', flush=True); os._exit(7)", r"^found: rank 1 ended with exit status 7: half$"),
    ],
)
def test_a_rank_that_fails_is_told_at_once_while_others_wait(task: Path, failure: str, said: str) -> None:
    others = f"print('I wait', flush=True); time.sleep({LATER_S})"
    with pytest.raises(RuntimeError, match=f"(?s){said}"):
        run(task, f"if rank == 1:\n    {failure}\n{others}")


def test_all_ranks_have_one_deadline(task: Path) -> None:
    """It does not begin anew with each that has ended."""
    with pytest.raises(subprocess.TimeoutExpired, match=r"timed out after 1\.0 seconds"):
        run(task, "time.sleep(0.7 * (rank + 1))", deadline_s=1.0)
