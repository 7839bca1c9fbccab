"""Save, restore, read and verify, through the public names and on a real file system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import ckptengine as ck
from native_bench import page_cache
from native_bench.suites.sizes import Sizes

TENSORS = 16


@pytest.fixture(scope="module")
def state(sizes: Sizes) -> dict[str, torch.Tensor]:
    numel = sizes.state // TENSORS // 4
    return {f"t{i}": torch.arange(numel, dtype=torch.float32) + i for i in range(TENSORS)}


@pytest.fixture(scope="module")
def saved(folder: Path, state: dict[str, torch.Tensor]) -> Iterator[ck.Checkpointer]:
    with ck.Checkpointer(folder / "root", config=ck.Config(keep_last=2)) as ckpt:
        ckpt.save(1, state)
        yield ckpt


def same(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> bool:
    return found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def test_save(benchmark: BenchmarkFixture, saved: ck.Checkpointer, state: dict[str, torch.Tensor]) -> None:
    """From the call to the commit."""
    first = saved.latest
    assert first is not None
    steps = iter(range(first + 1, 1000))
    info = benchmark.pedantic(lambda: saved.save(next(steps), state), rounds=5)
    assert saved.latest == info.step > first
    with ck.open_checkpoint(saved.root) as c:
        assert same({name: c.get_tensor(name) for name in c.keys()}, state)  # noqa: SIM118


def test_stall(benchmark: BenchmarkFixture, saved: ck.Checkpointer, state: dict[str, torch.Tensor]) -> None:
    """What the training thread pays: from the call until it returns. Each save begins when the last is
    committed."""
    first = saved.latest
    assert first is not None
    steps = iter(range(first + 1, 1000))
    handle = benchmark.pedantic(
        lambda: saved.async_save(next(steps), state), setup=lambda: saved.wait(60.0), rounds=5
    )
    assert handle.result(60.0).step == saved.latest


@pytest.mark.parametrize("cache", ["cold", "hot"])
def test_restore(
    benchmark: BenchmarkFixture, saved: ck.Checkpointer, state: dict[str, torch.Tensor], cache: str
) -> None:
    saved.wait(60.0)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def prepare() -> None:
        (page_cache.evict if cache == "cold" else page_cache.fill)([saved.root])

    info = benchmark.pedantic(lambda: saved.restore(target), setup=prepare, rounds=5)
    assert same(target, state)
    assert info.nbytes == sum(tensor.nbytes for tensor in state.values())


def test_open_and_get_tensor(
    benchmark: BenchmarkFixture, saved: ck.Checkpointer, state: dict[str, torch.Tensor]
) -> None:
    def get() -> torch.Tensor:
        with ck.open_checkpoint(saved.root) as c:
            return c.get_tensor("t7")

    assert torch.equal(benchmark.pedantic(get, rounds=5), state["t7"])


def test_verify(benchmark: BenchmarkFixture, saved: ck.Checkpointer) -> None:
    report = benchmark.pedantic(lambda: ck.verify(saved.root), rounds=5)
    assert report.ok
