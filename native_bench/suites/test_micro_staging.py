"""Arena, and what a save does with a state before it copies it."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ckptengine.adapters.stage import copy_items
from ckptengine.adapters.state import flatten
from ckptengine.staging.arena import Arena
from ckptengine.staging.pool import ArenaPool
from native_bench.suites.sizes import Sizes


def test_make_arena(benchmark: BenchmarkFixture, sizes: Sizes) -> None:
    def make() -> int:
        arena = Arena(sizes.buffer * 4)
        try:
            return len(arena.payload)
        finally:
            arena.close()

    assert benchmark(make) == sizes.buffer * 4


def test_acquire_reused_arena(benchmark: BenchmarkFixture, sizes: Sizes) -> None:
    pool = ArenaPool(max_arenas=2, budget_nbytes=None)
    try:
        pool.release(pool.acquire(sizes.buffer, 10.0))
        held = pool.nbytes

        def reuse() -> None:
            pool.release(pool.acquire(sizes.buffer, 10.0))

        benchmark(reuse)
        assert pool.nbytes == held
    finally:
        pool.close()


@pytest.fixture(scope="module")
def state(sizes: Sizes) -> dict[str, object]:
    whole = torch.arange(sizes.small * 16, dtype=torch.float32)
    return {
        "model": {f"layers.{i}.weight": whole[16 * i : 16 * i + 16].clone() for i in range(sizes.small)},
        "step": 3,
    }


def test_flatten(benchmark: BenchmarkFixture, state: dict[str, object], sizes: Sizes) -> None:
    flat = benchmark(flatten, state)
    assert [item.name for item in flat.items] == [f"model.layers.{i}.weight" for i in range(sizes.small)]
    assert flat.tree["step"] == 3


def test_copy_small_tensors(benchmark: BenchmarkFixture, state: dict[str, object], sizes: Sizes) -> None:
    items = flatten(state).items
    into = memoryview(bytearray(64 * sizes.small))
    benchmark(copy_items, items, [64 * i for i in range(sizes.small)], into)
    assert torch.equal(torch.frombuffer(into, dtype=torch.float32), torch.arange(16.0 * sizes.small))


def test_copy_one_large_tensor(benchmark: BenchmarkFixture, sizes: Sizes) -> None:
    tensor = torch.arange(sizes.buffer, dtype=torch.float32)
    items = flatten({"t": tensor}).items
    into = memoryview(bytearray(tensor.nbytes))
    benchmark(copy_items, items, [0], into)
    assert torch.equal(torch.frombuffer(into, dtype=torch.float32), tensor)
