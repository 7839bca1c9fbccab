"""Chunks of sharded tensors, against torch's own arithmetic."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckptengine.adapters.tensors import chunk_at, dtype_name, torch_dtype


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Any, ...]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(-len(shape), len(shape) - 1)
    placements = tuple(draw(dims.map(Shard) | st.just(Replicate())) for _ in mesh)
    return shape, mesh, placements


@given(layouts())
def test_chunks_are_those_torch_gives_and_cover_the_tensor(layout: tuple[Any, ...]) -> None:
    shape, mesh, placements = layout
    count = torch.zeros(shape, dtype=torch.int64)
    positive = tuple(Shard(p.dim % len(shape)) if isinstance(p, Shard) else p for p in placements)
    for coordinate in product(*map(range, mesh)):
        chunk = chunk_at(shape, mesh, coordinate, placements)
        chunk.validate()
        local, offsets = _compute_local_shape_and_global_offset(shape, mesh, coordinate.__getitem__, positive)
        assert chunk.shape == tuple(local)
        if chunk.nelem:
            assert chunk.offsets == tuple(offsets)
        count[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.shape, strict=True))] += 1
    copies = prod(size for size, placement in zip(mesh, placements, strict=True) if placement.is_replicate())
    assert bool((count == copies).all())


def test_fsdp_over_tensor_parallel_shards_are_chunks() -> None:
    """FSDP2 on a tensor-parallel parameter: the mesh is (dp, tp), and the split of dp comes second."""
    shape, mesh = (16, 3), (2, 2)
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    offsets = {
        coordinate: chunk_at(shape, mesh, coordinate, placements).offsets
        for coordinate in product(range(2), range(2))
    }
    assert offsets == {(0, 0): (0, 0), (1, 0): (4, 0), (0, 1): (8, 0), (1, 1): (12, 0)}


def test_strided_shards_that_are_no_chunk_are_refused() -> None:
    with pytest.raises(ValueError, match="strided shard"):
        chunk_at((8,), (2,), (0,), (_StridedShard(0, split_factor=2),))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "complex32"])
def test_dtype_names_are_torch_names(name: str) -> None:
    assert dtype_name(torch_dtype(name)) == name


@pytest.mark.parametrize("name", ["no_such", "load", "strided", ""])
def test_other_names_are_no_dtypes(name: str) -> None:
    with pytest.raises(ValueError, match="no dtype"):
        torch_dtype(name)
