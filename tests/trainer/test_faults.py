"""Faults strike the process they name, at the step they name, and once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.events import EventLog, read_events
from trainer.faults import KillPlan, current_life
from trainer.launch import REPOSITORY


def test_a_kill_is_due_at_its_rank_and_step_in_the_first_life_only() -> None:
    plan = KillPlan(1, 7)
    assert plan.is_due(rank=1, step=7, life=0)
    assert not plan.is_due(rank=0, step=7, life=0)
    assert not plan.is_due(rank=1, step=8, life=0)
    assert not plan.is_due(rank=1, step=7, life=1)


def test_a_marker_file_replaces_the_life(tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    plan = KillPlan(1, 7, str(marker))
    assert plan.is_due(rank=1, step=7, life=3)
    marker.touch()
    assert not plan.is_due(rank=1, step=7, life=0)


def test_the_life_is_the_launchers_restart_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert current_life() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert current_life() == 2


def test_a_strike_is_a_sigkill_that_leaves_its_marker_and_its_event(tmp_path: Path) -> None:
    marker, log = tmp_path / "killed", tmp_path / "events"
    code = (
        "from trainer.events import EventLog; from trainer.faults import KillPlan\n"
        f"EventLog({str(log)!r}, rank=1, life=0).write('kill', step=7)\n"
        f"KillPlan(1, 7, {str(marker)!r}).strike()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL
    assert marker.exists()
    (event,) = read_events(log)
    assert (event["event"], event["rank"], event["step"]) == ("kill", 1, 7)


def test_events_of_two_writers_share_a_file_and_an_unfinished_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "new" / "events"
    logs = [EventLog(str(path), rank=rank, life=0) for rank in range(2)]
    for step in range(3):
        for log in logs:
            log.write("step", step=step, loss=1 / 3)
    for log in logs:
        log.close()
    with path.open("a") as file:
        file.write('{"event": "st')
    events = read_events(path)
    assert [(event["step"], event["rank"]) for event in events] == [
        (s, r) for s in range(3) for r in range(2)
    ]
    assert events[0]["loss"] == 1 / 3


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = EventLog(None, rank=0, life=0)
    log.write("step", step=1)
    log.close()
    assert os.listdir(tmp_path) == []
    assert read_events(tmp_path / "none") == []
