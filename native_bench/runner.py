"""Measure systems beside each other, one case after the other: from a plan to results."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from native_bench.bench import Bench, Report
from native_bench.condition import condition_of, versions_of
from native_bench.ground import work_directory
from native_bench.native import Limits, Tuned
from native_bench.nursery import Nursery
from native_bench.plan import Plan
from native_bench.results import Results, now

VERSIONS = (
    "torch",
    "nvidia-resiliency-ext",
    "safetensors",
    "torchsnapshot",
    "fastsafetensors",
    "runai-model-streamer",
    "flashpack",
    "orbax-checkpoint",
    "jax",
    "xxhash",
    "zstandard",
    "numpy",
)


def run(
    plan: Plan,
    results: Results,
    say: Report,
    advance: Report = lambda text: None,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Fill `results`, case by case; `keep` is called after each, and whenever it ends. Whatever happens,
    processes are ended and files removed before it returns.

    say: told what has happened. advance: told what comes next, once for each of `steps`; nothing if there is
    nothing to do in that step.
    """
    start = time.monotonic() - results.seconds
    describe(results, plan.directory)
    results.unfinished += [case.name for case in plan.cases if case.name not in results.unfinished]
    try:
        with orderly_end():
            tuned: dict[tuple[str, str], Tuned] = {}
            with Nursery() as nursery:
                for case in plan.cases:
                    with work_directory(case, plan.directory) as directory:
                        if plan.limits and not tuned:
                            say("building the native programs, if they are not there")
                        limits = Limits(case, directory, tuned) if plan.limits else None
                        Bench(plan, case, directory, results, say, advance, nursery, limits).run()
                    results.unfinished.remove(case.name)
                    results.seconds = time.monotonic() - start
                    keep()
    except BaseException as exc:
        cut_short(results, exc)
        raise
    finally:
        results.seconds = time.monotonic() - start
        if results.cases:
            keep()


def cut_short(results: Results, cause: BaseException) -> None:
    """Put down why there will be no more."""
    results.interrupted = isinstance(cause, KeyboardInterrupt)
    reason = "interrupted" if results.interrupted else str(cause) or type(cause).__name__
    results.cut_short = f"{reason}, in `{results.unfinished[0]}`" if results.unfinished else reason


def describe(results: Results, directory: Path) -> None:
    """Put down what machine it is, in what condition, with which packages."""
    results.machine = _plain(condition_of(directory).to_json())
    results.versions = versions_of(VERSIONS)


def new_results(mode: str) -> Results:
    return Results(mode=mode, started=now())


def steps(plan: Plan) -> int:
    """How often `advance` is called."""
    return sum((plan.rounds + 1) * (sum(map(case.takes, plan.systems)) + plan.limits) for case in plan.cases)


@contextlib.contextmanager
def orderly_end() -> Iterator[None]:
    """A termination is an interruption: workers are ended and files removed."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _plain(value: Any) -> Any:
    """Only what JSON has."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
