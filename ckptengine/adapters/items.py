"""What is stored of a state: a frozen list of byte ranges to be, and the tree that refers to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from ckptengine.adapters.tensors import storable
from ckptengine.format import dtypes
from ckptengine.format.geometry import Chunk
from ckptengine.format.shard import TensorEntry, ViewEntry

_DTYPES = {dtype: (name, dtypes.alignment(name)) for dtype, name in storable().items()}


class StateItem(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One range of the data section. Fields as in `TensorEntry`; `source` has the bytes, in any layout if a
    tensor.

    start, stop: a tensor's first byte in memory, and the byte after its last, when the state was flattened;
    both 0 if it is empty.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk: Chunk | None
    stride: tuple[int, ...] | None
    placement: str | None
    kind: str | None
    descr: Any
    source: torch.Tensor | bytes
    nbytes: int
    alignment: int
    start: int = 0
    stop: int = 0
    on_cpu: bool = True

    def entry(self, start: int, stop: int) -> TensorEntry:
        """What a header says of it, at these bytes of the data section."""
        # By position, as this is done for every tensor.
        return TensorEntry(
            self.name,
            self.dtype,
            self.shape,
            start,
            stop,
            self.chunk,
            self.stride,
            self.placement,
            self.kind,
            self.descr,
        )

    @property
    def tensor(self) -> torch.Tensor:
        """The source of what is not a large value."""
        assert not isinstance(self.source, bytes)
        return self.source

    @property
    def on_cuda(self) -> bool:
        return not self.on_cpu and self.tensor.is_cuda


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
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    """Those that the state was taken from."""

    @property
    def nbytes(self) -> int:
        """Bytes of all items, without padding."""
        return sum(item.nbytes for item in self.items)


def tensor_item(
    name: str, tensor: torch.Tensor, chunk: Chunk | None = None, placement: str | None = None
) -> StateItem:
    """A tensor as it is stored if it shares memory with no other.

    Each thing is asked once and passed by position, as this is done for every tensor.
    """
    dtype, alignment = _DTYPES[tensor.dtype]
    nbytes = tensor.nbytes
    stride = None
    start = stop = 0
    if nbytes:
        start = tensor.data_ptr()
        stop = start + nbytes
        if not tensor.is_contiguous():
            stride = dense_stride(tensor)
            stop = start + extent_nelem(tensor) * tensor.element_size()
    return StateItem(
        name,
        dtype,
        tuple(tensor.shape),
        chunk,
        stride,
        placement,
        None,
        None,
        tensor,
        nbytes,
        alignment,
        start,
        stop,
        tensor.is_cpu,
    )


def extent_nelem(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory; of one that is not empty."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that fills its extent, each element once, but not in C order; else None."""
    if tensor.is_contiguous() or not tensor.numel():
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return tuple(tensor.stride())


def value_item(name: str, data: bytes, kind: str, descr: Any) -> StateItem:
    """A large value. Aligned for any dtype, as an array is read in place."""
    return StateItem(name, "uint8", (len(data),), None, None, None, kind, descr, data, len(data), 16)
