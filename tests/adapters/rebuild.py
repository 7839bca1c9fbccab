"""Builds a state from a shard, leaf by leaf and in the simplest way: an oracle for the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckptengine.adapters.leaves import is_tie
from ckptengine.adapters.placing import copy_into
from ckptengine.adapters.tensors import torch_dtype
from ckptengine.adapters.values import Decoder, large_value
from ckptengine.format.entries import ShardHeader, TensorEntry, ViewEntry
from ckptengine.format.geometry import Chunk, c_strides


def build(header: ShardHeader, fetch: Callable[[str], Any], *, allow_pickle: bool = False) -> Any:
    """The nested state of a shard's tree: containers, values, and tensors in full.

    fetch: gives a name's whole tensor, in C order and of its global shape, on the CPU; for a large value
    (`kind`) its bytes, as bytes or a uint8 tensor. Called once for each name that is needed. Objects come
    back as their `state_dict()`, tensors with the strides they were saved with, and those that shared memory
    share it again, except where one is a chunk of a larger tensor. Raises `UnsupportedStateError` for a
    pickled value unless `allow_pickle`.
    """
    return Decoder(_Leaves(header, fetch), allow_pickle=allow_pickle).decode(header.tree)


class _Leaves:
    def __init__(self, header: ShardHeader, fetch: Callable[[str], Any]) -> None:
        self._entries: list[TensorEntry | ViewEntry | str] = [
            *header.tensors,
            *header.views,
            *header.replicas,
        ]
        self._by_name = {entry.name: entry for entry in header.tensors}
        self._fetch = fetch
        # Those that other tensors are views of, by what the views are: of the tensor as it was, or of its
        # bytes.
        self._tied_to = {view.of for view in header.views}
        self._made: dict[str, torch.Tensor] = {}

    def __call__(self, index: int) -> Any:
        entry = self._entries[index]
        if isinstance(entry, str):
            return self._fetch(entry)
        if isinstance(entry, ViewEntry):
            return self._view(entry)
        if entry.kind is not None:
            data = self._fetch(entry.name)
            if isinstance(data, torch.Tensor):
                data = data.numpy()
            return large_value(entry.kind, entry.descr, memoryview(data))
        return self._tensor(entry)

    def _tensor(self, entry: TensorEntry) -> torch.Tensor:
        made = self._made.get(entry.name)
        if made is not None:
            return made
        tensor: torch.Tensor = self._fetch(entry.name)
        if not _is_part(entry.chunk):
            if entry.stride is not None:
                source = tensor
                tensor = torch.empty_strided(entry.shape, entry.stride, dtype=source.dtype)
                copy_into(tensor, source)
            elif entry.name in self._tied_to and tensor.storage_offset():
                # Views are made by offsets into its storage, which must begin where the tensor does.
                tensor = tensor.clone()
        if entry.name in self._tied_to:
            self._made[entry.name] = tensor
        return tensor

    def _view(self, view: ViewEntry) -> torch.Tensor:
        base = self._by_name[view.of]
        if _is_part(view.chunk) or _is_part(base.chunk):
            fetched: torch.Tensor = self._fetch(view.name)
            return fetched
        tensor = self._tensor(base)
        if is_tie(view, base):
            return tensor.detach()
        dtype = torch_dtype(view.dtype)
        stride = c_strides(view.shape) if view.stride is None else view.stride
        made = torch.empty(0, dtype=dtype)
        return made.set_(tensor.untyped_storage(), view.byte_offset // dtype.itemsize, view.shape, stride)


def _is_part(chunk: Chunk | None) -> bool:
    """Is it less than the tensor, or not in the tensor's shape?"""
    return chunk is not None and (not chunk.is_whole or chunk.flat_of is not None)
