"""Which tensors share memory, so that their bytes are stored once and come back shared?

Tensors whose byte extents overlap form a group. Within a group:

- Tensors of the same address, shape, strides and dtype are one tensor with several names.
- If one is in C order and covers the group, it is stored, and the others are views of it.
- Else the memory from the first byte to the last is stored, as the tensor `<first name>#storage`, if that is
  no more than the tensors would be one by one. All are views of it.
- Else (a few columns of a wide matrix) each is stored by itself: the same bytes, but no longer shared.

Tensors that merely lie in the same storage, side by side, are not tied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ckptengine.adapters.items import StateItem, tensor_item
from ckptengine.adapters.tensors import Local, dtype_name
from ckptengine.format import dtypes
from ckptengine.format.shard import ViewEntry

_Extent = tuple[int, int, int]
"""First byte, byte after the last, index of the leaf. Also sorts that way."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedLocal:
    """A leaf of the state, under the name it is stored by."""

    name: str
    local: Local


def resolve_aliases(
    leaves: Sequence[NamedLocal], claim: Callable[[str], str]
) -> tuple[dict[int, StateItem], dict[int, ViewEntry], dict[int, StateItem]]:
    """Decide what is stored for each leaf, by its index.

    `claim` makes a name unique. Returns the items, the views, and the items that are no leaf's own, by the
    index of the leaf they are to be stored before.
    """
    items: dict[int, StateItem] = {}
    views: dict[int, ViewEntry] = {}
    extra: dict[int, StateItem] = {}
    for group in _overlapping(leaves):
        if len(group) > 1:
            _resolve_group(leaves, group, claim, items, views, extra)
    for index, leaf in enumerate(leaves):
        if index not in views and index not in items:
            items[index] = _own_item(leaf)
    return items, views, extra


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


def _own_item(leaf: NamedLocal) -> StateItem:
    local = leaf.local
    return tensor_item(
        leaf.name,
        dtype_name(local.tensor.dtype),
        local.tensor,
        chunk=local.chunk,
        placement=local.placement,
        stride=dense_stride(local.tensor),
    )


def _overlapping(leaves: Sequence[NamedLocal]) -> list[list[_Extent]]:
    by_device: dict[torch.device, list[_Extent]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        tensor = leaf.local.tensor
        nelem = tensor.numel()
        if nelem:
            if not tensor.is_contiguous():
                nelem = extent_nelem(tensor)
            start = tensor.data_ptr()
            by_device[tensor.device].append((start, start + nelem * tensor.element_size(), index))
    groups: list[list[_Extent]] = []
    for extents in by_device.values():
        extents.sort()
        end = -1
        for extent in extents:
            if extent[0] < end:
                groups[-1].append(extent)
            else:
                groups.append([extent])
            end = max(end, extent[1])
    return groups


def _resolve_group(
    leaves: Sequence[NamedLocal],
    group: list[_Extent],
    claim: Callable[[str], str],
    items: dict[int, StateItem],
    views: dict[int, ViewEntry],
    extra: dict[int, StateItem],
) -> None:
    same: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for _, _, index in sorted(group, key=lambda extent: extent[2]):
        tensor = leaves[index].local.tensor
        same[tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()].append(index)
    start, stop = group[0][0], max(extent[1] for extent in group)
    if len(same) > 1:
        base = _covering(leaves, same, start, stop)
        if base is not None:
            items[base] = item = _own_item(leaves[base])
            for _, _, index in group:
                if index != base:
                    views[index] = _view(leaves[index], item.name, start)
            return
        storage = _storage_tensor(leaves, same, start, stop)
        if storage is not None:
            first = min(index for _, _, index in group)
            alignment = max(dtypes.alignment(dtype_name(leaves[i].local.tensor.dtype)) for _, _, i in group)
            name = claim(f"{leaves[first].name}#storage")
            nbytes = stop - start
            extra[first] = StateItem(
                name, "uint8", (nbytes,), None, None, None, None, None, storage, nbytes, alignment
            )
            for _, _, index in group:
                views[index] = _view(leaves[index], name, start)
            return
    for first, *others in same.values():
        items[first] = item = _own_item(leaves[first])
        for index in others:
            local = leaves[index].local
            views[index] = ViewEntry(
                leaves[index].name, item.name, 0, item.dtype, item.shape, None, local.chunk, local.placement
            )


def _covering(
    leaves: Sequence[NamedLocal], same: dict[tuple[object, ...], list[int]], start: int, stop: int
) -> int | None:
    """The first leaf in C order that holds all bytes of the group, with the others at whole elements of
    theirs.
    """
    tensors = [leaves[indices[0]].local.tensor for indices in same.values()]
    if any((tensor.data_ptr() - start) % tensor.element_size() for tensor in tensors):
        return None
    for tensor, indices in zip(tensors, same.values(), strict=True):
        if tensor.data_ptr() == start and tensor.is_contiguous() and start + tensor.nbytes == stop:
            return indices[0]
    return None


def _storage_tensor(
    leaves: Sequence[NamedLocal], same: dict[tuple[object, ...], list[int]], start: int, stop: int
) -> torch.Tensor | None:
    """The group's memory as bytes, if it is one storage's and no more than the tensors' own bytes."""
    tensors = [leaves[indices[0]].local.tensor for indices in same.values()]
    if stop - start > sum(tensor.numel() * tensor.element_size() for tensor in tensors):
        return None
    storage = tensors[0].untyped_storage()
    if any(
        tensor.untyped_storage().data_ptr() != storage.data_ptr()
        or (tensor.data_ptr() - start) % tensor.element_size()
        for tensor in tensors
    ):
        return None
    offset = start - storage.data_ptr()
    if offset + stop - start > storage.nbytes():
        return None
    view = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return view.set_(storage, offset, (stop - start,), (1,))


def _view(leaf: NamedLocal, of: str, start: int) -> ViewEntry:
    local = leaf.local
    tensor = local.tensor
    stride = None if tensor.is_contiguous() else tuple(tensor.stride())
    return ViewEntry(
        leaf.name,
        of,
        tensor.data_ptr() - start,
        dtype_name(tensor.dtype),
        tuple(tensor.shape),
        stride,
        local.chunk,
        local.placement,
    )
