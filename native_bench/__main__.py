"""`python -m native_bench run | report | guard`: compare, show, and watch over the engine's speed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from native_bench import cases, guard, plots, report, results, runner
from native_bench.peers import BASE, MEASURED_ELSEWHERE, SYSTEMS
from native_bench.results import Results
from native_bench.targets import Target

DOCUMENT = Path("docs/benchmarks.md")
ALL = tuple(name for name in SYSTEMS if name not in MEASURED_ELSEWHERE)
IMAGES = Path("docs/img")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m native_bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="measure the engine, the limits and the peers beside each other")
    run.add_argument(
        "--quick", action="store_true", help="small sizes: shows that all of it works, not how fast"
    )
    run.add_argument("--base", action="store_true", help="only systems that need no packages of their own")
    run.add_argument("--cases", type=_names, help="comma-separated, of: large, small, two-ranks, tmpfs")
    run.add_argument("--systems", type=_names, help=f"comma-separated, of: {', '.join(SYSTEMS)}")
    run.add_argument("--rounds", type=int, help="how often each system is measured (5; quick: 2)")
    run.add_argument("--dir", type=Path, default=Path("."), help="where the checkpoints go (default: here)")
    run.add_argument("--out", type=Path, default=Path("bench-results"), help="where the results go")
    run.add_argument("--deadline", type=float, default=120.0, help="seconds for one save or restore of a GiB")
    run.add_argument("--no-limits", action="store_true", help="without the native programs")
    run.set_defaults(do=_run)

    show = commands.add_parser("report", help="write tables and pictures of a run into a document")
    show.add_argument("results", type=Path, help="the results.json of a run")
    show.add_argument(
        "--document", type=Path, default=DOCUMENT, help=f"default: {DOCUMENT}; -: print the tables"
    )
    show.add_argument("--images", type=Path, default=IMAGES, help=f"default: {IMAGES}")
    show.add_argument(
        "--more",
        type=Path,
        nargs="*",
        default=[],
        help='targets measured elsewhere: JSON lists of {"figure", "measured", "target", "met"}',
    )
    show.set_defaults(do=_report)

    watch = commands.add_parser("guard", help="fail if the engine fell more than 25 %% behind the limit")
    watch.add_argument("--update", action="store_true", help="measure and write the baseline")
    watch.add_argument("--baseline", type=Path, default=guard.BASELINE)
    watch.add_argument("--rounds", type=int, default=5)
    watch.add_argument("--dir", type=Path, default=Path("."))
    watch.add_argument("--quick", action="store_true", help="small sizes: a check of the check")
    watch.set_defaults(do=_guard)

    given = parser.parse_args(arguments)
    try:
        code: int = given.do(given)
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError) as exc:
        print(f"native_bench: {exc}", file=sys.stderr)
        return 1


def _run(given: argparse.Namespace) -> int:
    plan = _plan(given)
    measured = runner.new_results(plan.mode)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "results.json"
    try:
        _measure(plan, measured)
    finally:
        if measured.cases:
            results.write(measured, str(path))
            images = {name: image.name for name, image in plots.draw(measured, given.out).items()}
            (given.out / "report.md").write_text(report.render(measured, images=images))
            print(f"{path} and {given.out / 'report.md'} written", file=sys.stderr)
    for error in measured.errors:
        print(f"failed: {error}", file=sys.stderr)
    # What is not installed is no failure; what is, and saved or restored wrongly, is.
    return 1 if measured.errors else 0


def _report(given: argparse.Namespace) -> int:
    measured = results.read(str(given.results))
    more = [
        target for path in given.more for target in msgspec.json.decode(path.read_bytes(), type=list[Target])
    ]
    if str(given.document) == "-":
        print(report.render(measured, more=more), end="")
        return 0
    drawn = plots.draw(measured, given.images)
    given.document.parent.mkdir(parents=True, exist_ok=True)
    images = {name: str(_relative(path, given.document.parent)) for name, path in drawn.items()}
    report.update(given.document, report.render(measured, images=images, more=more))
    print(f"{given.document} written", file=sys.stderr)
    return 0


def _guard(given: argparse.Namespace) -> int:
    table = cases.QUICK if given.quick else cases.FULL
    plan = runner.Plan(
        mode="quick" if given.quick else "full",
        cases=tuple(case for case in table if case.name in guard.CASES),
        systems=guard.SYSTEMS,
        directory=given.dir,
        rounds=given.rounds,
    )

    def measure() -> Results:
        measured = _measure(plan, runner.new_results(plan.mode))
        if errors := measured.errors:
            raise ValueError("; ".join(errors))
        if missing := [
            case.skipped[results.NATIVE] for case in measured.cases if results.NATIVE in case.skipped
        ]:
            raise ValueError(f"without the native limits there is nothing to compare with: {missing[0]}")
        return measured

    if given.update:
        written = guard.write(measure(), given.baseline)
        print(f"{given.baseline} written: {len(written.ratios)} ratios", file=sys.stderr)
        return 0
    fell = guard.check(measure, guard.read(given.baseline), print)
    if fell:
        print(f"the engine fell behind: {guard.describe(fell)}", file=sys.stderr)
        return 1
    return 0


def _plan(given: argparse.Namespace) -> runner.Plan:
    table = cases.QUICK if given.quick else cases.FULL
    systems = given.systems or (BASE if given.base else ALL)
    if unknown := [name for name in systems if name not in SYSTEMS and ":" not in name]:
        raise ValueError(f"unknown system {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    names = given.cases or tuple(case.name for case in table)
    if unknown := [name for name in names if all(case.name != name for case in table)]:
        raise ValueError(f"unknown case {unknown[0]!r}; there are {', '.join(case.name for case in table)}")
    plan = runner.Plan(
        mode="quick" if given.quick else "full",
        cases=tuple(case for case in table if case.name in names),
        systems=tuple(systems),
        directory=given.dir,
        rounds=given.rounds or (2 if given.quick else 5),
        deadline_s=given.deadline,
        limits=not given.no_limits,
    )
    if plan.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, not {plan.rounds}")
    return replace(plan, slow_rounds=min(plan.slow_rounds, plan.rounds))


def _measure(plan: runner.Plan, into: Results) -> Results:
    with _progress(runner.steps(plan)) as (say, advance):
        runner.run(plan, into, say, advance)
    return into


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A bar on a terminal; else one line per event, with the seconds since the start."""
    start = time.monotonic()
    if not sys.stderr.isatty():
        yield (
            lambda text: print(f"{time.monotonic() - start:5.0f} s  {text}", file=sys.stderr, flush=True),
            lambda: None,
        )
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=total)

        def say(text: str) -> None:
            bar.update(task, description=text[:60])
            if "failed" in text or "skipped" in text:
                bar.console.print(text, markup=False)

        yield say, lambda: bar.advance(task)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _relative(path: Path, start: Path) -> Path:
    import os

    return Path(os.path.relpath(path, start))


if __name__ == "__main__":
    sys.exit(main())
