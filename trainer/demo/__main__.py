"""`python -m trainer.demo`, or `make demo`: phases as they pass, the CLI's answers, a table at the end."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from trainer.demo.runs import (
    KILL_RANK,
    KILL_STEP,
    RANKS,
    STEPS,
    DemoError,
    Place,
    Recovery,
    SaveFigures,
    recovery,
    run_job,
    save_figures,
    wipe,
)
from trainer.launch import quiet_environment

TITLES = {"1": "FSDP1", "2": "FSDP2"}
SHOWN_EVERY = 8
"""Steps, between two lines where there is no terminal."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One column of the table."""

    fsdp: str
    recovery: Recovery
    saves: SaveFigures
    n_tensors: int
    compared_nbytes: int
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.differences


class Phases:
    """Shows what is being done, on stderr: a bar on a terminal, else lines at a phase's begin and end, and
    where it comes to something else or has done some steps."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    @contextmanager
    def phase(self, title: str, steps: int | None = None) -> Iterator[Callable[[str, int], None]]:
        began = time.monotonic()
        if self._console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn())
            with Progress(*columns, console=self._console, transient=True) as bar:
                task = bar.add_task(title, total=steps)
                yield lambda what, step: bar.update(
                    task, description=f"{title} [dim]{what}[/]", completed=step
                )
        else:
            self.say(f"         {title} ...")
            yield self._in_lines(steps)
        self._console.print(f"[green]{time.monotonic() - began:6.1f} s[/] {title}", soft_wrap=True)

    def _in_lines(self, steps: int | None) -> Callable[[str, int], None]:
        said: tuple[str, int] | None = None

        def show(what: str, step: int) -> None:
            nonlocal said
            news = what, step // SHOWN_EVERY
            if news != said:
                said = news
                self.say(f"         . {what}" + (f", step {step} of {steps}" if step else ""))

        return show

    def say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, soft_wrap=True)


def recover_and_compare(folder: Path, fsdp: str, phases: Phases) -> Result:
    """The job with the kill, the job without it, and whether they ended the same."""
    title = TITLES[fsdp]
    killed, whole = Place(folder, f"fsdp{fsdp}-killed"), Place(folder, f"fsdp{fsdp}-undisturbed")
    with phases.phase(
        f"{title}: train, SIGKILL rank {KILL_RANK} after step {KILL_STEP}, recover", STEPS
    ) as show:
        killed_events = run_job(killed, fsdp, kill=True, on_progress=show)
    cost = recovery(killed_events)
    phases.say(
        f"         rank {KILL_RANK} died after step {cost.killed_after}; all ranks resumed from step "
        f"{cost.resumed_from} and were training {cost.resume_s:.1f} s later"
    )
    with phases.phase(f"{title}: train undisturbed", STEPS) as show:
        whole_events = run_job(whole, fsdp, kill=False, on_progress=show)
    with phases.phase(f"{title}: compare digests, losses and checkpoints"):
        from trainer.demo.compare import compare_runs  # torch: only once it is needed

        comparison = compare_runs(killed, whole, killed_events, whole_events)
    return Result(
        fsdp=title,
        recovery=cost,
        saves=save_figures(killed_events + whole_events),
        n_tensors=comparison.n_tensors,
        compared_nbytes=comparison.nbytes,
        differences=comparison.differences,
    )


def ckpt(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command-line tool of the package beside this interpreter."""
    script = Path(sys.executable).with_name("ckpt")
    command = (
        [str(script)]
        if script.exists()
        else [sys.executable, "-c", "from ckptengine.cli import main; main()"]
    )
    return subprocess.run(
        [*command, *arguments],
        env=quiet_environment(),
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )


def shown(path: Path) -> str:
    """A path as one would type it here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def look_with_cli(folder: Path, fsdps: Sequence[str], out: Console | None) -> list[dict[str, Any]]:
    """Ask `ckpt` about the recovered checkpoints: what the last one holds, and whether each is sound."""
    roots = {fsdp: shown(Place(folder, f"fsdp{fsdp}-killed").root) for fsdp in fsdps}
    last = roots[fsdps[-1]]
    commands = [
        ("list", last),
        ("inspect", last, "--limit", "12"),
        ("inspect", last, "train.model.head.weight"),
    ]
    commands += [("verify", root) for root in roots.values()]
    answers = []
    for arguments in commands:
        began = time.monotonic()
        done = ckpt(*arguments)
        seconds = time.monotonic() - began
        answers.append(
            {"command": ["ckpt", *arguments], "exit_code": done.returncode, "seconds": round(seconds, 3)}
        )
        if out is not None:
            out.print(f"\n$ ckpt {' '.join(arguments)}", style="bold", markup=False)
            out.print(done.stdout.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)
        if done.returncode != 0:
            raise DemoError(
                f"ckpt {' '.join(arguments)} ended with exit code {done.returncode}:\n{done.stderr}"
            )
    return answers


def table_of(results: Sequence[Result]) -> Table:
    table = Table(title="What happened", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result.fsdp, justify="right")
    rows: list[tuple[str, Callable[[Result], str]]] = [
        ("steps lost to the kill", lambda r: str(r.recovery.steps_lost)),
        ("seconds from the kill to the next step", lambda r: f"{r.recovery.resume_s:.1f}"),
        ("  of which restoring the checkpoint", lambda r: f"{r.recovery.restore_s:.2f}"),
        ("size of a checkpoint, all ranks", lambda r: f"{r.saves.nbytes / 2**20:.0f} MiB"),
        ("training stood still per save (median)", lambda r: f"{r.saves.stall_ms:.1f} ms"),
        ("save, staged to committed (median)", lambda r: f"{r.saves.gib_s:.2f} GiB/s"),
        ("restore, read and check, all ranks", lambda r: f"{r.recovery.read_gib_s:.2f} GiB/s"),
        ("tensors compared", lambda r: f"{r.n_tensors:,}"),
        ("equal bit for bit", lambda r: "[green]yes[/]" if r.equal else "[red]NO[/]"),
    ]
    for label, cell in rows:
        table.add_row(label, *(cell(result) for result in results))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.demo",
        description="Two ranks train on this machine's CPU. Rank 1 is killed between two checkpoints; the "
        "job restarts, resumes and finishes. The same run without the kill must end with the same bits. "
        "Exit code 1 if it does not.",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("demo-run"), help="made anew (default: %(default)s)"
    )
    parser.add_argument("--fsdp", choices=("1", "2", "both"), default="both", help="(default: %(default)s)")
    parser.add_argument(
        "--json", action="store_true", help="the result as JSON on stdout, and nothing else there"
    )
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
    # Like Ctrl-C: the jobs have sessions of their own and would outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    fsdps = ("1", "2") if arguments.fsdp == "both" else (arguments.fsdp,)
    folder = arguments.folder.resolve()
    phases, out, began = Phases(), Console(highlight=False), time.monotonic()
    try:
        wipe(folder)
        results = [recover_and_compare(folder, fsdp, phases) for fsdp in fsdps]
        answers = look_with_cli(folder, fsdps, None if arguments.json else out)
    except DemoError as error:
        phases.say(f"demo: {error}", style="red")
        return 1
    except KeyboardInterrupt:
        phases.say("demo: interrupted; its processes were ended")
        return 130
    equal = all(result.equal for result in results)
    seconds = time.monotonic() - began
    if arguments.json:
        columns = [
            {**dataclasses.asdict(r), "steps_lost": r.recovery.steps_lost, "equal": r.equal} for r in results
        ]
        print(
            json.dumps(
                {"equal": equal, "seconds": seconds, "ranks": RANKS, "runs": columns, "ckpt": answers},
                indent=2,
            )
        )
    else:
        out.print()
        out.print(table_of(results))
        out.print(f"{seconds:.0f} s in all; logs and checkpoints are in {shown(folder)}/", markup=False)
    for result in results:
        for line in result.differences[:20]:
            phases.say(f"{result.fsdp}: {line}", style="red")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
