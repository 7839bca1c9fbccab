"""Do the cheap things stay cheap: is torch left alone where it is not needed?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckptengine.tracing.recorder import Recorder
from tests.helpers.checkpoints import write_checkpoint

REPORT = "print('IMPORTED', *{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
RUN = (
    """
import sys
sys.argv = ["ckpt", *sys.argv[1:]]
from ckptengine.cli import main
try:
    main()
finally:
    """
    + REPORT
)


def imported_by(code: str, *args: object) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.rpartition("IMPORTED ")[2].split())


def test_importing_the_package_imports_almost_nothing() -> None:
    found = imported_by(f"import ckptengine, sys; {REPORT}")
    assert not found & {"torch", "numpy", "msgspec", "typer", "rich", "nvidia_resiliency_ext"}


@pytest.mark.parametrize(
    ("args", "without"),
    [
        (["list"], {"torch", "numpy", "rich"}),
        (["inspect"], {"torch", "numpy", "rich"}),
        (["inspect", "--json"], {"torch", "numpy", "rich"}),
        (["inspect", "embed.weight"], {"torch", "rich"}),
        (["verify", "--level", "sizes"], {"torch", "numpy", "rich"}),
        (["verify"], {"torch", "rich"}),
    ],
)
def test_a_command_imports_only_what_it_needs(tmp_path: Path, args: list[str], without: set[str]) -> None:
    write_checkpoint(tmp_path, 1)
    found = imported_by(RUN, args[0], tmp_path, *args[1:])
    assert not found & without


def test_the_version_needs_no_import_of_what_it_names() -> None:
    assert not imported_by(RUN, "--version") & {"torch", "numpy", "rich", "nvidia_resiliency_ext"}


def test_looking_at_a_trace_needs_no_torch(tmp_path: Path) -> None:
    trace = Recorder(str(tmp_path), 0, "trainer")
    trace.add("read", "io", 0, 1)
    trace.close()
    outputs = ["-o", tmp_path / "out.json", "--svg", tmp_path / "out.svg"]
    assert not imported_by(RUN, "trace", tmp_path, *outputs) & {"torch", "numpy", "rich"}


def test_errors_need_no_torch_either() -> None:
    names = "ck.CorruptCheckpointError, ck.Config, ck.CommitInfo, ck.verify"
    assert "torch" not in imported_by(f"import ckptengine as ck, sys; {names}; {REPORT}")
