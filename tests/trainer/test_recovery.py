"""Real jobs under torchrun: a killed rank costs steps, never bits; a damaged root is never a fresh start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import wait_until
from trainer.config import parse_config
from trainer.demo.compare import compare_checkpoints
from trainer.demo.runs import losses
from trainer.events import read_events
from trainer.launch import Job, torchrun
from trainer.loop import train

# A launch is a few seconds of imports alone, and many more on a machine with other work to do.
pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

STEPS, SAVE_EVERY = 8, 3
ARGUMENTS = [
    "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--dim", "32", "--n-layers", "2",
    "--n-heads", "2", "--n-kv-heads", "2", "--ffn-dim", "48", "--seq-len", "32", "--corpus-mib", "1",
    "--dropout", "0.1", "--noise", "0.05", "--grad-clip", "1", "--dist-timeout-s", "60",
]  # fmt: skip


def run(folder: Path, *arguments: str, restarts: int = 0) -> list[dict[str, Any]]:
    folder.mkdir()
    places = ["--root", str(folder / "root"), "--events", str(folder / "events"), "--final-dir", str(folder)]
    command = torchrun([*places, *ARGUMENTS, *arguments], ranks=2, max_restarts=restarts)
    with Job(command, log=folder / "log") as job:
        code = job.wait(180)
        assert code == 0, (folder / "log").read_text()
        # Those that tidy up after the others end a moment later.
        wait_until(lambda: not job.members())
    return read_events(folder / "events")


def assert_same_end(a: Path, b: Path) -> None:
    for rank in range(2):
        mine, theirs = (json.loads((folder / f"final-rank{rank}.json").read_text()) for folder in (a, b))
        assert mine == theirs
        assert mine["step"] == STEPS
    assert losses(read_events(a / "events")) == losses(read_events(b / "events"))
    comparison = compare_checkpoints(a / "root", b / "root")
    assert comparison.equal, comparison.differences
    assert comparison.n_tensors > 20


def assert_a_kill_costs_steps_and_no_bits(folder: Path, fsdp: str) -> None:
    kill = ["--kill-rank", "1", "--kill-step", "5", "--kill-after-commit"]
    events = run(folder / "killed", "--fsdp", fsdp, *kill, restarts=1)
    assert [(e["rank"], e["step"]) for e in events if e["event"] == "kill"] == [(1, 5)]
    resumed = sorted((e["rank"], e["life"], e["step"]) for e in events if e["event"] == "resume")
    assert resumed == [(0, 1, 3), (1, 1, 3)]
    run(folder / "whole", "--fsdp", fsdp)
    assert_same_end(folder / "killed", folder / "whole")


def test_fsdp2_killed_between_two_checkpoints_loses_steps_and_no_bits(tmp_path: Path) -> None:
    assert_a_kill_costs_steps_and_no_bits(tmp_path, "2")


@pytest.mark.slow
@pytest.mark.sample
def test_fsdp1_killed_between_two_checkpoints_loses_steps_and_no_bits(tmp_path: Path) -> None:
    assert_a_kill_costs_steps_and_no_bits(tmp_path, "1")


@pytest.mark.slow
def test_a_kill_during_a_save_restarts_from_what_was_committed_then(tmp_path: Path) -> None:
    kill = ["--kill-rank", "1", "--kill-step", "6"]
    events = run(tmp_path / "killed", *kill, restarts=1)  # DDP: the same state on both ranks
    assert sum(e["event"] == "kill" for e in events) == 1
    second_life = [e for e in events if e["life"] == 1 and e["event"] in ("resume", "scratch")]
    began = [(e["event"], e.get("step")) for e in second_life]
    assert began in [[how] * 2 for how in (("scratch", None), ("resume", 3), ("resume", 6))]
    run(tmp_path / "whole")
    assert_same_end(tmp_path / "killed", tmp_path / "whole")


def test_a_damaged_checkpoint_ends_the_run_with_a_line_that_names_it(tmp_path: Path) -> None:
    alone = ["--root", str(tmp_path / "root"), *ARGUMENTS, "--save-every", "0"]
    train(parse_config(alone))
    (shard,) = (tmp_path / "root").rglob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5000] ^= 1
    shard.write_bytes(data)
    command = [sys.executable, "-m", "trainer", *alone, "--events", str(tmp_path / "events")]
    with Job(command, log=tmp_path / "log") as job:
        assert job.wait(60) == 1
    text = (tmp_path / "log").read_text()
    assert "trainer: rank 0: CorruptCheckpointError:" in text
    assert shard.name in text
    assert "Traceback" not in text
    assert not [e for e in read_events(tmp_path / "events") if e["event"] in ("scratch", "step")]
