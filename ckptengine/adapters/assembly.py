"""How do stored bytes become new tensors, whole or in part, for a reader that has no tensors of its own?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch

from ckptengine.adapters.leaves import Leaf, empty_for, is_tie, leaves_of
from ckptengine.adapters.tensors import plain, torch_dtype
from ckptengine.adapters.values import large_value
from ckptengine.format import dtypes
from ckptengine.format.entries import ShardHeader, TensorEntry, ViewEntry
from ckptengine.format.geometry import Chunk
from ckptengine.read.assemble import gather
from ckptengine.read.plan import Destination
from ckptengine.read.selection import Selection
from ckptengine.read.world import Piece

Made = Callable[[], object]
"""Gives what a leaf has become, once its bytes are there."""


class Request:
    """New tensors and values, and what has to be read for them: make them, read `destinations`, `finish`."""

    def __init__(self) -> None:
        self.destinations: dict[int, list[Destination]] = {}
        self._after: list[Callable[[], object]] = []

    def finish(self) -> None:
        """After the read: put in order what could not be read in place."""
        for action in self._after:
            action()

    def whole(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """The tensor that the pieces cover, in C order."""
        shape = pieces[0].chunk.tensor_shape
        out = torch.empty(shape, dtype=torch_dtype(pieces[0].dtype))
        self._gather(pieces, Chunk.whole(shape), out.data_ptr())
        for piece in pieces:
            if piece.stride is not None:
                self._strided(piece, out)
        return out

    def part(self, pieces: Sequence[Piece], selection: Selection) -> Callable[[], torch.Tensor]:
        """What an index selects of the tensor that the pieces cover; only that is read, give or take a
        page."""
        shape, dtype = pieces[0].chunk.tensor_shape, torch_dtype(pieces[0].dtype)
        if 0 in selection.counts:
            empty = torch.empty(selection.shape, dtype=dtype)
            return lambda: empty
        itemsize = dtypes.itemsize(pieces[0].dtype)
        if any(piece.stride is not None for piece in pieces):
            # Elements that are not in C order have no runs to pick from: read all, then select.
            out = self.whole(pieces)
            index = tuple(
                at if dim in selection.dropped else slice(at, at + (count - 1) * step + 1, step)
                for dim, (at, count, step) in enumerate(
                    zip(selection.starts, selection.counts, selection.steps, strict=True)
                )
            )
        else:
            boxes = selection.boxes(itemsize)
            box = boxes[0][1]
            out = torch.empty((len(boxes) * box[0], *box[1:]) if box else (), dtype=dtype)
            for i, (offsets, sizes) in enumerate(boxes):
                self._gather(pieces, Chunk(shape, offsets, sizes), out.data_ptr() + i * prod(box) * itemsize)
            index = selection.finish(itemsize)

        def selected() -> torch.Tensor:
            chosen = plain(out)[index]
            # A copy, unless it is all that was read: the rest should not stay in memory with it.
            return (chosen if chosen.numel() == out.numel() else chosen.clone()).view(dtype)

        return selected

    def value(self, rank: int, entry: TensorEntry) -> Made:
        """A large value that was kept in the data section."""
        buffer = torch.empty(entry.nbytes, dtype=torch.uint8)
        self.read(rank, entry.start, buffer)
        return lambda: large_value(entry.kind or "", entry.descr, buffer.numpy().data)

    def read(self, rank: int, start: int, into: torch.Tensor) -> None:
        """Have bytes of a rank's data section, from `start` on, fill a tensor in C order."""
        if into.numel():
            stop = start + into.numel() * into.element_size()
            self.destinations.setdefault(rank, []).append(Destination(start, stop, into.data_ptr()))

    def after(self, action: Callable[[], object]) -> None:
        self._after.append(action)

    def _gather(self, pieces: Iterable[Piece], target: Chunk, address: int) -> None:
        dense = (piece for piece in pieces if piece.stride is None)
        for rank, destinations in gather(dense, target, address).items():
            self.destinations.setdefault(rank, []).extend(destinations)

    def _strided(self, piece: Piece, out: torch.Tensor) -> None:
        """Read a piece that is not in C order, then copy it to its place in the whole tensor."""
        chunk, stride = piece.chunk, piece.stride
        assert stride is not None
        local = strided(self, piece.rank, piece.start, piece.dtype, chunk.shape, stride)
        if chunk.flat_of is not None:
            target = plain(out).view(-1).narrow(0, chunk.offsets[0], chunk.shape[0])
        else:
            bounds = zip(chunk.offsets, chunk.shape, strict=True)
            target = plain(out)[tuple(slice(at, at + size) for at, size in bounds)]
        self.after(lambda: target.copy_(plain(local)))


def strided(
    request: Request, rank: int, start: int, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """A tensor over a buffer of its own, into which the bytes are read as they lie in the data section."""
    nelem = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    buffer = torch.empty(nelem, dtype=torch_dtype(dtype))
    request.read(rank, start, buffer)
    return buffer.as_strided(shape, stride)


class SavedRanks(dict[int, "Saved"]):
    """For each rank its leaves, as they were there. header: gives any rank's header."""

    def __init__(self, request: Request, header: Callable[[int], ShardHeader]) -> None:
        self._request = request
        self._header = header

    def __missing__(self, rank: int) -> Saved:
        self[rank] = saved = Saved(self._request, self._header(rank), self)
        return saved


class Saved:
    """The leaves of one rank, as they were on that rank: its own chunks, with their strides and ties.

    ranks: the other ranks'; the bytes of a replica are in one of their shards.
    """

    def __init__(self, request: Request, header: ShardHeader, ranks: SavedRanks) -> None:
        self._request = request
        self._header = header
        self._ranks = ranks
        self._leaves = leaves_of(header)
        self._numbers = {name: i for i, name in enumerate(header.leaf_names)}
        self._replicas = list(header.replicas.items())
        self._made: dict[int, torch.Tensor] = {}

    def make(self, number: int) -> Made:
        """The leaf of this number in the rank's tree. Each is read once, however often it is asked for."""
        if number < len(self._header.tensors) and self._header.tensors[number].kind is not None:
            return self._request.value(self._header.rank, self._header.tensors[number])
        if number >= len(self._leaves):
            name, owner = self._replicas[number - len(self._leaves)]
            return self._ranks[owner].named(name)
        tensor = self._tensor(number)
        return lambda: tensor

    def named(self, name: str) -> Made:
        """The leaf of this name; KeyError if the rank has none."""
        return self.make(self._numbers[name])

    def _tensor(self, number: int) -> torch.Tensor:
        made = self._made.get(number)
        if made is None:
            at = number - len(self._header.tensors)
            made = (
                self._stored(self._leaves[number]) if at < 0 else self._view(number, self._header.views[at])
            )
            self._made[number] = made
        return made

    def _stored(self, leaf: Leaf) -> torch.Tensor:
        tensor = empty_for(leaf)
        if tensor.is_contiguous():
            self._request.read(self._header.rank, leaf.start, tensor)
        else:
            source = self._buffer(leaf)
            self._request.after(lambda: plain(tensor).copy_(plain(source)))
        return tensor

    def _view(self, number: int, view: ViewEntry) -> torch.Tensor:
        """A view of its base's memory, so that the two stay tied; of its own where they cannot be."""
        of = self._numbers[view.of]
        base, leaf = self._header.tensors[of], self._leaves[number]
        if base.kind is None:
            if is_tie(view, base):
                return self._tensor(of)
            offset, odd = divmod(view.byte_offset, leaf.itemsize)
            if base.stride is None and not odd:
                memory = self._tensor(of).untyped_storage()
                alike = torch.empty(0, dtype=torch_dtype(view.dtype))
                return alike.set_(memory, offset, leaf.shape, leaf.stride)
        return self._buffer(leaf)

    def _buffer(self, leaf: Leaf) -> torch.Tensor:
        return strided(self._request, self._header.rank, leaf.start, leaf.dtype, leaf.shape, leaf.stride)
