"""What some ranks saved, restored by others, in memory: shapes, meshes, placements, dtypes of all kinds."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from ckptengine.adapters.tensors import LocalChunk, chunk_at, storable
from ckptengine.errors import StateMismatchError
from tests.adapters.fake import bits, same
from tests.adapters.saved_world import SavedWorld
from tests.format.strategies import usual

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = sorted(storable(), key=str)
shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple) | st.sampled_from([(0, 3), (17,), (1, 9), (8, 8)])


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    nbytes = prod(shape) * dtype.itemsize
    data = torch.randint(
        0, 2 if dtype is torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=generator
    )
    return data.view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)


def box(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> LocalChunk:
    part = _plain(tensor)[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    return LocalChunk(part.clone().view(tensor.dtype), tuple(tensor.shape), offsets)


def flat_range(tensor: torch.Tensor, start: int, stop: int) -> LocalChunk:
    part = _plain(tensor).reshape(-1)[start:stop].clone().view(tensor.dtype)
    return LocalChunk(part, (tensor.numel(),), (start,), tuple(tensor.shape))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(
                tensor.element_size(), torch.complex128
            )
        )
        if tensor.dim()
        else tensor
    )


# Functions and no strategies: hypothesis shows what it draws, and torch cannot show tensors of every dtype.
def layout(draw: Any, tensor: torch.Tensor, ranks: int) -> list[Any]:
    """What each rank holds of a tensor; None: nothing."""
    kinds = (
        ["plain", "one rank's", "cut", "flat", "mesh", "pairs"] if tensor.dim() else ["plain", "one rank's"]
    )
    kind = draw(st.sampled_from(kinds))
    if kind == "plain":
        return [tensor for _ in range(ranks)]
    if kind == "one rank's":
        owner = draw(st.integers(0, ranks - 1))
        return [tensor if rank == owner else None for rank in range(ranks)]
    if kind == "flat":
        edges = sorted(draw(st.lists(st.integers(0, tensor.numel()), min_size=ranks - 1, max_size=ranks - 1)))
        return [flat_range(tensor, a, b) for a, b in pairwise([0, *edges, tensor.numel()])]
    shape = tuple(tensor.shape)
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "mesh":
        rows = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
        placement = st.integers(0, len(shape) - 1).map(Shard) | st.just(Replicate())
        placements = draw(st.tuples(placement, placement))
        mesh = (rows, ranks // rows)
        chunks = [chunk_at(shape, mesh, at, placements) for at in product(*map(range, mesh))]
        return [box(tensor, chunk.offsets, chunk.shape) for chunk in chunks]
    parts = ranks if kind == "cut" else (ranks + 1) // 2
    edges = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=parts - 1, max_size=parts - 1)))
    spans = list(pairwise([0, *edges, shape[dim]]))
    chunks = []
    for rank in range(ranks):
        a, b = spans[rank % parts]
        at = tuple(a if d == dim else 0 for d in range(len(shape)))
        chunks.append(box(tensor, at, tuple(b - a if d == dim else n for d, n in enumerate(shape))))
    return chunks


def target_of(draw: Any, tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Something to fill, and what it is to hold then."""
    shape = tuple(tensor.shape)
    kind = draw(st.sampled_from(["whole", "box", "flat"]))
    if kind == "whole" or not shape:
        return _memory(draw, shape, tensor.dtype), tensor
    if kind == "flat":
        a, b = sorted(draw(st.tuples(*[st.integers(0, tensor.numel())] * 2)))
        expected = flat_range(tensor, a, b)
    else:
        spans = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
        expected = box(tensor, tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
    memory = _memory(draw, tuple(expected.tensor.shape), tensor.dtype)
    return LocalChunk(memory, expected.global_shape, expected.offsets, expected.flat_of), expected.tensor


def _memory(draw: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    order = draw(st.permutations(range(len(shape))))
    gap = draw(st.integers(0, 1))
    larger = [shape[d] + gap for d in order]
    made = torch.zeros(prod(larger) * dtype.itemsize, dtype=torch.uint8).view(dtype).view(larger)
    made = made.permute([order.index(d) for d in range(len(shape))])
    return made[tuple(slice(0, n) for n in shape)]


@usual
@given(st.data())
def test_any_layout_is_restored_into_any_other(data: st.DataObject) -> None:
    saved_by, restored_by = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    tensors = {
        f"t{i}": random_tensor(data.draw(shapes), DTYPES[data.draw(st.integers(0, len(DTYPES) - 1))], i)
        for i in range(data.draw(st.integers(1, 3)))
    }
    states: list[dict[str, Any]] = [{"epoch": 3, "w": {}} for _ in range(saved_by)]
    for name, tensor in tensors.items():
        for state, held in zip(states, layout(data.draw, tensor, saved_by), strict=True):
            if held is not None:
                state["w"][name] = held
    saved = SavedWorld(states)
    for reader in range(restored_by):
        made = {name: target_of(data.draw, tensor) for name, tensor in tensors.items()}
        target: dict[str, Any] = {"epoch": 0, "w": {name: part for name, (part, _) in made.items()}}
        nbytes = saved.restore(target, reader, own=restored_by == saved_by)
        assert target["epoch"] == 3
        for name, (part, expected) in made.items():
            found = part.tensor if isinstance(part, LocalChunk) else part
            assert bits(found) == bits(expected), name
        assert nbytes <= 4 * saved_by * sum(tensor.nbytes for tensor in tensors.values())


def sharded(tensor: torch.Tensor, ranks: int) -> list[LocalChunk]:
    size = -(-len(tensor) // ranks)
    rows = tensor.shape[1:]
    edges = [min(i * size, len(tensor)) for i in range(ranks + 1)]
    zeros = (0,) * len(rows)
    return [box(tensor, (a, *zeros), (b - a, *rows)) for a, b in pairwise(edges)]


MATRIX = torch.arange(48, dtype=torch.float32).view(8, 6)


def test_only_what_is_wanted_is_read() -> None:
    saved = SavedWorld([{"w": part} for part in sharded(MATRIX, 4)])
    target = {"w": LocalChunk(torch.zeros(3, 6), (8, 6), (3, 0))}
    assert saved.restore(target) == 3 * 6 * 4
    assert torch.equal(target["w"].tensor, MATRIX[3:6])


def test_a_plain_tensor_is_put_together_and_one_is_taken_apart() -> None:
    whole = {"w": torch.zeros(8, 6)}
    SavedWorld([{"w": part} for part in sharded(MATRIX, 3)]).restore(whole)
    assert torch.equal(whole["w"], MATRIX)
    part = {"w": LocalChunk(torch.zeros(8, 2), (8, 6), (0, 3))}
    SavedWorld([whole]).restore(part, 1)
    assert torch.equal(part["w"].tensor, MATRIX[:, 3:5])


def test_tied_tensors_are_read_once() -> None:
    states = []
    for part in sharded(MATRIX, 4):
        again = LocalChunk(part.tensor, part.global_shape, part.offsets)
        states.append({"embed": part, "head": again})
    memory = torch.zeros(8, 6)
    target = {"embed": memory, "head": memory.detach()}
    assert SavedWorld(states).restore(target) == MATRIX.nbytes
    assert torch.equal(memory, MATRIX)
    strided = torch.zeros(6, 8).t()
    assert SavedWorld(states).restore({"embed": strided, "head": strided.detach()}) == MATRIX.nbytes
    assert torch.equal(strided, MATRIX)


def test_all_differences_are_told_at_once() -> None:
    half = sharded(MATRIX, 4)
    states = [{"w": part, "x": part, "gap": part, "n": 1} for part in half]
    states[2]["gap"] = LocalChunk(torch.zeros(0, 6), (8, 6), (4, 0))
    target = {
        "w": torch.zeros(8, 5),
        "x": torch.zeros(8, 6, dtype=torch.int32),
        "gap": LocalChunk(torch.zeros(4, 6), (8, 6), (2, 0)),
        "n": 0,
        "more": torch.zeros(1),
    }
    with pytest.raises(StateMismatchError) as caught:
        SavedWorld(states).match(target)
    assert caught.value.missing == ("more",)
    assert caught.value.mismatched == (
        "w: shape (8, 5), in the checkpoint (8, 6)",
        "x: dtype int32, in the checkpoint float32",
        "gap: no rank stored [4:6, 0:6]",
    )
    assert target["n"] == 0


def test_what_a_target_does_not_want_may_be_missing_from_the_shards() -> None:
    states = [{"w": part} for part in sharded(MATRIX, 4)]
    states[2]["w"] = LocalChunk(torch.zeros(0, 6), (8, 6), (4, 0))
    target = {"w": LocalChunk(torch.zeros(4, 6), (8, 6), (0, 0))}
    SavedWorld(states).restore(target)
    assert torch.equal(target["w"].tensor, MATRIX[:4])


def test_what_was_each_ranks_own_is_refused_by_name() -> None:
    states = [
        {"w": part, "rng": torch.full((3,), rank), "seen": 10 * rank, "alike": torch.ones(2), "lr": 0.5}
        for rank, part in enumerate(sharded(MATRIX, 3))
    ]
    target = {"w": torch.zeros(8, 6), "rng": torch.zeros(3, dtype=torch.int64), "seen": 0, "lr": 0.0}
    target["alike"] = torch.zeros(2)
    saved = SavedWorld(states)
    with pytest.raises(StateMismatchError) as caught:
        saved.match(target)
    assert [line.partition(":")[0] for line in caught.value.mismatched] == ["rng", "seen"]
    del target["rng"], target["seen"]
    match = saved.match(target)
    assert match.unexpected == ("rng", "seen")
    saved.restore(target)
    assert same(target["alike"], torch.ones(2))
    assert target["lr"] == 0.5


def test_as_many_ranks_in_another_layout_get_their_own_values_back() -> None:
    states = [
        {"w": part, "rng": torch.full((3 + rank,), rank), "seen": 10 * rank}
        for rank, part in enumerate(sharded(MATRIX, 3))
    ]
    saved = SavedWorld(states)
    for rank in range(3):
        target = {"w": box(torch.zeros_like(MATRIX), (0, 2 * rank), (8, 2)), "seen": -1}
        target["rng"] = torch.zeros(3 + rank, dtype=torch.int64)
        saved.restore(target, rank, own=True)
        assert torch.equal(target["w"].tensor, MATRIX[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(target["rng"], states[rank]["rng"])
        assert target["seen"] == 10 * rank


def test_a_rank_that_finds_all_in_its_own_shard_opens_no_other() -> None:
    saved = SavedWorld([{"w": part, "rank": rank} for rank, part in enumerate(sharded(MATRIX, 4))])
    target = {"w": LocalChunk(torch.zeros(2, 6), (8, 6), (2, 0)), "rank": -1}
    saved.restore(target, 1, own=True)
    assert target["rank"] == 1
    assert not saved.opened


def test_stages_of_a_pipeline_become_one_model_and_other_stages() -> None:
    states = [{"layers": {str(i): torch.full((2,), float(i)) for i in stage}} for stage in ((0, 1), (2, 3))]
    saved = SavedWorld(states)
    whole = {"layers": {str(i): torch.zeros(2) for i in range(4)}}
    assert saved.match(whole).unexpected == ()
    saved.restore(whole)
    assert [float(t[0]) for t in whole["layers"].values()] == [0.0, 1.0, 2.0, 3.0]
    third = {"layers": {"2": torch.zeros(2)}}
    assert saved.match(third, 2).unexpected == ("layers.0", "layers.1", "layers.3")
    saved.restore(third, 2)
    assert float(third["layers"]["2"][0]) == 2.0
