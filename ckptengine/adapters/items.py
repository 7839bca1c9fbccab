"""What is stored of a state: a frozen list of byte ranges to be, and the tree that refers to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ckptengine.format import dtypes
from ckptengine.format.geometry import Chunk
from ckptengine.format.shard import ViewEntry


@dataclass(frozen=True, slots=True, eq=False)
class StateItem:
    """One range of the data section. Fields as in `TensorEntry`; `source` has the bytes, in any layout if a
    tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk: Chunk | None
    stride: tuple[int, ...] | None
    placement: str | None
    kind: str | None
    descr: Any
    source: torch.Tensor | bytes = field(repr=False)
    nbytes: int
    alignment: int

    @property
    def on_cuda(self) -> bool:
        return isinstance(self.source, torch.Tensor) and self.source.is_cuda


@dataclass(frozen=True, slots=True, eq=False)
class FlatState:
    """A state as it is stored.

    Leaf i of the tree is the i-th of: items, then views, then replicas. Values are in the tree, encoded, and
    do not change any more; the items' tensors are the caller's own until they are copied.
    """

    tree: Any
    items: list[StateItem]
    views: list[ViewEntry] = field(default_factory=list)
    replicas: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all items, without padding."""
        return sum(item.nbytes for item in self.items)


def tensor_item(
    name: str,
    dtype: str,
    source: torch.Tensor,
    *,
    chunk: Chunk | None = None,
    placement: str | None = None,
    stride: tuple[int, ...] | None = None,
) -> StateItem:
    shape = tuple(source.shape)
    nbytes = source.numel() * dtypes.itemsize(dtype)
    return StateItem(
        name, dtype, shape, chunk, stride, placement, None, None, source, nbytes, dtypes.alignment(dtype)
    )


def value_item(name: str, data: bytes, kind: str, descr: Any) -> StateItem:
    """A large value. Aligned for any dtype, as an array is read in place."""
    return StateItem(name, "uint8", (len(data),), None, None, None, kind, descr, data, len(data), 16)
