"""What is stored at a leaf of the tree, where in the data section, and does a tensor fit it?"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ckptengine.adapters.tensors import dtype_name, torch_dtype
from ckptengine.format import dtypes
from ckptengine.format.entries import ShardHeader, TensorEntry, ViewEntry, is_c_order
from ckptengine.format.geometry import Chunk, c_strides
from ckptengine.format.tree import TAG


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """A stored tensor, or a large value (`kind`).

    shard: the rank whose shard holds the bytes. start: its first byte in the data section. span_nbytes: from
    there to the end of its last element. view_stride: of its elements there, None for C order. source_stride:
    of the tensor it was, if dense but not in C order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    start: int
    span_nbytes: int
    view_stride: tuple[int, ...] | None = None
    chunk: Chunk | None = None
    source_stride: tuple[int, ...] | None = None
    placement: str | None = None
    kind: str | None = None
    descr: Any = None

    @property
    def itemsize(self) -> int:
        return dtypes.itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        nbytes = self.itemsize
        for size in self.shape:
            nbytes *= size
        return nbytes

    @property
    def stride(self) -> tuple[int, ...]:
        """Of its elements in the data section."""
        return c_strides(self.shape) if self.view_stride is None else self.view_stride

    @property
    def in_c_order(self) -> bool:
        return self.view_stride is None or is_c_order(self.shape, self.view_stride)

    @property
    def whole(self) -> Chunk:
        """Its chunk, also if it is whole."""
        return Chunk.whole(self.shape) if self.chunk is None else self.chunk


def leaves_of(header: ShardHeader) -> list[Leaf]:
    """The leaves by their index in the tree, without the replicas, whose bytes and shapes are another
    shard's.
    """
    bases = {entry.name: entry for entry in header.tensors}
    return [
        *[_of_tensor(header.rank, entry) for entry in header.tensors],
        *(_of_view(header.rank, view, bases[view.of]) for view in header.views),
    ]


def _of_tensor(rank: int, entry: TensorEntry) -> Leaf:
    return Leaf(
        entry.name,
        entry.dtype,
        entry.shape,
        rank,
        entry.start,
        entry.stop - entry.start,
        None,
        entry.chunk,
        entry.stride,
        entry.placement,
        entry.kind,
        entry.descr,
    )


def _of_view(rank: int, view: ViewEntry, base: TensorEntry) -> Leaf:
    tied = is_tie(view, base)
    return Leaf(
        view.name,
        view.dtype,
        view.shape,
        rank,
        base.start + view.byte_offset,
        view.extent_nbytes,
        view.stride,
        view.chunk,
        base.stride if tied else None,
        view.placement,
    )


def is_tie(view: ViewEntry, base: TensorEntry) -> bool:
    """Is the view all of its base, under another name?"""
    return (
        view.byte_offset == 0
        and view.stride is None
        and view.dtype == base.dtype
        and view.shape == base.shape
        and base.kind is None
    )


def same_strides(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Do the strides mean the same layout? Those of dimensions of size 1 do not matter, nor any of an empty
    tensor.
    """
    return a == b or 0 in shape or all(size == 1 or p == q for size, p, q in zip(shape, a, b, strict=True))


FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Dtypes that are cast into one another where that is asked for."""


def other_dtype(tensor: torch.Tensor, stored: str, *, cast: bool) -> str | None:
    """How a tensor's dtype is not what is stored, and is not to be cast from it either; else None."""
    name = dtype_name(tensor.dtype)
    if name == stored or (cast and name in FLOATS and stored in FLOATS):
        return None
    why = f", which is not cast: only {', '.join(FLOATS)} are" if cast else ""
    return f"dtype {name}, in the checkpoint {stored}{why}"


def misfits(tensor: torch.Tensor, chunk: Chunk | None, leaf: Leaf, *, cast: bool = False) -> list[str]:
    """How a tensor, or the chunk it is, differs from what is stored: dtype, shape, place in the global
    tensor. cast: as of `other_dtype`.
    """
    problems: list[str] = []
    if dtype_name(tensor.dtype) != leaf.dtype:
        problem = other_dtype(tensor, leaf.dtype, cast=cast)
        problems += [] if problem is None else [problem]
    if chunk is None and leaf.chunk is None and tensor.shape == leaf.shape:
        return problems
    own = Chunk.whole(tuple(tensor.shape)) if chunk is None else chunk
    stored = leaf.whole
    if own.tensor_shape != stored.tensor_shape:
        problems.append(f"shape {own.tensor_shape}, in the checkpoint {stored.tensor_shape}")
    # A whole tensor has the same bytes flat and in its own shape.
    elif own != stored and not (own.is_whole and stored.is_whole):
        problems.append(f"{_chunk_text(own)}, in the checkpoint {_chunk_text(stored)}")
    return problems


def _chunk_text(chunk: Chunk) -> str:
    if chunk.is_whole:
        return "the whole tensor"
    flat = " of the flattened tensor" if chunk.flat_of is not None else ""
    return f"the chunk of shape {chunk.shape} at {chunk.offsets}{flat}"


def empty_for(leaf: Leaf, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new tensor for a leaf, with the strides it was saved with."""
    dtype = torch_dtype(leaf.dtype)
    if leaf.source_stride is not None:
        return torch.empty_strided(leaf.shape, leaf.source_stride, dtype=dtype, device=device)
    return torch.empty(leaf.shape, dtype=dtype, device=device)


def leaf_indices(node: Any) -> list[int]:
    """The leaves in a tree or a part of it, in order."""
    found: list[int] = []
    stack = [node]
    while stack:
        node = stack.pop()
        if type(node) is dict:
            if node.get(TAG) == "t":
                found.append(node["i"])
            else:
                stack.extend(reversed(node.values()))
        elif type(node) is list:
            stack.extend(reversed(node))
    return found
