"""Where do the bytes of each leaf go? Straight into the tensors that are to hold them, wherever that can be.

A CPU tensor in C order is read into directly. Any other is read piece by piece into a buffer, and copied when
the bytes are known to be good. Tensors that share memory are read once where they share it in the checkpoint
too; where they do not, all are copied and then each is checked to hold what was stored for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from ckptengine.adapters.aliases import overlapping
from ckptengine.adapters.items import extent_nelem
from ckptengine.adapters.leaves import Leaf, same_strides
from ckptengine.adapters.origin import Origin
from ckptengine.adapters.rounds import Destinations, Piece, Round, Then, cut, fit_one_round, rounds
from ckptengine.adapters.tensors import dtype_name, is_ordinary, plain
from ckptengine.errors import StateMismatchError
from ckptengine.read.plan import Destination

RUN_NBYTES = 16 << 10
"""Shorter rows are read into the buffer all together and copied from there: each row that is read by itself
costs as much as copying this much."""


_SHOWN = 10


class Placement(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A leaf, and the tensor that is to hold it: same shape, any layout and device, and the same dtype if it
    is not to be cast.

    start, stop: the tensor's first byte in memory, and the byte after its last; both 0 if it is empty.
    plain_memory: do its bytes stand for its values? linear: are they the same, in the same order and without
    gaps, in memory and in the data section? parts: where the tensor is put together from other chunks than
    itself, each of these, and the part of the tensor that it is for; then the leaf has no bytes.
    """

    leaf: Leaf
    tensor: torch.Tensor
    start: int
    stop: int
    plain_memory: bool
    linear: bool
    on_cpu: bool
    parts: tuple[tuple[Leaf, torch.Tensor], ...] = ()

    @property
    def shift(self) -> tuple[int, int]:
        """What is the same for two placements that get the same bytes at the same addresses."""
        return self.leaf.shard, self.start - self.leaf.start

    def is_part_of(self, other: Placement) -> bool:
        """Does reading `other`, which is linear, fill this one too?"""
        return (
            not self.parts
            and self.shift == other.shift
            and self.start >= other.start
            and self.stop <= other.stop
            and self.plain_memory
            and self.leaf.shape == tuple(self.tensor.shape)
            and same_strides(self.leaf.shape, self.leaf.stride, self.tensor.stride())
        )

    def same_as(self, other: Placement) -> bool:
        return (
            self.start == other.start
            and _sources(self) == _sources(other)
            and self.tensor.dtype == other.tensor.dtype
            and self.tensor.shape == other.tensor.shape
            and self.tensor.stride() == other.tensor.stride()
            and self.plain_memory
            and other.plain_memory
        )


@dataclass(slots=True, eq=False)
class Plan:
    """What is read straight into the tensors, and what in pieces, to be copied."""

    _straight: Destinations = field(default_factory=lambda: defaultdict(list))
    _direct: list[torch.Tensor] = field(default_factory=list)
    _pieces: list[Piece] = field(default_factory=list)
    # Pieces of tensors that share memory, with others or themselves, and which placement they are of.
    _checked: dict[Piece, Placement] = field(default_factory=dict)
    _origin: Origin = field(default_factory=Origin)

    def read_into(self, leaf: Leaf, address: int) -> None:
        """Have a leaf's bytes, as they lie in the data section, read to an address."""
        self._straight[leaf.shard].append(Destination(leaf.start, leaf.start + leaf.span_nbytes, address))

    def add(self, placement: Placement, *, shared: bool) -> None:
        """Have a placement filled. shared: its memory is another's too, which is to hold something else."""
        leaf, tensor = placement.leaf, placement.tensor
        if placement.linear and placement.on_cpu and not shared:
            self.read_into(leaf, placement.start)
            self._direct.append(tensor)
            return
        checked = shared or _may_overlap_itself(tensor)
        straight = placement.plain_memory and placement.on_cpu and not checked
        pieces = []
        for part, view in placement.parts or ((leaf, tensor),):
            if placement.parts and straight and (runs := long_runs(part, view)):
                self._straight[part.shard].extend(runs)
            else:
                pieces += cut(part, view)
        if placement.parts and straight:
            self._direct.append(tensor)
        self._pieces += pieces
        if checked:
            self._checked.update(dict.fromkeys(pieces, placement))

    @property
    def shards(self) -> set[int]:
        """The ranks whose shards are read."""
        return {*self._straight, *(piece.shard for piece in self._pieces)}

    def extents(self) -> Iterator[tuple[int, int, int]]:
        """What all rounds read, without what is read once more to be checked: the rank whose shard it is, the
        first byte, and the one after the last."""
        for shard, destinations in self._straight.items():
            yield from ((shard, one.start, one.stop) for one in destinations)
        yield from ((one.shard, one.start, one.start + one.nbytes) for one in self._pieces)

    @property
    def one_round(self) -> bool:
        """Is all read at once, and nothing again?"""
        return fit_one_round(self._pieces) and not self._checked

    def rounds(self) -> Iterator[Round]:
        """All that is to be read, bit by bit. Raises after the last round what `passes` does."""
        for straight, pieces, then in self.passes():
            yield from rounds(straight, pieces, then)

    def passes(self) -> Iterator[tuple[Destinations, list[Piece], Then]]:
        """All that is to be read: straight, and in pieces with what is done with each.

        Raises `StateMismatchError` after the last pass if tensors share memory that would have to hold
        different values. To find out, their pieces are read once more, after all else.
        """
        yield self._straight, self._pieces, lambda piece, source: copy_into(piece.target, source)
        wrong: dict[Placement, None] = {}

        def check(piece: Piece, source: torch.Tensor) -> None:
            if not _same_bytes(source.to(piece.target.dtype), piece.target):
                wrong[self._checked[piece]] = None

        if self._checked:
            yield {}, list(self._checked), check
        if wrong:
            raise self._shared_by_different(wrong)

    def _shared_by_different(self, wrong: Collection[Placement]) -> StateMismatchError:
        """wrong: those that do not hold what was stored for them."""
        everyone = dict.fromkeys(self._checked.values())
        lines = []
        for one in wrong:
            others = [
                other.leaf.name
                for other in everyone
                if other is not one
                and other.tensor.device == one.tensor.device
                and other.start < one.stop
                and one.start < other.stop
            ]
            more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
            with_whom = ", ".join(map(repr, others[:_SHOWN])) + more if others else "itself"
            lines.append(f"{one.leaf.name!r} with {with_whom}")
        more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        return StateMismatchError(
            "tensors of the target share memory but have different values in the checkpoint"
            f"{'' if self._origin.step is None else f' of step {self._origin.step}'}: "
            f"{'; '.join(lines[:_SHOWN])}{more}. The target has been written to",
            mismatched=tuple(one.leaf.name for one in wrong),
            path=self._origin.path,
            rank=self._origin.rank,
            hint="give each a memory of its own, or leave one of them out with exclude=…, and restore again",
        )

    @property
    def straight(self) -> Destinations:
        """What is read into the tensors themselves."""
        return self._straight

    @property
    def pieces(self) -> list[Piece]:
        """What is copied; those that are read twice are there twice."""
        return [*self._pieces, *self._checked]

    @property
    def direct(self) -> list[torch.Tensor]:
        """The tensors, or parts of tensors, that are read into."""
        return self._direct

    def finish(self) -> None:
        """After the last round."""
        written_to(self._direct)


def written_to(tensors: Iterable[torch.Tensor]) -> None:
    """What autograd keeps of them for a backward pass is stale, as bytes were written behind its back."""
    touched = [tensor for tensor in tensors if not tensor.is_inference()]
    if touched:
        with torch.no_grad():
            torch.autograd.graph.increment_version(touched)


def place(leaf: Leaf, value: Any) -> Placement | None:
    """Where a leaf goes that is whole, in an ordinary tensor that it fits: nearly always. None if it takes a
    closer look."""
    if (
        leaf.chunk is not None
        or not is_ordinary(value)
        or dtype_name(value.dtype) != leaf.dtype
        or value.shape != leaf.shape
    ):
        return None
    return placement_of(leaf, value, ordinary=True)


def placement_of(
    leaf: Leaf, tensor: torch.Tensor, *, ordinary: bool = False, cast: bool = False
) -> Placement:
    """ordinary: the tensor is known to be. cast: it may be of another dtype."""
    # What is cast goes through a buffer: its bytes are not those that are stored.
    plain_memory = ordinary or not (
        tensor.is_conj() or tensor.is_neg() or (cast and dtype_name(tensor.dtype) != leaf.dtype)
    )
    start = stop = 0
    linear = False
    nbytes = tensor.nbytes
    if nbytes:
        start = tensor.data_ptr()
        if tensor.is_contiguous():
            stop = start + nbytes
            linear = plain_memory and (leaf.view_stride is None or leaf.in_c_order)
        else:
            stop = start + extent_nelem(tensor) * tensor.element_size()
    return Placement(leaf, tensor, start, stop, plain_memory, linear, tensor.is_cpu)


def plan(placements: Iterable[Placement], origin: Origin) -> Plan:
    """Decide how each placement is filled. origin: for errors."""
    made = Plan(_origin=origin)
    by_device: dict[torch.device | None, list[Placement]] = defaultdict(list)
    for placement in placements:
        if placement.stop:
            by_device[None if placement.on_cpu else placement.tensor.device].append(placement)
    for members in by_device.values():
        groups = overlapping([one.start for one in members], [one.stop for one in members])
        grouped = {index for group in groups for index in group}
        for index, placement in enumerate(members):
            if index not in grouped:
                made.add(placement, shared=False)
        for group in groups:
            needed = _without_repeats([members[index] for index in sorted(group)])
            for placement in needed:
                made.add(placement, shared=len(needed) > 1)
    return made


def _without_repeats(group: list[Placement]) -> list[Placement]:
    """Without those that another one's read fills."""
    by_size = sorted(group, key=lambda placement: (not placement.linear, placement.start - placement.stop))
    needed: list[Placement] = []
    for placement in by_size:
        if not any(
            (other.linear and placement.is_part_of(other)) or placement.same_as(other) for other in needed
        ):
            needed.append(placement)
    return needed


def _sources(placement: Placement) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Where a placement's bytes are in the shards."""
    leaves = [leaf for leaf, _ in placement.parts] or [placement.leaf]
    return [(leaf.shard, leaf.start, leaf.shape, leaf.stride) for leaf in leaves]


def long_runs(leaf: Leaf, view: torch.Tensor) -> list[Destination]:
    """What is worth being read straight into the rows of a part; nothing if the rows are too short."""
    shape, itemsize = leaf.shape, leaf.itemsize
    stride = leaf.stride
    run = shape[-1] * itemsize if shape else itemsize
    if shape and (stride[-1] != 1 or view.stride(-1) != 1):
        return []
    if len(shape) > 1 and run < RUN_NBYTES:
        return []
    starts, addresses = np.array([leaf.start]), np.array([view.data_ptr()])
    for size, source, target in zip(shape[:-1], stride[:-1], view.stride()[:-1], strict=True):
        index = np.arange(size) * itemsize
        starts = (starts[:, None] + index * source).reshape(-1)
        addresses = (addresses[:, None] + index * target).reshape(-1)
    return [
        Destination(start, start + run, address)
        for start, address in zip(starts.tolist(), addresses.tolist(), strict=True)
    ]


def _may_overlap_itself(tensor: torch.Tensor) -> bool:
    """May two elements be at one address? Never False if they are."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor of the same shape, bit for bit, whatever the target's layout; cast to the target's dtype,
    if it is another."""
    target = target.detach()
    if source.dtype != target.dtype:
        source = source.to(target.dtype)
    # A conjugate or negative view: what is in memory is the conjugate or negative of what it shows.
    if target.is_neg():
        target, source = torch._neg_view(target), source.neg().resolve_neg()
    if target.is_conj():
        target, source = target.conj(), source.conj().resolve_conj()
    if _may_overlap_itself(target):
        # torch refuses to copy into such a tensor, for some elements would be written twice.
        nelem = extent_nelem(target)
        line = target.as_strided((nelem,), (1,), target.storage_offset())
        index = torch.arange(nelem).as_strided(target.shape, target.stride()).reshape(-1).to(target.device)
        plain(line)[index] = plain(source).reshape(-1).to(target.device)
    else:
        plain(target).copy_(plain(source.detach()))


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    elements = plain(tensor.detach().resolve_conj().resolve_neg())
    # Not contiguous(): a tensor of one element may have any stride, and could then not be viewed as bytes.
    return torch.empty(elements.shape, dtype=elements.dtype).copy_(elements).view(-1).view(torch.uint8)
