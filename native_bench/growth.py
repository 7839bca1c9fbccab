"""What grows with the world, and what must not? `python -m native_bench.growth [--quick]` prints it as JSON.

Times are of the CPU, of the thread that is asked about, and medians: what else runs on the machine does not
count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ckptengine.catalog.catalog import latest, read_manifest
from ckptengine.format.columns import IndexBuilder
from ckptengine.format.geometry import Chunk
from ckptengine.format.index import decode_index, encode_index
from ckptengine.format.manifest import decode_manifest, encode_manifest
from ckptengine.format.names import MANIFEST_NAME, step_dirname
from ckptengine.format.scan import HeaderScanner
from ckptengine.read.held import held_tensors
from ckptengine.read.reshard import parts_of
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import BlockReader
from ckptengine.testing.synthetic import World, shard_file, write_step
from ckptengine.testing.worlds import restore_two_ranks
from native_bench.sections import Section, Table
from native_bench.targets import Target

ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Figure:
    """target: what the value is to be at most; None where it is only told."""

    name: str
    value: float
    unit: str
    target: float | None = None


class _Watch:
    """Notes when a rank's thread begins, and when it opens its shard for the second time: to read blocks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._began: dict[int, float] = {}
        self.seconds: dict[int, float] = {}

    def state(self, rank: int) -> dict[str, Any]:
        world = self._world
        made = {"tensors": {name: torch.zeros(world.rows, 64) for name in world.names}, "rank": -1}
        self._began[rank] = time.thread_time()
        return made

    def store(self, rank: int) -> PosixStore:
        return _WatchedStore(lambda: self._opened(rank))

    def _opened(self, rank: int) -> None:
        self.seconds[rank] = time.thread_time() - self._began[rank]


class _WatchedStore(PosixStore):
    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def open(self, path: str) -> BlockReader:
        self._note()
        return super().open(path)


def restore_metadata(folder: Path, ranks: int, tensors: int) -> list[Figure]:
    """What a restore does before the first block is read, in a world of two ranks and in a large one."""
    worlds = {"small": World(3, tensors, sharded=False), "large": World(ranks, tensors, sharded=False)}
    found: dict[str, dict[int, list[float]]] = {size: {0: [], 1: []} for size in worlds}
    for size, world in worlds.items():
        write_step(folder / size, world, shards=(0, 1), index=False)
    for _ in range(ROUNDS):
        for size, world in worlds.items():
            watch = _Watch(world)
            restore_two_ranks(str(folder / size), world.ranks, 1, watch.state, watch.store)
            for rank, seconds in watch.seconds.items():
                found[size][rank].append(seconds)
    median = {(size, rank): statistics.median(found[size][rank]) for size in found for rank in (0, 1)}
    return [
        Figure(
            "restore metadata of a rank, large world / small",
            median["large", 1] / median["small", 1],
            "",
            1.2,
        ),
        Figure("restore metadata of a rank, large world", 1e3 * median["large", 1], "ms"),
        Figure("restore metadata of the coordinator, large world", 1e3 * median["large", 0], "ms"),
        Figure("restore metadata of the coordinator, small world", 1e3 * median["small", 0], "ms"),
    ]


def newest_step(folder: Path, steps: int) -> list[Figure]:
    for step in range(steps):
        path = folder / "steps" / step_dirname(step)
        path.mkdir(parents=True)
        (path / MANIFEST_NAME).touch()
    seconds, found = _median(lambda: latest(PosixStore(), str(folder / "steps")))
    assert found is not None
    assert found.step == steps - 1
    return [Figure(f"newest of {steps} steps, warm", 1e3 * seconds, "ms", 50.0)]


def index(ranks: int, tensors: int) -> list[Figure]:
    world = World(ranks, tensors)
    data = world.index()
    seconds, opened = _median(lambda: decode_index(data, path=""), rounds=3)
    look_up, chunks = _median(lambda: opened.chunks(world.names[0]))
    assert len(chunks) == ranks
    with tempfile.NamedTemporaryFile(prefix="ckpt-growth-") as file:
        file.write(data)
        file.flush()
        grown = _in_a_process("--open-index", file.name)
    return [
        Figure(f"INDEX of {ranks} ranks x {tensors} tensors opens in", seconds, "s", 1.0),
        Figure("INDEX on disk", len(data) / 2**20, "MiB"),
        Figure("INDEX, growth of peak memory", grown / 2**20, "MiB"),
        Figure("INDEX, look-up of one tensor's chunks", 1e3 * look_up, "ms"),
    ]


def memory_of_opening(path: str) -> int:
    """Bytes by which this process's peak memory grows when it opens the INDEX file at `path`: one that has
    built it has been through more."""
    data = Path(path).read_bytes()
    before = _set_peak_back()
    opened = decode_index(data, path=path)
    grown = _peak_nbytes() - before
    assert opened is not None
    return grown


def _in_a_process(*arguments: str) -> Any:
    """What `python -m native_bench.growth` prints for these."""
    command = [sys.executable, "-m", "native_bench.growth", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def resharding(folder: Path, ranks: int, tensors: int) -> list[Figure]:
    """What a rank of a quarter as many does before it reads, in a process of its own: its memory counts,
    too."""
    path = write_step(folder / "resharding", World(ranks, tensors), shards=())
    alone = []
    for share in (4, 8):
        alone.append([_in_a_process("--plan", path, "--share", str(share)) for _ in range(3)])
    seconds, nbytes, _ = map(max, zip(*alone[0], strict=True))
    of_a_share = [statistics.median(run[2] for run in runs) for runs in alone]
    what = f"{ranks} -> {ranks // 4} ranks x {tensors} tensors"
    return [
        Figure(f"resharding plan of a rank, {what}", seconds, "s", 2.0),
        Figure("resharding plan, growth of peak memory", nbytes / 2**20, "MiB", 500.0),
        Figure(
            "resharding plan, for 8 shards / for 4, without opening INDEX",
            of_a_share[1] / of_a_share[0],
            "",
            2.2,
        ),
    ]


def plan_of_a_rank(path: str, share: int) -> tuple[float, float, float]:
    """CPU seconds and bytes that it takes to plan the read of `share` neighbouring ranks' chunks of all
    tensors; and seconds of that without opening manifest and INDEX."""
    before = _set_peak_back()
    began = time.process_time()
    store = PosixStore()
    manifest = read_manifest(store, path)
    held = held_tensors(store, path, manifest, list)
    opened = time.process_time()
    first = manifest.world_size // 2
    parts = 0
    for name in held.names():
        found = held.find(name)
        if found is not None and found.sharded:
            rows = found.rows
            begin = int(rows.offsets[first, 0])
            size = int(rows.offsets[first + share, 0]) - begin
            chunk = Chunk(rows.global_shape, (begin, 0), (size, *rows.global_shape[1:]))
            parts += len(parts_of(rows, chunk).parts)
    planned = time.process_time()
    assert parts == share * (len(held.names()) - 1)
    return planned - began, _peak_nbytes() - before, planned - opened


def _set_peak_back() -> int:
    """To what is in memory now, in bytes: importing all this may have taken more for a moment."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_nbytes()


def _peak_nbytes() -> int:
    """Of this program's memory; getrusage also counts that of the program which started it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line[:6] == "VmHWM:")
    return 1024 * int(line.split()[1])


def commit(folder: Path, ranks: int, tensors: int) -> list[Figure]:
    """What the committer does with headers that it has read; and the manifest."""
    world = World(ranks, tensors)
    headers = [shard_file(world, rank)[0] for rank in (1, 2)]

    def build() -> IndexBuilder:
        builder, scanner = IndexBuilder(), HeaderScanner()
        for columns in world.columns():
            scanner.scan(headers[columns.rank % 2])
            builder.add(columns)
        return builder

    scan, builder = _median(build, rounds=1)
    encode, _ = _median(lambda: encode_index(builder), rounds=3)
    path = Path(write_step(folder / "commit", world, shards=(), index=False), MANIFEST_NAME)
    data = path.read_bytes()
    decode, manifest = _median(lambda: decode_manifest(data, path=""))
    again, _ = _median(lambda: encode_manifest(manifest))
    return [
        Figure("commit: headers to columns", scan, "s"),
        Figure("commit: columns to INDEX", encode, "s"),
        Figure("manifest, encode", 1e3 * again, "ms"),
        Figure("manifest, decode", 1e3 * decode, "ms"),
    ]


def _median(work: Callable[[], Any], rounds: int = ROUNDS) -> tuple[float, Any]:
    seconds = []
    result = None
    for _ in range(rounds):
        began = time.thread_time()
        result = work()
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds), result


def measure(*, quick: bool = False) -> list[Figure]:
    """All figures; quick: of a small world, to see that it works."""
    ranks, tensors, steps, resharded = (64, 20, 50, 20) if quick else (4096, 500, 1000, 1000)
    with tempfile.TemporaryDirectory(prefix="ckpt-growth-") as name:
        folder = Path(name)
        return [
            *index(ranks, tensors),
            *restore_metadata(folder, ranks, tensors),
            *newest_step(folder, steps),
            *commit(folder, ranks, tensors),
            *resharding(folder, ranks, resharded),
        ]


def section(directory: Path, quick: bool) -> Section:
    """For the report. Files go to a temporary directory: what is counted is CPU time."""
    figures = measure(quick=quick)
    text = [
        "Synthetic checkpoints whose other ranks' shards are not there. CPU time of the thread that is asked "
        f"about, medians of {ROUNDS}: what else runs on the machine does not count."
    ]
    rows = [[figure.name, _told(figure)] for figure in figures]
    targets = [
        Target(figure.name, _told(figure), _bound(figure), figure.value <= figure.target)
        for figure in figures
        if figure.target is not None
    ]
    return Section(text=text, tables=[Table(head=["", "measured"], rows=rows)], targets=targets)


def _told(figure: Figure) -> str:
    number = f"{figure.value:.2f}" if figure.value < 100 else f"{figure.value:,.0f}"
    return f"{number} {figure.unit or '×'}"


def _bound(figure: Figure) -> str:
    return f"≤ {figure.target:g} {figure.unit or '×'}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m native_bench.growth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small world, to see that it works")
    parser.add_argument("--plan", metavar="STEP", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, default=4, help=argparse.SUPPRESS)
    parser.add_argument("--open-index", metavar="FILE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plan is not None:
        print(json.dumps(plan_of_a_rank(given.plan, given.share)))
        return 0
    if given.open_index is not None:
        print(memory_of_opening(given.open_index))
        return 0
    figures = measure(quick=given.quick)
    print(json.dumps([asdict(figure) for figure in figures], indent=2))
    return int(any(figure.target is not None and figure.value > figure.target for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
