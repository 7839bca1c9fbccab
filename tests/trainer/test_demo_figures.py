"""The demonstration's figures follow from its events, and it empties no folder but its own."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import ckptengine as ck
from trainer.demo.__main__ import Phases, Result, table_of
from trainer.demo.compare import Comparison, compare_checkpoints, same_bytes
from trainer.demo.runs import DemoError, losses, progress, recovery, save_figures, wipe


def event(name: str, time: float, rank: int = 0, life: int = 0, **fields: Any) -> dict[str, Any]:
    return {"event": name, "time": time, "rank": rank, "life": life, **fields}


EVENTS = [
    *(event("scratch", 0.5, rank) for rank in range(2)),
    *(event("step", 1.0, rank, step=1, loss=5.0) for rank in range(2)),
    event("save_requested", 1.1, step=1, stall_s=0.002),
    event("save_requested", 1.1, 1, step=1, stall_s=0.004),
    event("save_committed", 2.0, step=1, nbytes=3 << 30, staged=1.0, committed=2.5),
    event("save_committed", 2.0, 1, step=1, nbytes=3 << 30, staged=1.0, committed=9.0),
    event("step", 3.0, step=2, loss=4.0),
    event("step", 3.0, 1, step=2, loss=4.5),
    event("kill", 4.0, 1, step=2),
    event("resume", 9.0, 0, 1, step=1, nbytes=1 << 30, seconds=0.5, read_seconds=0.25),
    event("resume", 9.0, 1, 1, step=1, nbytes=1 << 30, seconds=1.0, read_seconds=0.5),
    event("step", 10.0, 0, 1, step=2, loss=4.0),
    event("step", 10.5, 1, 1, step=2, loss=4.25),
]


def test_recovery_counts_lost_steps_and_waits_for_the_slowest_rank() -> None:
    cost = recovery(EVENTS)
    assert (cost.steps_lost, cost.resumed_from, cost.resume_s) == (1, 1, 6.5)
    assert (cost.restore_s, cost.read_gib_s) == (1.0, 4.0)


def test_recovery_of_a_job_that_was_not_killed_or_did_not_resume_is_an_error() -> None:
    with pytest.raises(DemoError, match="0 were"):
        recovery([e for e in EVENTS if e["event"] != "kill"])
    with pytest.raises(DemoError, match="resumed once"):
        recovery([e for e in EVENTS if (e["event"], e["rank"]) != ("resume", 1)])


def test_save_figures_are_the_stall_of_all_ranks_and_the_coordinators_commit() -> None:
    figures = save_figures(EVENTS)
    assert (figures.saves, figures.nbytes, figures.gib_s) == (1, 3 << 30, 2.0)
    assert figures.stall_ms == pytest.approx(3.0)


def test_a_step_done_again_replaces_the_lost_one() -> None:
    assert losses(EVENTS) == {(0, 1): 5.0, (1, 1): 5.0, (0, 2): 4.0, (1, 2): 4.25}


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        (0, ("starting", 0)),
        (2, ("training", 0)),
        (10, ("training", 2)),
        (11, ("rank 1 killed, restarting", 2)),
        (12, ("training", 1)),
    ],
)
def test_progress_says_what_the_job_is_doing(until: int, expected: tuple[str, int]) -> None:
    assert progress(EVENTS[:until]) == expected


def test_the_table_has_a_row_for_each_figure_and_says_no_when_bits_differ() -> None:
    results = [
        Result("FSDP1", recovery(EVENTS), save_figures(EVENTS), 9, 100, ()),
        Result("FSDP2", recovery(EVENTS), save_figures(EVENTS), 9, 100, ("x differs",)),
    ]
    console = Console(file=io.StringIO(), width=100)
    console.print(table_of(results))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    (verdict,) = [line for line in text.splitlines() if "equal bit for bit" in line]
    assert "yes" in verdict
    assert "NO" in verdict
    assert "3.0 ms" in text


def test_bytes_are_compared_not_numbers() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(nan, torch.tensor([float("nan"), -0.0]))
    assert not same_bytes(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bytes(torch.zeros(2), torch.zeros(2, 1))
    assert same_bytes(torch.tensor(3), torch.tensor(3))
    assert same_bytes(torch.ones(2, 3).T, torch.ones(3, 2))


def test_two_checkpoints_are_compared_in_every_bit_and_value(tmp_path: Path) -> None:
    def state(**changes: Any) -> dict[str, Any]:
        return {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(3), "step": 7, **changes}

    turned = torch.zeros(3)
    turned[1] = -0.0
    others = [state(b=turned), state(step=8), {"w": state()["w"], "step": 7}]
    with ck.Checkpointer(tmp_path) as checkpointer:
        paths = [
            checkpointer.save(step, saved).path for step, saved in enumerate([state(), state(), *others])
        ]
    first, *rest = (Path(path) for path in paths)
    same, bit, value, fewer = (compare_checkpoints(first, other) for other in rest)
    assert same == Comparison(2, 36, ())
    assert bit.differences == (
        "b differs between the checkpoints",
        "what rank 0 saved differs between the checkpoints",
    )
    assert value.differences == ("what rank 0 saved differs between the checkpoints",)
    assert "b is in one checkpoint only" in fewer.differences


def test_the_demo_empties_its_own_folder_only(tmp_path: Path) -> None:
    wipe(tmp_path / "run")
    (tmp_path / "run" / "fsdp1").mkdir()
    wipe(tmp_path / "run")
    assert not (tmp_path / "run" / "fsdp1").exists()
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter").touch()
    with pytest.raises(DemoError, match="was not made by the demo"):
        wipe(foreign)
    assert (foreign / "chapter").exists()


def test_without_a_terminal_a_phase_says_in_lines_how_far_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    with Phases().phase("train", 24) as show:
        for what, step in [
            ("starting", 0),
            ("starting", 0),
            ("training", 0),
            *(("training", n) for n in range(1, 18)),
        ]:
            show(what, step)
        show("rank 1 killed, restarting", 17)
    lines = capfd.readouterr().err.splitlines()
    assert lines[:-1] == [
        "         train ...",
        "         . starting",
        "         . training",
        "         . training, step 8 of 24",
        "         . training, step 16 of 24",
        "         . rank 1 killed, restarting, step 17 of 24",
    ]
    assert lines[-1].endswith(" s train")
