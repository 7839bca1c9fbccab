"""A checkpoint in memory: what a save would write, and a read deliver."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ckptengine.adapters.restore import Match, RestoreTarget
from ckptengine.adapters.stage import copy_items
from ckptengine.adapters.state import FlatState, flatten
from ckptengine.adapters.tensors import plain, torch_dtype
from ckptengine.format.columns import values_of
from ckptengine.format.digest import hexdigest
from ckptengine.format.entries import ShardHeader
from ckptengine.format.layout import lay_out
from ckptengine.format.per_rank import OWN_DIGITS, ShardValues
from ckptengine.format.shard import decode_header, encode_header, seal_header
from ckptengine.read.partial import ALL, Partial
from ckptengine.read.plan import Destination, plan_reads
from tests.adapters.rebuild import build

RUN = "a000001-000000000000-00000000"
BLOCK = 1 << 16


def header_of(flat: FlatState, *, rank: int = 0, world_size: int = 1) -> ShardHeader:
    """Encoded and decoded, so that all the format's rules have been checked."""
    placed, data_nbytes = lay_out([(item.name, item.nbytes, item.alignment) for item in flat.items])
    spans = {name: (start, stop) for name, start, stop in placed}
    header = ShardHeader(
        run=RUN,
        attempt=f"{RUN}-000001.0",
        step=1,
        rank=rank,
        world_size=world_size,
        codec="raw",
        block_nbytes=BLOCK,
        data_nbytes=data_nbytes,
        tensors=tuple(item.entry(*spans[item.name]) for item in flat.items),
        views=tuple(flat.views),
        replicas=flat.replicas,
        tree=flat.tree,
    )
    template = encode_header(header)
    return decode_header(seal_header(template, [bytes(16)] * template.n_blocks), path="shard")


class Saved:
    """A saved state."""

    def __init__(
        self,
        state: Any,
        *,
        allow_pickle: bool = False,
        threads: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        **flat: Any,
    ) -> None:
        self.flat = flatten(state, allow_pickle=allow_pickle, **flat)
        self.header = header_of(self.flat, rank=rank, world_size=world_size)
        self.data = memoryview(bytearray(self.header.data_nbytes))
        starts = {entry.name: entry.start for entry in self.header.tensors}
        copy_items(
            self.flat.items, [starts[item.name] for item in self.flat.items], self.data, threads=threads
        )

    @property
    def values(self) -> ShardValues:
        """As INDEX compares them, with the digests that a writer would take."""
        own = [self.data[entry.start : entry.stop] for entry in self.header.own_entries]
        digests = "".join(hexdigest(data)[:OWN_DIGITS] for data in own)
        return replace(values_of(self.header), digests=digests.encode())

    def load(self, *, allow_pickle: bool = False) -> Any:
        return build(self.header, self.fetch, allow_pickle=allow_pickle)

    def fetch(self, name: str) -> Any:
        for entry in self.header.tensors:
            if entry.name == name:
                data = bytearray(self.data[entry.start : entry.stop])
                if entry.kind is not None:
                    return bytes(data)
                dtype = torch_dtype(entry.dtype)
                if not data:
                    return torch.empty(entry.shape, dtype=dtype)
                return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(entry.shape)
        raise AssertionError(f"fetched {name}")

    def match(
        self, target: Any, *, allow_pickle: bool = False, partial: Partial = ALL, **options: Any
    ) -> Match:
        target = RestoreTarget(target, allow_pickle=allow_pickle, partial=partial)
        return target.match(self.header, path="p", rank=0, **options)

    def restore(self, target: Any, **options: Any) -> Match:
        match = self.match(target, **options)
        read_all(match, lambda _: self)
        match.apply()
        return match

    def read(self, destinations: list[Destination]) -> None:
        spans = sorted((d.address, d.address + d.stop - d.start) for d in destinations)
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "destinations overlap"
        for read in plan_reads(self.header.blocks, destinations):
            start, _ = self.header.blocks.span(read.block)
            for copy in read.copies:
                piece = bytes(self.data[start + copy.at : start + copy.at + copy.nbytes])
                ctypes.memmove(copy.address, piece, copy.nbytes)


def destinations(match: Match) -> list[Destination]:
    """All that is read of rank 0's shard."""
    return [d for one in match.rounds() for d in one.destinations.get(0, ())]


def read_all(match: Match, shard: Callable[[int], Saved]) -> int:
    """Reads what a match wants, from whichever shard has it; returns how many bytes that were."""
    nbytes = 0
    for one in match.rounds():
        for rank, destinations in one.destinations.items():
            shard(rank).read(destinations)
            nbytes += sum(d.stop - d.start for d in destinations)
        one.finish()
    return nbytes


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's elements in C order, as bytes."""
    if not tensor.numel():
        return b""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    elements = plain(tensor)
    dense = torch.empty(elements.shape, dtype=elements.dtype).copy_(elements)
    return bytes(dense.view(-1).view(torch.uint8).numpy())


def same(a: Any, b: Any) -> bool:
    """Equal in type, dtype, shape and bits, all the way down."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray | np.generic):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.strides == b.strides
            and a.tobytes("A") == b.tobytes("A")
        )
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)
