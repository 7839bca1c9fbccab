"""Which jobs the demonstration runs, and what their event files say happened."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.events import read_events
from trainer.launch import Job, torchrun

RANKS = 2
STEPS = 24
SAVE_EVERY = 4
KILL_RANK = 1
KILL_STEP = 15
TIMEOUT_S = 150.0

# Small enough for two CPU cores; dropout and noise, so that a resume that forgets a random generator shows.
MODEL = ("--dim", "320", "--n-layers", "4", "--n-heads", "5", "--n-kv-heads", "5", "--ffn-dim", "832")
TRAINING = ("--seq-len", "64", "--batch-size", "2", "--dropout", "0.1", "--noise", "0.02", "--grad-clip", "1")


class DemoError(Exception):
    """The demonstration cannot go on; the message says why and where to look."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one job keeps its checkpoints, events, digests and log."""

    folder: Path
    name: str

    @property
    def root(self) -> Path:
        return self.folder / self.name

    @property
    def events(self) -> Path:
        return self.folder / "logs" / f"{self.name}.events.jsonl"

    @property
    def final(self) -> Path:
        return self.folder / "logs" / f"{self.name}.final"

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.log"


def wipe(folder: Path) -> None:
    """Make the folder anew; refuse to empty one that the demonstration did not make."""
    marker = folder / ".ckptengine-demo"
    if folder.exists():
        if not folder.is_dir() or (not marker.exists() and any(folder.iterdir())):
            raise DemoError(f"{folder} was not made by the demo and is not emptied; give another --folder")
        shutil.rmtree(folder)
    (folder / "logs").mkdir(parents=True)
    marker.touch()


def run_job(
    place: Place, fsdp: str, *, kill: bool, on_progress: Callable[[str, int], None]
) -> list[dict[str, Any]]:
    """Run one job to its end and return its events; `on_progress` gets what it is doing and its step."""
    arguments = [
        "--root", str(place.root), "--fsdp", fsdp, "--steps", str(STEPS), "--save-every", str(SAVE_EVERY),
        "--events", str(place.events), "--final-dir", str(place.final), *MODEL, *TRAINING,
    ]  # fmt: skip
    if kill:
        arguments += ["--kill-rank", str(KILL_RANK), "--kill-step", str(KILL_STEP), "--kill-after-commit"]

    def poll() -> None:
        on_progress(*progress(read_events(place.events)))

    with Job(torchrun(arguments, ranks=RANKS, max_restarts=1 if kill else 0), log=place.log) as job:
        try:
            code = job.wait(TIMEOUT_S, poll)
        except TimeoutError as error:
            raise DemoError(f"{place.name}: {error}\n{_tail(place.log)}") from None
    if code != 0:
        raise DemoError(
            f"{place.name}: the job ended with exit code {code}; {place.log} ends:\n{_tail(place.log)}"
        )
    return read_events(place.events)


def _tail(log: Path, lines: int = 25) -> str:
    """The last lines before the launcher's own closing words, which bury the cause."""
    text = log.read_text(errors="replace").splitlines()
    closing = [number for number, line in enumerate(text) if " failed (exitcode: " in line]
    if closing:
        text = text[: closing[-1] + 1]
    return "\n".join("  | " + line for line in text[-lines:])


def progress(events: list[dict[str, Any]]) -> tuple[str, int]:
    """What a job is doing, in two words, and the newest step of its present life."""
    what, step = "starting", 0
    for event in events:
        if event["event"] == "kill":
            what = f"rank {event['rank']} killed, restarting"
        elif event["event"] in ("resume", "scratch"):
            what, step = "training", event.get("step", 0)
        elif event["event"] == "step":
            step = event["step"]
        elif event["event"] == "finish":
            what = "finishing"
    return what, step


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the kill cost: the steps done twice, the seconds until every rank had done its first new step."""

    killed_after: int
    resumed_from: int
    resume_s: float
    restore_s: float
    read_gib_s: float

    @property
    def steps_lost(self) -> int:
        return self.killed_after - self.resumed_from


def recovery(events: list[dict[str, Any]]) -> Recovery:
    kills = [event for event in events if event["event"] == "kill"]
    resumes = [event for event in events if event["event"] == "resume"]
    if len(kills) != 1:
        raise DemoError(f"one rank should have been killed, and {len(kills)} were")
    if len(resumes) != RANKS or len({event["step"] for event in resumes}) != 1:
        raise DemoError(f"all ranks should have resumed once, at one step; they resumed: {resumes}")
    first_steps = [
        min(
            event["time"]
            for event in events
            if event["event"] == "step" and (event["life"], event["rank"]) == (1, rank)
        )
        for rank in range(RANKS)
    ]
    return Recovery(
        killed_after=kills[0]["step"],
        resumed_from=resumes[0]["step"],
        resume_s=max(first_steps) - kills[0]["time"],
        restore_s=max(event["seconds"] for event in resumes),
        read_gib_s=sum(event["nbytes"] for event in resumes)
        / max(event["read_seconds"] for event in resumes)
        / 2**30,
    )


@dataclass(frozen=True, slots=True)
class SaveFigures:
    """Medians over saves: `stall_ms` of the training thread (all ranks), `gib_s` staged to committed."""

    saves: int
    nbytes: int
    stall_ms: float
    gib_s: float


def save_figures(events: list[dict[str, Any]]) -> SaveFigures:
    stalls = [event["stall_s"] for event in events if event["event"] == "save_requested"]
    commits = [event for event in events if event["event"] == "save_committed" and event["rank"] == 0]
    if not commits:
        raise DemoError("no save was committed")
    return SaveFigures(
        saves=len(commits),
        nbytes=commits[-1]["nbytes"],
        stall_ms=statistics.median(stalls) * 1e3,
        gib_s=statistics.median(event["nbytes"] / (event["committed"] - event["staged"]) for event in commits)
        / 2**30,
    )


def losses(events: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """The loss of each rank at each step, as it counts: a step done again replaces the lost one."""
    return {(event["rank"], event["step"]): event["loss"] for event in events if event["event"] == "step"}
