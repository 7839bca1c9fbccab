"""The adapter and the engine on other versions of NVRx than the one that is installed.

Their wheels need a newer glibc or Python for a profiler that is not used here; their Python part runs from
where it is unpacked, put before the installed one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLATFORM = "manylinux_2_39_x86_64"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(params=["0.5.0", "0.6.0", pytest.param("0.7.0", marks=pytest.mark.sample)])
def nvrx(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory with that version's Python part."""
    wheels = request.config.cache.mkdir("nvrx")
    found = list(wheels.glob(f"*-{request.param}-*.whl"))
    if not found:
        download = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
                *("--python-version", "3.12", "--platform", PLATFORM, "--dest", str(wheels)),
                f"nvidia-resiliency-ext=={request.param}",
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        found = list(wheels.glob(f"*-{request.param}-*.whl"))
        if not found:
            pytest.skip(f"the wheel cannot be had: {download.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(found[0]) as wheel:
        wheel.extractall(tmp_path)
    return tmp_path


def run(nvrx: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(nvrx)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


def pytest_with(nvrx: Path, *arguments: str) -> str:
    return run(nvrx, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


def test_the_adapter(nvrx: Path) -> None:
    where = run(nvrx, "-c", "import nvidia_resiliency_ext as n; print(n.__file__)")
    assert where.startswith(str(nvrx))
    assert " passed" in pytest_with(nvrx, "tests/adapters/test_nvrx.py")


def test_ranks_save_restore_and_survive_a_killed_writer_or_trainer(nvrx: Path) -> None:
    chosen = "own_tensors or training or writer_killed or writer_that_hangs or trainer_killed"
    assert " passed" in pytest_with(
        nvrx, "tests/dist/test_save_restore.py", "tests/dist/test_traps.py", "-k", chosen
    )
