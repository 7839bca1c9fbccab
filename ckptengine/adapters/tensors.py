"""Which bytes of which global tensor does a tensor hold here?

Plain tensors are whole; a `DTensor`, a `ShardedTensor` and a `LocalChunk` hold a chunk. What is taken from
each is its local tensor, without a copy and without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import msgspec
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ckptengine.format import dtypes
from ckptengine.format.geometry import Chunk


@dataclass(frozen=True, slots=True, eq=False)
class LocalChunk:
    """A tensor that is a chunk of a larger one, for a state that shards its tensors by other means than
    torch's.

    tensor: this rank's part. global_shape, offsets: where it lies in the whole. With `flat_of`, the whole is
    the flattened tensor of that shape: `global_shape` is `(numel,)`.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    flat_of: tuple[int, ...] | None = None

    @property
    def chunk(self) -> Chunk:
        return Chunk(
            tuple(self.global_shape),
            tuple(self.offsets),
            tuple(self.tensor.shape),
            None if self.flat_of is None else tuple(self.flat_of),
        )


class Local(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The part of a tensor that is here.

    tensor: dense and strided, conjugation and negation resolved. chunk: None if it is whole. part: for a
    tensor with several parts on one rank, what tells this one from the others.
    """

    tensor: torch.Tensor
    chunk: Chunk | None = None
    placement: str | None = None
    part: str = ""


_STORABLE: dict[torch.dtype, str] = {
    dtype: name for name in dtypes.names() if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}


def storable() -> Mapping[torch.dtype, str]:
    """The dtypes that this torch has and the format can store, with their names."""
    return _STORABLE


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without `torch.`."""
    return _STORABLE.get(dtype) or str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """ValueError if this torch has no such dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this version of torch has no dtype {name!r}")
    return dtype


# Not every dtype has a copy kernel. Its bytes have: as elements of a plain dtype of the same size.
_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, shape and strides as elements of a dtype that every kernel knows."""
    return tensor.view(_PLAIN[tensor.element_size()])


def is_tensor(value: Any) -> bool:
    """Does `extract` take the value?"""
    return isinstance(value, _TENSORS)


# A tuple: to make the union of the three at each call would take longer than the test.
_TENSORS = (torch.Tensor, ShardedTensor, LocalChunk)


def is_ordinary(value: Any) -> bool:
    """Is it a tensor all of which is here, in memory whose bytes are its values, and dense but for its
    strides? It is then its own only part. Nearly every tensor is, so it is found out with as few questions as
    will do: of a dtype in the table none is quantized, and on a CPU or a CUDA device none is a meta tensor.
    """
    kind = type(value)
    return (
        (kind is torch.Tensor or kind is torch.nn.Parameter)
        and (value.is_cpu or value.is_cuda)
        and value.dtype in _STORABLE
        and value.layout is torch.strided
        and not value.is_nested
        and not _in_transform(value)
        and not value.is_conj()
        and not value.is_neg()
    )


def extract(value: Any, *, in_place: bool = False) -> list[Local]:
    """The parts of a tensor on this rank: one, except for a `ShardedTensor` of which this rank has none or
    several, and for a `DTensor` scalar whose mesh this rank is not in: nothing of a scalar is no chunk of it.

    in_place: the parts are to be written to, so that they have to be the value's own memory. ValueError,
    without the tensor's name, for a tensor that cannot be stored.
    """
    if is_ordinary(value):
        return [Local(value)]
    if isinstance(value, DTensor):
        found = _of_dtensor(value)
        if found is None:
            return []
        local = found
    elif isinstance(value, LocalChunk):
        local = _of_chunk(value)
    elif isinstance(value, ShardedTensor):
        return _of_sharded(value)
    else:
        local = Local(_checked(value))
    tensor = local.tensor
    if not in_place and (tensor.is_conj() or tensor.is_neg()):
        # The memory of such a view does not hold its values.
        return [msgspec.structs.replace(local, tensor=tensor.detach().resolve_conj().resolve_neg())]
    return [local]


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    kind = type(tensor)
    # A subclass that dispatches operations itself holds more than its bytes, or none.
    if (
        kind is not torch.Tensor
        and kind is not torch.nn.Parameter
        and (kind.__torch_dispatch__ not in _NO_DISPATCH or isinstance(tensor, UninitializedTensorMixin))
    ):
        raise ValueError(f"a tensor of type {kind.__module__}.{kind.__qualname__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"a tensor of layout {tensor.layout}")
    if tensor.is_quantized:
        raise ValueError("a quantized tensor, whose scales are not among its bytes")
    if tensor.is_meta:
        raise ValueError("a tensor on the meta device, which has no bytes")
    if tensor.is_nested:
        raise ValueError("a nested tensor")
    if tensor.dtype not in _STORABLE:
        raise ValueError(f"a tensor of dtype {tensor.dtype}")
    if _in_transform(tensor):
        raise ValueError("a tensor inside a function transform, such as vmap or grad")
    return tensor


_in_transform = torch._C._functorch.is_functorch_wrapped_tensor

_NO_DISPATCH = (
    torch.Tensor.__torch_dispatch__,
    torch.nn.Parameter.__torch_dispatch__,
    torch._C._disabled_torch_dispatch_impl,
)


def _of_dtensor(value: DTensor) -> Local | None:
    placements = tuple(value.placements)
    strange = [p for p in placements if not (p.is_replicate() or p.is_partial() or hasattr(p, "dim"))]
    if strange:
        raise ValueError(f"a DTensor with the placement {strange[0]!r}; redistribute it first")
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            "a DTensor with a partial placement, whose values are not reduced yet; redistribute it first"
        )
    if not value.dim() and value.device_mesh.get_coordinate() is None:
        return None
    with torch.no_grad():
        local = _checked(value.to_local())
    chunk = chunk_of_dtensor(tuple(value.shape), value.device_mesh, placements)
    if tuple(local.shape) != chunk.shape:
        if local.numel() or chunk.nelem:
            raise ValueError(
                f"a DTensor whose local shape is {tuple(local.shape)} where its placements give {chunk.shape}"
            )
        local = local.view(chunk.shape)
    text = ", ".join(_placement_text(placement) for placement in placements)
    return Local(local, None if chunk.is_whole else chunk, text)


def _placement_text(placement: Placement) -> str:
    if placement.is_replicate():
        return "Replicate()"
    return f"Shard({placement.dim})" if type(placement) is Shard else repr(placement)


def chunk_of_dtensor(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Chunk:
    """This rank's chunk of a DTensor; an empty one if the rank is not in the mesh.

    ValueError if the placements leave this rank elements that are no hyper-rectangle.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Chunk(shape, (0,) * len(shape), (0,) * len(shape))
    return chunk_at(shape, tuple(mesh.shape), tuple(coordinate), placements)


@lru_cache(maxsize=4096)
def chunk_at(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> Chunk:
    """The chunk at a coordinate of a mesh; pure.

    (The mesh itself would be no key for the cache: its coordinate changes with this process's rank.)
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim in range(len(shape)):
        splits = [
            (placement, count, index)
            for placement, count, index in zip(placements, mesh_shape, coordinate, strict=True)
            if not placement.is_replicate() and placement.dim % len(shape) == dim  # type: ignore[attr-defined]
        ]
        if all(type(placement) is Shard for placement, _, _ in splits):
            for _, count, index in splits:
                # torch.chunk's rule: all parts but the last are of the same size, and the last ones may be
                # empty.
                part = -(-sizes[dim] // count)
                start = min(part * index, sizes[dim])
                offsets[dim] += start
                sizes[dim] = min(part, sizes[dim] - start)
        else:
            offsets[dim], sizes[dim] = _strided_range(dim, shape[dim], splits)
    return Chunk(shape, tuple(offsets), tuple(sizes))


def _strided_range(dim: int, size: int, splits: Sequence[tuple[Placement, int, int]]) -> tuple[int, int]:
    """`(offset, size)` of what placements that include a strided one leave of a dimension, by splitting its
    indices.
    """
    indices = torch.arange(size).view((1,) * dim + (size,))
    for placement, count, index in splits:
        split: Any = placement
        parts, _ = split._split_tensor(indices, count, with_padding=False, contiguous=False)
        indices = parts[index]
    left = indices.flatten().tolist()
    if not left:
        return 0, 0
    if left != list(range(left[0], left[0] + len(left))):
        raise ValueError(
            "a DTensor whose strided shard here is not one range of its dimension; redistribute it first"
        )
    return left[0], len(left)


def _of_chunk(value: LocalChunk) -> Local:
    chunk = value.chunk
    try:
        chunk.validate()
    except ValueError as error:
        raise ValueError(f"a malformed LocalChunk ({error})") from None
    return Local(_checked(value.tensor), chunk, "flat" if chunk.flat_of is not None else None)


def _of_sharded(value: ShardedTensor) -> list[Local]:
    shape = tuple(value.metadata().size)
    shards = value.local_shards()
    locals_ = []
    for shard in shards:
        offsets, sizes = tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)
        tensor = _checked(shard.tensor)
        if tuple(tensor.shape) != sizes:
            if tensor.numel() != prod(sizes):
                raise ValueError(
                    f"a ShardedTensor whose local shape is {tuple(tensor.shape)} and not {sizes}"
                )
            tensor = tensor.view(sizes)
        part = "" if len(shards) == 1 else "@" + "_".join(map(str, offsets))
        locals_.append(Local(tensor, Chunk(shape, offsets, sizes), "ShardedTensor", part))
    return locals_
