"""A job goes on with other numbers of ranks, sharded in other ways, as if nothing had happened to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.config import parse_config
from trainer.events import read_events
from trainer.launch import Job, torchrun
from trainer.loop import train

# A launch is a few seconds of imports alone, and many more on a machine with other work to do.
pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

STEPS = 12
# No dropout and no noise: what they draw is each rank's own, and other ranks cannot go on with it.
ARGUMENTS = [
    "--steps", str(STEPS), "--save-every", "3", "--dim", "32", "--n-layers", "2", "--n-heads", "2",
    "--n-kv-heads", "2", "--ffn-dim", "48", "--seq-len", "32", "--corpus-mib", "1", "--batch-size", "4",
    "--grad-clip", "1", "--dist-timeout-s", "60",
]  # fmt: skip

TOLERANCE = 2e-5
"""Of a loss near 5.5, relative: gradients are summed over other groups of float32 numbers, and Adam, which
divides by roots of small ones, makes much of their last bits."""


def run(folder: Path, ranks: int, fsdp: str, until: int) -> str:
    """Go on from what is in the folder, up to a step; returns the log."""
    arguments = [
        "--root",
        str(folder / "root"),
        "--events",
        str(folder / "events"),
        "--fsdp",
        fsdp,
        *ARGUMENTS,
    ]
    if until < STEPS:
        arguments += ["--kill-rank", "0", "--kill-step", str(until), "--kill-after-commit"]
    alone = [sys.executable, "-m", "trainer", *arguments]
    log = folder / f"log-{until}"
    with Job(torchrun(arguments, ranks=ranks) if ranks > 1 else alone, log=log) as job:
        code = job.wait(240)
        assert (code == 0) == (until == STEPS), log.read_text()
    return log.read_text()


def losses(folder: Path) -> list[float]:
    """Of each step the mean over its ranks, in the last life that made it."""
    found: dict[int, dict[int, float]] = {}
    for event in read_events(folder / "events"):
        if event["event"] == "start":
            world_size = event["world_size"]
        if event["event"] == "step":
            found.setdefault(event["step"], {})[event["rank"]] = event["loss"]
            assert event["rank"] < world_size
    assert sorted(found) == list(range(1, STEPS + 1))
    return [sum(found[step].values()) / len(found[step]) for step in sorted(found)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("whole")
    train(parse_config(["--root", str(folder / "root"), "--events", str(folder / "events"), *ARGUMENTS]))
    return losses(folder)


def assert_goes_on(folder: Path, lives: list[tuple[int, str]], expected: list[float]) -> None:
    for life, (ranks, fsdp) in enumerate(lives):
        text = run(folder, ranks, fsdp, 3 * (life + 1))
        if life:
            before = lives[life - 1][0]
            assert f"step {3 * life} was saved by {before} ranks, now there are {ranks}" in text
            assert "the random generators are seeded anew on each rank (--resize-rng reseed)" in text
    resumed = [event for event in read_events(folder / "events") if event["event"] == "resume"]
    told: list[tuple[Any, Any]] = sorted({(event["step"], event["saved_by"]) for event in resumed})
    assert told == [(3 * life, lives[life - 1][0]) for life in range(1, len(lives))]
    assert losses(folder) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.sample
def test_other_numbers_of_ranks_continue_the_same_curve(tmp_path: Path, uninterrupted: list[float]) -> None:
    assert_goes_on(tmp_path, [(2, "2"), (4, "1"), (1, "none"), (2, "1")], uninterrupted)


@pytest.mark.slow
def test_and_so_they_do_the_other_way_round(tmp_path: Path, uninterrupted: list[float]) -> None:
    assert_goes_on(tmp_path, [(1, "none"), (4, "2"), (2, "none"), (1, "none")], uninterrupted)
