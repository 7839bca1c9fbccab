"""What comes before the first byte is read: catalog, read planning, finding a place for each tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ckptengine.adapters.restore import RestoreTarget
from ckptengine.catalog.catalog import latest, list_steps
from ckptengine.format.blocks import BlockTable
from ckptengine.format.names import MANIFEST_NAME, step_dirname
from ckptengine.read.plan import Destination, plan_reads
from ckptengine.storage.posix import PosixStore
from ckptengine.testing.synthetic import World
from native_bench.suites.sizes import Sizes


@pytest.fixture(scope="module")
def root(folder: Path, sizes: Sizes) -> str:
    for step in range(1, sizes.steps + 1):
        path = folder / "steps" / step_dirname(step)
        path.mkdir(parents=True)
        (path / MANIFEST_NAME).touch()
    return str(folder / "steps")


def test_list_steps(benchmark: BenchmarkFixture, root: str, sizes: Sizes) -> None:
    found = benchmark(list_steps, PosixStore(), root)
    assert [entry.step for entry in found] == list(range(1, sizes.steps + 1))


def test_newest_step(benchmark: BenchmarkFixture, root: str, sizes: Sizes) -> None:
    found = benchmark(latest, PosixStore(), root)
    assert found is not None
    assert found.step == sizes.steps


@pytest.mark.parametrize("where", ["one place", "everywhere"])
def test_plan_reads(benchmark: BenchmarkFixture, sizes: Sizes, where: str) -> None:
    nbytes = 4096
    blocks = BlockTable(sizes.small * nbytes, 1 << 20)
    gap = 0 if where == "one place" else 64
    wanted = [Destination(i * nbytes, (i + 1) * nbytes, i * (nbytes + gap)) for i in range(sizes.small)]
    reads = benchmark(plan_reads, blocks, wanted)
    assert [read.block for read in reads] == list(range(blocks.count))
    assert sum(read.nbytes_wanted for read in reads) == sizes.small * nbytes


def test_match_and_place(benchmark: BenchmarkFixture, sizes: Sizes) -> None:
    world = World(1, tensors=sizes.small, sharded=False)
    header = world.header(0)
    target = RestoreTarget(
        {"tensors": {entry.name: torch.empty(entry.shape) for entry in header.tensors}, "rank": 0}
    )

    def place() -> int:
        match = target.match(header)
        return sum(len(wanted) for one in match.rounds() for wanted in one.destinations.values())

    assert benchmark(place) == sizes.small + 1
