"""How much memory do saves and restores need beside the state, and what do many saves leave behind?

Each figure is of a process that does nothing else: `native_bench.restore_peak`, `native_bench.save_peak`,
`native_bench.steady_saves`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from native_bench.save_peak import PAGES
from native_bench.sections import Section, Table
from native_bench.targets import Target

MIB = 1 << 20
ROOT = Path(__file__).parents[1]
POOL_NBYTES = 256 * MIB
"""What a restore may have beside its target by default."""
BESIDE_ARENA_NBYTES = 64 * MIB
"""What a save may have beside the arena."""
GROWTH_NBYTES = 2 * MIB
"""Between two windows of saves; what an allocator keeps differs by that much."""
PROCESSES = ("trainer", "writer")
CODECS = ("raw", "zstd", "auto")
SNAPSHOTS = ("copy", "overlap")
LAYOUTS = {"straight": "into tensors as they lie", "turned": "into transposed tensors"}
"""Of what is restored into: as `native_bench.restore_peak` calls it, and as the report does."""
TIMEOUT_S = 500.0

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Else the C library keeps as much of what was freed as it last saw asked for at once.
    "MALLOC_MMAP_THRESHOLD_": "65536",
}

Held = list[dict[str, Any]]
"""What `native_bench.steady_saves` tells: before the first save of a state, then after each."""


@dataclass(frozen=True, slots=True)
class SavePeak:
    """What the two processes had beside the arena at their peaks, in bytes; and whether that came in huge
    pages."""

    trainer: int
    writer: int
    huge: bool

    @property
    def both(self) -> int:
        return self.trainer + self.writer


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one process between two windows of saves: bytes, or numbers of descriptors, threads, segments."""

    process: str
    what: str
    then: int
    now: int
    allowed: int

    @property
    def flat(self) -> bool:
        return self.now <= self.then + self.allowed


def restored(root: Path, layout: str, tensors: int, nbytes: int) -> int:
    """Bytes a restore had beside its target at the peak."""
    return int(_run("restore_peak", "restore", root, layout, tensors, nbytes))


def saved(root: Path, codec: str, tensors: int, nbytes: int) -> None:
    """A checkpoint for `restored`."""
    _run("restore_peak", "save", root, codec, tensors, nbytes)


def save_peak(root: Path, codec: str, pages: str, nbytes: int, count: int) -> SavePeak:
    """The most of `count` saves of `nbytes`."""
    told = json.loads(_run("save_peak", root, codec, pages, nbytes, count).splitlines()[-1])
    return SavePeak(told["trainer"], told["writer"], told["huge"])


def saves(root: Path, count: int, snapshot: str, codec: str) -> Held:
    lines = _run("steady_saves", root, count, snapshot, codec).splitlines()
    held = [json.loads(line) for line in lines if line.startswith("{")]
    if len(held) != 1 + count:
        raise RuntimeError(f"{len(held) - 1} of {count} saves were reported")
    return held


def growth(held: Held, *, warm: int, window: int) -> list[Growth]:
    """Least of the saves just after the first `warm`, and least of the last: the writer may still be deleting
    an older step when a save has committed."""
    first, last = held[warm : warm + window], held[-window:]
    allowed = {"anonymous": GROWTH_NBYTES, "shared": GROWTH_NBYTES, "fds": 0, "threads": 0, "shm": 0}
    return [
        Growth(
            process,
            what,
            min(line[process][what] for line in first),
            min(line[process][what] for line in last),
            limit,
        )
        for process in PROCESSES
        for what, limit in allowed.items()
    ]


def arenas(held: Held) -> int:
    return max(line["arenas"] for line in held)


def beside_arena(held: Held) -> int:
    """Bytes both processes kept after a save, at most, beyond what they had before the first, without the
    arena, which both map."""
    before = held[0]
    added: dict[tuple[str, str], int] = {
        (process, what): max(line[process][what] for line in held) - before[process][what]
        for process in PROCESSES
        for what in ("anonymous", "shared")
    }
    shared = max(added["trainer", "shared"], added["writer", "shared"])
    return added["trainer", "anonymous"] + added["writer", "anonymous"] + shared - arenas(held)


def section(directory: Path, quick: bool) -> Section:
    """For the report."""
    count, warm, window = (14, 8, 3) if quick else (200, 20, 10)
    nbytes = (64 if quick else 512) * MIB
    saved_nbytes = (128 if quick else 1024) * MIB
    root = Path(tempfile.mkdtemp(prefix="native-bench-memory-", dir=directory))
    try:
        peaks = {}
        for codec in ("raw", "zstd"):
            saved(root / codec, codec, 8, nbytes)
            for layout in LAYOUTS:
                peaks[codec, layout] = restored(root / codec, layout, 8, nbytes)
            shutil.rmtree(root / codec)
        beside = {}
        for codec in CODECS:
            # The small ones take more; a look at both is for figures.
            for pages in ("small",) if quick else PAGES:
                beside[codec, pages] = save_peak(root / "peak", codec, pages, saved_nbytes, 2)
                shutil.rmtree(root / "peak")
        # Beside each other: it is memory that is measured, and no time.
        with ThreadPoolExecutor(len(SNAPSHOTS)) as pool:
            running = {
                snapshot: pool.submit(saves, root / snapshot, count, snapshot, "raw")
                for snapshot in SNAPSHOTS
            }
            held = {snapshot: run.result() for snapshot, run in running.items()}
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return _section(nbytes, peaks, saved_nbytes, beside, held, warm=warm, window=window)


def _section(
    nbytes: int,
    peaks: Mapping[tuple[str, str], int],
    saved_nbytes: int,
    beside: Mapping[tuple[str, str], SavePeak],
    held: Mapping[str, Held],
    *,
    warm: int,
    window: int,
) -> Section:
    grown = {snapshot: growth(lines, warm=warm, window=window) for snapshot, lines in held.items()}
    count = min(len(lines) for lines in held.values()) - 1
    worst = max(peaks, key=lambda kind: peaks[kind])
    costly = max(beside, key=lambda kind: beside[kind].both)
    most = beside[costly].both
    all_grown = [one for several in grown.values() for one in several]
    targets = [
        Target(
            "memory of a restore beside its target",
            f"{_mib(peaks[worst])} at most ({worst[0]}, {LAYOUTS[worst[1]]})",
            f"≤ {_mib(POOL_NBYTES)}",
            peaks[worst] <= POOL_NBYTES,
        ),
        Target(
            "memory of a save beside its arena",
            f"{_mib(most)} at the peak ({costly[0]}, arena's pages {PAGES[costly[1]]}), trainer and writer "
            "together, beyond what the two have between saves",
            f"≤ {_mib(BESIDE_ARENA_NBYTES)}",
            most <= BESIDE_ARENA_NBYTES,
        ),
        Target(
            f"growth over {count} saves",
            _most(all_grown),
            f"none (memory: {_mib(GROWTH_NBYTES)})",
            all(one.flat for one in all_grown),
        ),
    ]
    restores = Table(
        head=["restore of", *LAYOUTS.values()],
        rows=[
            [f"a {codec} shard", *(_mib(peaks[codec, layout]) for layout in LAYOUTS)]
            for codec in ("raw", "zstd")
        ],
    )
    peak = Table(
        head=["a save by codec", "arena's pages", "trainer", "writer", "both at most"],
        rows=[
            [
                codec,
                PAGES[pages] + ("" if pages == "small" else ": huge" if one.huge else ": of 4 KiB"),
                *map(_mib, (one.trainer, one.writer, one.both)),
            ]
            for (codec, pages), one in beside.items()
        ],
    )
    rows = []
    for snapshot, lines in held.items():
        state = lines[0]["state"]
        for process in PROCESSES:
            of = {one.what: one for one in grown[snapshot] if one.process == process}
            rows.append(
                [
                    f"{snapshot}, {process}",
                    _mib(state),
                    _mib(arenas(lines)),
                    _mib(beside_arena(lines)),
                    *(f"{_mib(of[what].then)} → {_mib(of[what].now)}" for what in ("anonymous", "shared")),
                    *(f"{of[what].then} → {of[what].now}" for what in ("fds", "threads")),
                ]
            )
    steady = Table(
        head=[
            "after saves",
            "state",
            "arena",
            "both beside it",
            "own memory",
            "shared",
            "descriptors",
            "threads",
        ],
        rows=rows,
    )
    text = [
        f"Resident memory of processes that do nothing else. Restores: what a process that restores "
        f"{_mib(nbytes)} had more at the peak than with its target alone, sampled every millisecond. "
        "While saves run: what the trainer and its writer had at the peak beside an arena of "
        f"{_mib(saved_nbytes)} of float32 weights, more than before the first save; the kernel keeps the "
        "peak of each process, so that none is too short to be seen, and their sum is at least what both had "
        f"at once. After saves: what they hold after each of {count}, between which the optimizer steps; "
        f"*→*: the least of {window} saves after the first {warm}, and of the last {window}."
    ]
    return Section(text=text, tables=[restores, peak, steady], targets=targets)


def _most(grown: Sequence[Growth]) -> str:
    """The largest growth of each kind that matters."""
    by = {
        what: max(one.now - one.then for one in grown if one.what == what)
        for what in ("anonymous", "shared", "fds", "threads")
    }
    memory = max(0, by["anonymous"], by["shared"])
    counts = max(0, by["fds"]), max(0, by["threads"])
    return f"{memory / MIB:.1f} MiB, {counts[0]} descriptors, {counts[1]} threads"


def _mib(nbytes: int) -> str:
    """At least 0: of an arena, not every page may be in memory."""
    return f"{max(0, nbytes) / MIB:,.0f} MiB"


def _run(module: str, *arguments: object) -> str:
    search = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"native_bench.{module}", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": search, **ENVIRONMENT},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done.stdout
