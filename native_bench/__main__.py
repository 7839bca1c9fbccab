"""`python -m native_bench run | report | guard`: measure, show, and watch over the engine's speed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from native_bench import cases, ground, guard, more, plots, readme, report, results, runner
from native_bench.bench import Report
from native_bench.explained import DOCUMENT as EXPLAINED
from native_bench.lines import Lines
from native_bench.peers import BASE, SYSTEMS, make
from native_bench.plan import Plan
from native_bench.results import Results

DOCUMENT = Path("docs/benchmarks.md")
README = Path("README.md")
ALL = tuple(SYSTEMS)
IMAGES = Path("docs/img")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m native_bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="measure the engine, the limits and the peers beside each other")
    run.add_argument(
        "--quick", action="store_true", help="small sizes: shows that all of it works, not how fast"
    )
    run.add_argument("--base", action="store_true", help="only systems that need no packages of their own")
    run.add_argument(
        "--cases",
        type=_names,
        help=f"comma-separated, of: {', '.join(case.name for case in cases.FULL)} (the comparison); "
        f"{', '.join(more.PARTS)} (default: all; quick: the comparison)",
    )
    run.add_argument("--systems", type=_names, help=f"comma-separated, of: {', '.join(SYSTEMS)}")
    run.add_argument("--rounds", type=_count, help="how often each system is measured (5; quick: 1)")
    run.add_argument("--dir", type=Path, default=Path("."), help="where the checkpoints go (default: here)")
    run.add_argument("--out", type=Path, default=Path("bench-results"), help="where the results go")
    run.add_argument("--add", action="store_true", help="keep what is there of other cases")
    run.add_argument(
        "--deadline", type=_seconds, default=120.0, help="seconds for one save or restore of a GiB"
    )
    run.add_argument("--no-limits", action="store_true", help="without the native programs")
    run.set_defaults(do=_run)

    show = commands.add_parser("report", help="write tables and pictures of a run into a document")
    show.add_argument("results", type=Path, help="the results.json of a run; beside it, its other parts")
    show.add_argument(
        "--document", type=Path, default=DOCUMENT, help=f"default: {DOCUMENT}; -: print the tables"
    )
    show.add_argument("--images", type=Path, default=IMAGES, help=f"default: {IMAGES}")
    show.add_argument(
        "--readme", type=Path, help=f"where the first figures go, too (default: {README}, with {DOCUMENT})"
    )
    show.add_argument(
        "--baseline",
        type=Path,
        help="what the guard holds the engine against from now on (default: native_bench/"
        f"{guard.BASELINE.name}, with {DOCUMENT})",
    )
    show.set_defaults(do=_report)

    watch = commands.add_parser("guard", help="fail if the engine is farther behind the limit than it was")
    watch.add_argument(
        "--from",
        dest="results",
        type=Path,
        help="the results.json of a whole run: write the baseline out of it",
    )
    watch.add_argument("--baseline", type=Path, default=guard.BASELINE)
    watch.add_argument("--rounds", type=_count, default=guard.ROUNDS, help=f"default: {guard.ROUNDS}")
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
    parts = _parts(given)
    given.out.mkdir(parents=True, exist_ok=True)
    ground.sweep(given.dir)
    path = given.out / "results.json"
    measured = _before(given, plan, parts, path)
    known = measured.errors
    errors: list[str] = []
    keep = partial(results.write, measured, str(path))
    ready = False
    try:
        with runner.orderly_end(), _progress(runner.steps(plan) + _steps(parts)) as (say, advance):
            if plan.cases:
                runner.run(plan, measured, say, advance, keep)
                errors += [error for error in measured.errors if error not in known]
            for name in parts:
                ready = True
                advance(f"{name}: {more.PARTS[name].title}")
                section = more.run(name, given.dir, given.out / f"{name}.json", quick=given.quick, say=say)
                errors += [f"{name}: {section.error}"] if section.error else []
                measured.unfinished.remove(name)
                keep()
                for _ in range(_steps([name]) - 1):
                    advance("")
    except BaseException as exc:
        runner.cut_short(measured, exc)
        if measured.cases or ready:
            keep()
        raise
    finally:
        if measured.cases or ready:
            images = {name: image.name for name, image in plots.draw(measured, given.out).items()}
            explained = str(_relative(DOCUMENT.parent / EXPLAINED, given.out))
            text = report.render(measured, images=images, sections=more.found(given.out), explained=explained)
            (given.out / "report.md").write_text(text)
            print(f"{given.out / 'report.md'} written", file=sys.stderr)
    for error in errors:
        print(f"failed: {error}", file=sys.stderr)
    # What is not installed is no failure; what is, and saved or restored wrongly, is.
    return 1 if errors else 0


def _before(given: argparse.Namespace, plan: Plan, parts: Sequence[str], path: Path) -> Results:
    """What there is to go on with: nothing, or what an earlier run has measured that this one does not."""
    measured = runner.new_results(plan.mode)
    names = [*(case.name for case in plan.cases), *parts]
    if path.exists() and (given.add or not plan.cases):
        earlier = results.read(str(path))
        left = [name for name in earlier.unfinished if name not in names]
        if plan.cases:
            measured.cases = [case for case in earlier.cases if case.case.name not in names]
            measured.seconds = earlier.seconds
        else:
            measured = earlier
            measured.added = [name for name in more.PARTS if name in {*earlier.added, *parts}]
        measured.cut_short = earlier.cut_short if left else None
        measured.interrupted = earlier.interrupted and bool(left)
        measured.unfinished = names + left
    else:
        measured.unfinished = names
        if not plan.cases:
            runner.describe(measured, given.dir)
    return measured


def _report(given: argparse.Namespace) -> int:
    measured = results.read(str(given.results))
    sections = more.found(given.results.parent)
    if str(given.document) == "-":
        print(report.render(measured, sections=sections, explained=EXPLAINED), end="")
        return 0
    # First, as it may be refused: the document says which run the guard goes by.
    baseline = given.baseline or (guard.BASELINE if given.document == DOCUMENT else None)
    if baseline is not None:
        _write_baseline(measured, baseline)
    drawn = plots.draw(measured, given.images)
    given.document.parent.mkdir(parents=True, exist_ok=True)
    images = {name: str(_relative(path, given.document.parent)) for name, path in drawn.items()}
    explained = str(_relative(DOCUMENT.parent / EXPLAINED, given.document.parent))
    text = report.render(measured, images=images, sections=sections, explained=explained)
    report.update(given.document, text)
    print(f"{given.document} written", file=sys.stderr)
    page = given.readme or (README if given.document == DOCUMENT else None)
    if page is not None:
        page.write_text(readme.insert(page.read_text(), readme.figures(given.document.read_text())))
        print(f"{page} written", file=sys.stderr)
    return 0


def _write_baseline(measured: Results, path: Path) -> None:
    written = guard.write(measured, path)
    print(f"{path} written: {len(written.ratios)} ratios of the run of {written.started}", file=sys.stderr)


def _guard(given: argparse.Namespace) -> int:
    if given.results is not None:
        _write_baseline(results.read(str(given.results)), given.baseline)
        return 0
    table = cases.QUICK if given.quick else cases.FULL

    def measure(names: Collection[str]) -> Results:
        plan = Plan(
            mode="quick" if given.quick else "full",
            cases=guard.watched(table, names),
            systems=guard.SYSTEMS,
            directory=given.dir,
            rounds=given.rounds,
        )
        measured = _measure(plan, runner.new_results(plan.mode))
        if errors := measured.errors:
            raise ValueError("; ".join(errors))
        if missing := [
            case.skipped[results.NATIVE] for case in measured.cases if results.NATIVE in case.skipped
        ]:
            raise ValueError(f"without the native limits there is nothing to compare with: {missing[0]}")
        return measured

    behind = guard.check(measure, guard.read(given.baseline), print)
    if behind:
        print(
            f"the engine fell behind, in {guard.TRIES} tries of {guard.TRIES}: {guard.describe(behind)}",
            file=sys.stderr,
        )
        return 1
    return 0


def _plan(given: argparse.Namespace) -> Plan:
    table = cases.QUICK if given.quick else cases.FULL
    systems = given.systems or (BASE if given.base else ALL)
    if unknown := [name for name in systems if name not in SYSTEMS and ":" not in name]:
        raise ValueError(f"unknown system {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    for name in systems:
        make(name)  # or say what is wrong with it, before anything is measured
    known = [*(case.name for case in table), *more.PARTS]
    names = given.cases or known
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown case {unknown[0]!r}; there are {', '.join(known)}")
    rounds = (1 if given.quick else 5) if given.rounds is None else given.rounds
    return Plan(
        mode="quick" if given.quick else "full",
        cases=tuple(case for case in table if case.name in names),
        systems=tuple(systems),
        directory=given.dir,
        rounds=rounds,
        deadline_s=given.deadline,
        limits=not given.no_limits,
        warm=not given.quick,
    )


def _parts(given: argparse.Namespace) -> list[str]:
    """What is measured beside the comparison: all of it, unless only some cases or systems are asked for."""
    if given.cases:
        return [name for name in more.PARTS if name in given.cases]
    return [] if given.quick or given.systems else list(more.PARTS)


def _steps(parts: Iterable[str]) -> int:
    """In turns of a system, of some seconds each."""
    return sum(max(1, round(more.PARTS[name].typical_s / 5)) for name in parts)


def _measure(plan: Plan, into: Results) -> Results:
    with _progress(runner.steps(plan)) as (say, advance):
        runner.run(plan, into, say, advance)
    return into


@contextmanager
def _progress(total: int) -> Iterator[tuple[Report, Report]]:
    """Two to be called with words: with what has happened, and, for each of `total` steps, with what comes
    next. A bar on a terminal; else lines, with the seconds since the start."""
    if not sys.stderr.isatty():
        with Lines(total) as lines:
            yield lines.say, lines.advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=total)

        def say(text: str) -> None:
            bar.update(task, description=text[:60])
            if "failed" in text or "skipped" in text:
                bar.console.print(text, markup=False)

        def advance(text: str) -> None:
            bar.advance(task)
            if text:
                bar.update(task, description=text[:60])

        yield say, advance


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError("names at least one")
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text}")
    return seconds


def _relative(path: Path, start: Path) -> Path:
    import os

    return Path(os.path.relpath(path, start))


if __name__ == "__main__":
    sys.exit(main())
