"""The command line tool, run in this process where only results matter, and as a process where streams do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import write_checkpoint

SCRIPT = Path(sysconfig.get_path("scripts")) / "ckpt"


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def ckpt(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`main()` in this process."""
    from ckptengine.cli import main

    def run(*args: object) -> Outcome:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["ckpt", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        assert isinstance(end.value.code, int)
        assert "Traceback" not in err
        return Outcome(end.value.code, out, err)

    return run


@pytest.fixture
def ckpt_process() -> Run:
    """The installed console script."""

    def run(*args: object, env: dict[str, str] | None = None) -> Outcome:
        done = subprocess.run(
            [SCRIPT, *map(str, args)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 20 and 100 committed, 300 not."""
    made = tmp_path / "checkpoints"
    write_checkpoint(made, 100, save=2, codec="zstd")
    write_checkpoint(made, 20, save=1, metadata={"loss": 0.5})
    write_checkpoint(made, 300, save=3, commit=False)
    return made
