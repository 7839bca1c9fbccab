"""What do all ranks together hold of each tensor, in the form that resharding plans with?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ckptengine.format.manifest import Manifest
from ckptengine.format.per_rank import PerRank
from ckptengine.format.shard import ShardHeader
from ckptengine.read.tensors import are_few, read_index
from ckptengine.read.world import Piece, conflict, locate, tensor_name
from ckptengine.storage.store import Store

if TYPE_CHECKING:
    from ckptengine.format.index import ChunkRows, Index

Headers = Callable[[], Sequence[ShardHeader]]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The ranks' pieces of one tensor.

    sharded: they are chunks of one tensor; otherwise each is a whole tensor of its rank's own, and `rows` are
    those of the same dtype and shape as one of them. conflict: how the ranks contradict each other, or None.
    """

    rows: ChunkRows
    sharded: bool
    conflict: str | None = None


class HeldTensors:
    """All tensors of a step by FQN, from INDEX, or from all headers where it cannot be had.

    headers: gives those of all ranks, in order; asked for nothing else.
    """

    def __init__(self, index: Index, headers: Headers) -> None:
        self._index = index
        self._headers = headers
        # Where one rank holds several parts of `weight`, each is called by where it begins, as `weight@8_0`.
        self._parts: dict[str, list[tuple[str, list[int]]]] = {}
        for name in index.names():
            if "@" in name:
                rows: dict[str, list[int]] = {}
                for row, found in enumerate(index.chunks(name)):
                    rows.setdefault(tensor_name(name, found.chunk if found.sharded else None), []).append(row)
                for fqn, numbers in rows.items():
                    self._parts.setdefault(fqn, []).append((name, numbers))
        for fqn in self._parts:
            if "@" not in fqn and fqn in index:
                self._parts[fqn].append((fqn, list(range(len(index.rows(fqn))))))

    def names(self) -> set[str]:
        """Without what is no leaf of the state."""
        index = self._index
        plain = {name for name in index.names() if "@" not in name}
        return (plain | self._parts.keys() | (index.partial or set())) - index.hidden

    def find(self, fqn: str, rank: int | None = None) -> Held | None:
        """None if no rank has it. rank: whose tensor it is about, where each has one of its own and they are
        not alike; None: the lowest one's."""
        if fqn in (self._index.partial or ()):
            pieces = self._from_headers.get(fqn)
            return None if not pieces else _held(pieces, rank)
        if fqn in self._parts:
            found = [self._index.rows(name).only(numbers) for name, numbers in self._parts[fqn]]
            infos = {(rows.dtype, rows.global_shape, rows.flat_of) for rows in found}
            if len(infos) > 1:
                return _held(self._from_headers[fqn], rank)
            return _of_rows(_joined(found))
        return _of_rows(self._index.rows(fqn)) if fqn in self._index else None

    @property
    def per_rank(self) -> PerRank:
        """What the ranks did not hold alike."""
        assert self._index.per_rank is not None
        return self._index.per_rank

    def holder(self, fqn: str) -> int | None:
        """The lowest rank that stores any of it."""
        held = self.find(fqn)
        return None if held is None or not len(held.rows) else int(held.rows.rank.min())

    @cached_property
    def _from_headers(self) -> dict[str, list[Piece]]:
        return locate(self._headers())


def held_tensors(store: Store, step_path: str, manifest: Manifest, headers: Headers) -> HeldTensors:
    """A step's. Raises what `headers` raises, if they have to be read."""
    from ckptengine.format.index import index_from_headers

    index = None if are_few(manifest) else read_index(store, step_path, manifest)
    if (
        index is None
        or index.partial is None
        or index.per_rank is None
        or any("@" in name for name in index.partial)
    ):
        index = index_from_headers(headers())
    return HeldTensors(index, headers)


def _of_rows(rows: ChunkRows) -> Held:
    return Held(rows, bool(rows.sharded.any()))


def _held(pieces: Sequence[Piece], rank: int | None) -> Held:
    """Of pieces that are not all alike, or not in C order."""
    sharded = any(piece.sharded for piece in pieces)
    problem = conflict(list(pieces))
    first = next((piece for piece in pieces if piece.rank == rank), pieces[0])
    alike = [
        piece
        for piece in pieces
        if (piece.dtype, piece.chunk.global_shape, piece.chunk.flat_of)
        == (first.dtype, first.chunk.global_shape, first.chunk.flat_of)
    ]
    return Held(rows_of_pieces(alike), sharded, problem)


def rows_of_pieces(pieces: Sequence[Piece]) -> ChunkRows:
    """As columns, of pieces of the same dtype, shape and flattening."""
    import numpy as np

    from ckptengine.format.index import ChunkRows

    first, count = pieces[0], len(pieces)
    ndim = len(first.chunk.global_shape)
    return ChunkRows(
        first.dtype,
        first.chunk.global_shape,
        first.chunk.flat_of,
        np.array([piece.rank for piece in pieces], np.int64),
        np.array([piece.chunk.offsets for piece in pieces], np.int64).reshape(count, ndim),
        np.array([piece.chunk.shape for piece in pieces], np.int64).reshape(count, ndim),
        np.array([piece.start for piece in pieces], np.int64),
        np.array([piece.sharded for piece in pieces], np.bool_),
        {row: piece.stride for row, piece in enumerate(pieces) if piece.stride is not None},
    )


def _joined(found: Iterable[ChunkRows]) -> ChunkRows:
    import numpy as np

    from ckptengine.format.index import ChunkRows

    found = list(found)
    first = found[0]
    rank = np.concatenate([rows.rank for rows in found])
    order = np.argsort(rank, kind="stable")
    return ChunkRows(
        first.dtype,
        first.global_shape,
        first.flat_of,
        rank[order],
        np.concatenate([rows.offsets for rows in found])[order],
        np.concatenate([rows.shape for rows in found])[order],
        np.concatenate([rows.start for rows in found])[order],
        np.concatenate([rows.sharded for rows in found])[order],
    )
