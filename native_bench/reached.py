"""What does the machine reach at best, of what a case has measured without a checkpoint format?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from native_bench.results import NATIVE, STREAMING, CaseResult


class Reached(NamedTuple):
    """What the machine reaches. label: for the rows. samples: seconds of each round."""

    label: str
    seconds: float
    samples: Sequence[float]


def limits_of(case: CaseResult, figure: str) -> list[Reached]:
    """What a save or a cold restore is held against, the fastest first: the native programs, and Python
    threads without a format. None on tmpfs, where there is no device: a write there is a copy into new pages,
    which the native program, made for devices, does more slowly than the systems."""
    if case.case.place == "tmpfs":
        return []
    return _reached(case, (("native", NATIVE, figure), ("raw", "raw", figure)))


def limit_of(case: CaseResult, figure: str) -> Reached | None:
    """The faster of both, as neither is the limit if the other one was faster."""
    return next(iter(limits_of(case, figure)), None)


def memcpy_of(case: CaseResult) -> Reached | None:
    """Copying the same bytes into warm memory by libc, natively or from Python threads, whichever was faster
    in this run."""
    ways = (("native memcpy", NATIVE, "memcpy_s"), ("memcpy by Python threads", "raw", "save_memcpy_s"))
    return next(iter(_reached(case, ways)), None)


def fastest_limit(case: CaseResult, figure: str) -> Reached | None:
    """What nothing here was faster than, with a format or without: for bytes that are in memory already, a
    copy."""
    if figure not in ("stall_s", "restore_hot_s"):
        return limit_of(case, figure)
    copies = [copy for copy in (memcpy_of(case), streaming_of(case)) if copy is not None]
    return min(copies, key=lambda copy: copy.seconds, default=None)


def _reached(case: CaseResult, ways: Iterable[tuple[str, str, str]]) -> list[Reached]:
    """ways: label, system and figure of each."""
    found = []
    for label, name, figure in ways:
        system = case.find(name)
        if system is not None and (seconds := system.median(figure)) is not None:
            found.append(Reached(label, seconds, system.samples[figure]))
    return sorted(found, key=lambda one: one.seconds)


def streaming_of(case: CaseResult) -> Reached | None:
    """The same copy with non-temporal stores. Nothing is held against it, as no system was when the targets
    were set; that would make none of them easier."""
    return next(iter(_reached(case, [("copy by non-temporal stores", NATIVE, STREAMING)])), None)
