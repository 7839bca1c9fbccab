"""What does a state become that other ranks saved, or these in another layout? The tensors of all shards.

A rank that finds its own shard to be what its target is made of never comes here. Any other plans over the
whole world: the structure and the values are one rank's, with what only other ranks have added, and each
tensor is put together from whatever chunks the ranks have of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from ckptengine.adapters.leaves import Leaf, leaves_of, other_dtype
from ckptengine.adapters.placing import Placement, placement_of
from ckptengine.format import dtypes
from ckptengine.format.columns import values_of
from ckptengine.format.entries import ShardHeader
from ckptengine.format.geometry import Chunk
from ckptengine.format.per_rank import PerRank, values_in
from ckptengine.read.coverage import describe
from ckptengine.read.held import Held, HeldTensors
from ckptengine.read.merged import MergedTree
from ckptengine.read.reshard import Part, parts_of

HeaderOf = Callable[[int], ShardHeader]


class World:
    """tree: the state of all ranks, whose structure and values are those of the rank that `base` is of, with
    the keys that only others have. leaves: what its numbers stand for, each under its FQN and with the rank
    that described it.

    own: is that rank this one, in a world of the same size? Then what it had of its own is this rank's, too.
    header: gives any rank's header. reader: this rank's number among those that restore.
    """

    def __init__(
        self, base: ShardHeader, held: HeldTensors, header: HeaderOf, *, reader: int, own: bool
    ) -> None:
        self._held = held
        self._reader = reader
        self._base = base
        self._own = own
        merged = MergedTree(base, header)
        known = {leaf.fqn for leaf in merged.leaves}
        # Each header that is opened has names that no other had: a few, where ranks hold parts of the same.
        for fqn in sorted(held.names()):
            if fqn not in known and (rank := held.holder(fqn)) is not None:
                before = len(merged.leaves)
                merged.add(header(rank))
                known.update(leaf.fqn for leaf in merged.leaves[before:])
        self.tree = merged.tree
        of_rank = {rank: _all_leaves(header(rank), header) for rank in {leaf.rank for leaf in merged.leaves}}
        self.leaves = [
            msgspec.structs.replace(of_rank[rank][number], name=fqn) for rank, number, fqn in merged.leaves
        ]

    @property
    def step(self) -> int:
        return self._base.step

    @property
    def per_rank(self) -> PerRank:
        """What the ranks did not hold alike, where this rank has none of its own."""
        found = self._held.per_rank
        if not self._own or not found.names:
            return found
        values = values_of(self._base)
        mine = {*values_in(values.tree, "", values.large), *values.own, *values.views}
        return PerRank(found.differing - mine)

    def described(self, leaf: Leaf) -> Leaf:
        """The leaf as one of the whole tensor: what somebody who makes room for his part of it has to
        know."""
        held = self._find(leaf)
        if held is None or leaf.kind is not None:
            return leaf
        rows = held.rows
        if not held.sharded:
            return leaf
        shape = rows.global_shape if rows.flat_of is None else rows.flat_of
        return msgspec.structs.replace(leaf, shape=shape, chunk=Chunk.whole(shape), view_stride=None)

    def place(
        self, leaf: Leaf, tensor: torch.Tensor, chunk: Chunk | None, *, cast: bool = False
    ) -> Placement | list[str]:
        """How a tensor, or the chunk it is, is filled; or why it cannot be. cast: as of `other_dtype`."""
        held = self._find(leaf)
        if held is None:
            return ["no rank stores it"]
        rows = held.rows
        problem = other_dtype(tensor, rows.dtype, cast=cast)
        problems = [] if problem is None else [problem]
        own = Chunk.whole(tuple(tensor.shape)) if chunk is None else chunk
        shape = rows.global_shape if rows.flat_of is None else rows.flat_of
        if own.tensor_shape != shape:
            problems.append(f"shape {own.tensor_shape}, in the checkpoint {shape}")
        if held.sharded and held.conflict is not None:
            problems.append(f"its chunks in the checkpoint contradict each other: {held.conflict}")
        if problems:
            return problems
        if not held.sharded:
            rows = rows.only(rows.rank == leaf.shard)
        found = parts_of(rows, own, tensor.stride(), reader=self._reader)
        if found.gap is not None:
            flat = " of the flattened tensor" if found.flat else ""
            return [f"no rank stored {describe(found.gap)}{flat}"]
        return _spread(leaf, rows.dtype, tensor, found.parts)

    def is_sharded(self, leaf: Leaf) -> bool:
        """Do ranks say that it is one tensor, of which each has a part? One that has all of it does not, as
        the first of several with one row.
        """
        held = self._find(leaf)
        return held is not None and held.sharded and held.conflict is None

    def _find(self, leaf: Leaf) -> Held | None:
        return self._held.find(leaf.name, leaf.shard)


def _all_leaves(header: ShardHeader, header_of: HeaderOf) -> Sequence[Leaf]:
    """A rank's leaves, with its replicas as the ranks that store them describe them."""
    owners = {
        rank: {leaf.name: leaf for leaf in leaves_of(header_of(rank))}
        for rank in sorted({*header.replicas.values()})
    }
    return [
        *leaves_of(header),
        *(owners[rank][name] for name, rank in header.replicas.items()),
    ]


def _spread(of: Leaf, dtype: str, tensor: torch.Tensor, parts: Sequence[Part]) -> Placement:
    name, shape = of.name, tuple(tensor.shape)
    itemsize = dtypes.itemsize(dtype)
    if len(parts) == 1 and parts[0].source in ((), (1,)) and _nelem(parts[0]) == tensor.numel():
        # All of it, in order: as if it had been stored so.
        nbytes = tensor.numel() * itemsize
        leaf = Leaf(name, dtype, shape, parts[0].rank, parts[0].start, nbytes)
        return placement_of(leaf, tensor, cast=True)
    placement = placement_of(Leaf(name, dtype, shape, of.shard, 0, 0), tensor, cast=True)
    pieces = tuple((_leaf(name, dtype, itemsize, part), _view(tensor, part)) for part in parts)
    return msgspec.structs.replace(placement, parts=pieces, linear=False)


def _nelem(part: Part) -> int:
    nelem = 1
    for size in part.shape:
        nelem *= size
    return nelem


def _leaf(name: str, dtype: str, itemsize: int, part: Part) -> Leaf:
    extent = 1 + sum((size - 1) * step for size, step in zip(part.shape, part.source, strict=True))
    return Leaf(name, dtype, part.shape, part.rank, part.start, extent * itemsize, part.source)


def _view(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of a tensor's memory, which stands for the same values."""
    memory = tensor.detach()
    negative, conjugate = memory.is_neg(), memory.is_conj()
    if negative:
        memory = torch._neg_view(memory)
    if conjugate:
        memory = memory.conj()
    view = memory.as_strided(part.shape, part.target, memory.storage_offset() + part.offset)
    if conjugate:
        view = view.conj()
    return torch._neg_view(view) if negative else view
