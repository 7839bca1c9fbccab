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
from itertools import islice
from operator import gt

import numpy as np
import torch

from ckptengine.adapters.items import StateItem
from ckptengine.format import dtypes
from ckptengine.format.shard import ViewEntry

FEW = 1000
"""Up to so many are sorted as fast in Python as in numpy, whose code may not be in the cache any more."""


def resolve_aliases(
    leaves: Sequence[StateItem], claim: Callable[[str], str]
) -> tuple[dict[int, StateItem], dict[int, ViewEntry], dict[int, StateItem]]:
    """Decide what is stored for each leaf, by its index.

    leaves: the state's tensors, each as it would be stored by itself. `claim` makes a name unique. Returns
    the items, the views, and the items that are no leaf's own, by the index of the leaf they are to be stored
    before.
    """
    views: dict[int, ViewEntry] = {}
    extra: dict[int, StateItem] = {}
    by_device: dict[torch.device | None, list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        if leaf.stop:
            by_device[None if leaf.on_cpu else leaf.tensor.device].append(index)
    for members in by_device.values():
        starts = [leaves[index].start for index in members]
        for group in overlapping(starts, [leaves[index].stop for index in members]):
            _resolve_group(leaves, [members[i] for i in group], claim, views, extra)
    items = {index: leaf for index, leaf in enumerate(leaves) if index not in views}
    return items, views, extra


def overlapping(starts: Sequence[int], stops: Sequence[int]) -> list[list[int]]:
    """Which ranges [start, stop), none of them empty, hang together by overlaps?

    The indices of each group of two and more, by start, then stop, then index.
    """
    # Nearly always none do: whenever the next one begins, as many have ended as have begun.
    if len(starts) <= FEW and not any(map(gt, sorted(stops), islice(sorted(starts), 1, None))):
        return []
    first, last = np.array(starts, np.uint64), np.array(stops, np.uint64)
    order = np.lexsort((last, first))
    reach = np.maximum.accumulate(last[order])
    joined = np.zeros(len(order) + 1, np.int8)
    joined[1:-1] = first[order][1:] < reach[:-1]
    edges = np.diff(joined)
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) + 1
    return [order[begin:end].tolist() for begin, end in zip(begins, ends, strict=True)]


def _resolve_group(
    leaves: Sequence[StateItem],
    group: list[int],
    claim: Callable[[str], str],
    views: dict[int, ViewEntry],
    extra: dict[int, StateItem],
) -> None:
    same: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in sorted(group):
        leaf = leaves[index]
        same[leaf.start, leaf.dtype, leaf.shape, leaf.tensor.stride()].append(index)
    start, stop = leaves[group[0]].start, max(leaves[index].stop for index in group)
    if len(same) > 1:
        base = _covering(leaves, same, start, stop)
        if base is not None:
            for index in group:
                if index != base:
                    views[index] = _view(leaves[index], leaves[base].name, start)
            return
        storage = _storage_tensor(leaves, same, start, stop)
        if storage is not None:
            first = min(group)
            alignment = max(leaves[index].alignment for index in group)
            name = claim(f"{leaves[first].name}#storage")
            nbytes = stop - start
            extra[first] = StateItem(
                name, "uint8", (nbytes,), None, None, None, None, None, storage, nbytes, alignment
            )
            for index in group:
                views[index] = _view(leaves[index], name, start)
            return
    for first, *others in same.values():
        item = leaves[first]
        for index in others:
            leaf = leaves[index]
            views[index] = ViewEntry(
                leaf.name, item.name, 0, item.dtype, item.shape, None, leaf.chunk, leaf.placement
            )


def _covering(
    leaves: Sequence[StateItem], same: dict[tuple[object, ...], list[int]], start: int, stop: int
) -> int | None:
    """The first leaf in C order that holds all bytes of the group, with the others at whole elements of
    theirs.
    """
    firsts = [leaves[indices[0]] for indices in same.values()]
    if any((leaf.start - start) % dtypes.itemsize(leaf.dtype) for leaf in firsts):
        return None
    for leaf, indices in zip(firsts, same.values(), strict=True):
        if leaf.start == start and leaf.stop == stop and leaf.tensor.is_contiguous():
            return indices[0]
    return None


def _storage_tensor(
    leaves: Sequence[StateItem], same: dict[tuple[object, ...], list[int]], start: int, stop: int
) -> torch.Tensor | None:
    """The group's memory as bytes, if it is one storage's and no more than the tensors' own bytes."""
    firsts = [leaves[indices[0]] for indices in same.values()]
    if stop - start > sum(leaf.nbytes for leaf in firsts):
        return None
    storage = firsts[0].tensor.untyped_storage()
    if any(
        leaf.tensor.untyped_storage().data_ptr() != storage.data_ptr()
        or (leaf.start - start) % dtypes.itemsize(leaf.dtype)
        for leaf in firsts
    ):
        return None
    offset = start - storage.data_ptr()
    if offset + stop - start > storage.nbytes():
        return None
    view = torch.empty(0, dtype=torch.uint8, device=firsts[0].tensor.device)
    return view.set_(storage, offset, (stop - start,), (1,))


def _view(leaf: StateItem, of: str, start: int) -> ViewEntry:
    tensor = leaf.tensor
    stride = None if tensor.is_contiguous() else tuple(tensor.stride())
    return ViewEntry(
        leaf.name, of, leaf.start - start, leaf.dtype, leaf.shape, stride, leaf.chunk, leaf.placement
    )
