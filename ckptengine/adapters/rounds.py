"""How are tensors filled that cannot be read into directly, without memory for all of them?

They are cut into pieces, and the shard is read in rounds: as many pieces as the buffer has room for, and what
can be read in place between them. After each round its pieces, whose digests were checked, are copied to
where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ckptengine.adapters.leaves import Leaf
from ckptengine.adapters.tensors import torch_dtype
from ckptengine.format.geometry import c_strides
from ckptengine.format.limits import round_up
from ckptengine.read.plan import Destination

BUFFER_NBYTES = 48 << 20
"""Room for the pieces of one round. Beside it, four threads that read compressed blocks of 16 MiB hold up to
210 MiB: a restore stays within 256 MiB. A block in which two rounds meet is read twice, one in three at
worst."""

PIECE_NBYTES = 16 << 20

_ALIGNMENT = 64

Boxes = Iterator[tuple[tuple[int, ...], tuple[int, ...]]]
Destinations = dict[int, list[Destination]]
"""By the rank whose shard is read."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """`nbytes` bytes of a shard's data section from `start` on, and the part of a tensor that they are for.

    dtype, shape, stride: of the elements in the data section. target: the part, of any layout and device.
    """

    shard: int
    start: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    target: torch.Tensor

    def source(self, buffer: torch.Tensor) -> torch.Tensor:
        """The elements, with the target's shape, in a buffer of bytes into which the piece was read."""
        return (
            buffer.view(torch_dtype(self.dtype))
            .as_strided(self.shape, self.stride)
            .reshape(self.target.shape)
        )


Then = Callable[[Piece, torch.Tensor], object]
"""What is done with a piece, and what was read for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """What to read at once; `finish` after the read, before the next round."""

    destinations: Destinations
    _pieces: Sequence[tuple[Piece, torch.Tensor]] = ()
    _then: Then | None = None

    def finish(self) -> None:
        with torch.no_grad():
            for piece, buffer in self._pieces:
                if self._then is not None:
                    self._then(piece, piece.source(buffer))


def cut(leaf: Leaf, target: torch.Tensor) -> list[Piece]:
    """A leaf, and the tensor it is for, as pieces of at most `PIECE_NBYTES`."""
    shape, stride = leaf.shape, leaf.stride
    wanted = tuple(target.shape)
    if shape != wanted:
        # A whole tensor may be stored flat and be wanted in its shape, or the other way.
        if not leaf.in_c_order:
            return [Piece(leaf.shard, leaf.start, leaf.span_nbytes, leaf.dtype, shape, stride, target)]
        shape, stride = wanted, c_strides(wanted)
    itemsize = leaf.itemsize
    pieces = []
    for offsets, sizes in boxes(shape, stride, PIECE_NBYTES // itemsize):
        part = target.detach()
        for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
            if size != part.shape[dim]:
                part = part.narrow(dim, at, size)
        start = leaf.start + itemsize * sum(i * step for i, step in zip(offsets, stride, strict=True))
        nbytes = itemsize * _extent(sizes, stride)
        pieces.append(Piece(leaf.shard, start, nbytes, leaf.dtype, sizes, stride, part))
    return pieces


def boxes(shape: tuple[int, ...], stride: tuple[int, ...], nelem: int) -> Boxes:
    """`(offsets, sizes)` of boxes that make up the whole, each within `nelem` elements of memory from its
    first element to its last, as far as cutting makes it so."""
    yield from _boxes((0,) * len(shape), shape, stride, nelem)


def _boxes(offsets: tuple[int, ...], shape: tuple[int, ...], stride: tuple[int, ...], nelem: int) -> Boxes:
    dims = [dim for dim, size in enumerate(shape) if size > 1 and stride[dim]]
    if _extent(shape, stride) <= nelem or not dims:
        yield offsets, shape
        return
    # Along the dimension whose steps are the longest, so that a part of it is a part of the memory.
    dim = max(dims, key=lambda dim: stride[dim])
    one = _with(shape, dim, 1)
    count = 1 + max(0, nelem - _extent(one, stride)) // stride[dim]
    for at in range(0, shape[dim], count):
        part = _with(shape, dim, min(count, shape[dim] - at))
        yield from _boxes(_with(offsets, dim, offsets[dim] + at), part, stride, nelem)


def fit_one_round(pieces: Sequence[Piece]) -> bool:
    """Does the buffer have room for all pieces?"""
    return sum(_room(piece) for piece in pieces) <= BUFFER_NBYTES


def rounds(direct: Destinations, pieces: Sequence[Piece], then: Then) -> Iterator[Round]:
    """All that is to be read: the destinations, and the pieces, with each of which `then` is called after its
    round.

    One round if the buffer has room for all pieces. Else each shard is read from its beginning to its end, so
    that a block is read once unless it lies where two rounds meet; and the shards in the order of their
    ranks, the same on all ranks, as those that exchange blocks must come to them in the same order.
    """
    total = sum(_room(piece) for piece in pieces)
    buffer = torch.from_numpy(np.empty(min(total, max([BUFFER_NBYTES, *map(_room, pieces)])), np.uint8))
    if total <= BUFFER_NBYTES:
        yield _round(direct, pieces, buffer, then)
        return
    for shard in sorted({*direct, *(piece.shard for piece in pieces)}):
        mine = sorted((piece for piece in pieces if piece.shard == shard), key=lambda piece: piece.start)
        straight = sorted(direct.get(shard, ()), key=lambda one: one.start)
        at = 0
        for group in _groups(mine, len(buffer)):
            # What lies before the round's last piece ends is read with it; the rest with the next.
            end = group[-1].start + group[-1].nbytes
            upto = next((i for i in range(at, len(straight)) if straight[i].start >= end), len(straight))
            yield _round({shard: straight[at:upto]}, group, buffer, then)
            at = upto
        if at < len(straight):
            yield Round({shard: straight[at:]})


def _round(
    destinations: Destinations,
    pieces: Sequence[Piece],
    buffer: torch.Tensor,
    then: Then,
) -> Round:
    destinations = {shard: list(straight) for shard, straight in destinations.items()}
    placed = []
    at = 0
    for piece in pieces:
        part = buffer[at : at + piece.nbytes]
        at += _room(piece)
        placed.append((piece, part))
        into = Destination(piece.start, piece.start + piece.nbytes, part.data_ptr())
        destinations.setdefault(piece.shard, []).append(into)
    return Round(destinations, placed, then)


def _groups(pieces: Sequence[Piece], nbytes: int) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    used = 0
    for piece in pieces:
        if group and used + _room(piece) > nbytes:
            yield group
            group, used = [], 0
        group.append(piece)
        used += _room(piece)
    if group:
        yield group


def _room(piece: Piece) -> int:
    return round_up(piece.nbytes, _ALIGNMENT)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
