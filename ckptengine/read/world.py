"""Where are the pieces of each tensor, over the shards of all ranks, and do they make up a whole?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckptengine.format.entries import is_c_order
from ckptengine.format.geometry import Chunk
from ckptengine.format.shard import ShardHeader, TensorEntry, ViewEntry
from ckptengine.read import coverage
from ckptengine.read.damage import Damage


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of a tensor.

    start, stop: its bytes in the data section of that rank's shard. sharded: the rank said which chunk of a
    global tensor it is; otherwise it is a whole tensor of the rank's own. stride: for a view whose elements
    are not in C order within those bytes, else None.
    """

    rank: int
    dtype: str
    chunk: Chunk
    start: int
    stop: int
    sharded: bool
    stride: tuple[int, ...] | None = None


def pieces_of(header: ShardHeader) -> Iterator[tuple[str, Piece]]:
    """The tensors of one shard, with the views onto them; large values that only lie in the data section are
    left out."""
    starts: dict[str, int] = {}
    for entry in header.tensors:
        starts[entry.name] = entry.start
        if entry.kind is None:
            yield entry.name, _piece(header.rank, entry, entry.start, entry.stop, None)
    for view in header.views:
        start = starts[view.of] + view.byte_offset
        stride = None if is_c_order(view.shape, view.stride) else view.stride
        yield view.name, _piece(header.rank, view, start, start + view.extent_nbytes, stride)


def locate(headers: Iterable[ShardHeader]) -> dict[str, list[Piece]]:
    """Every tensor's pieces, in the order of the headers given. Replicas are no pieces: the bytes are
    elsewhere.

    The parts of a tensor of which one rank holds several are found under the tensor's own name.
    """
    found: dict[str, list[Piece]] = {}
    for header in headers:
        for name, piece in pieces_of(header):
            fqn = tensor_name(name, piece.chunk if piece.sharded else None)
            found.setdefault(fqn, []).append(piece)
    return found


def tensor_name(name: str, chunk: Chunk | None) -> str:
    """The name of the tensor an entry is, or is a part of (chunk: None where it is whole).

    One rank's several chunks of one tensor are told apart by their offsets, as in `weight@8_0`.
    """
    if chunk is None or "@" not in name:
        return name
    return name.removesuffix("@" + "_".join(map(str, chunk.offsets)))


def sharded_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Those that are chunks of one global tensor; the others stand for themselves.

    Where ranks say that theirs is a chunk, another's whole tensor of the same shape is one as well, which
    happens to be all of it: of one row sharded over several ranks, the first has all and the others nothing.
    """
    pieces = list(pieces)
    kinds = {_kind(piece) for piece in pieces if piece.sharded}
    return [piece for piece in pieces if piece.sharded or _kind(piece) in kinds]


def _kind(piece: Piece) -> tuple[object, ...]:
    return piece.dtype, piece.chunk.global_shape, piece.chunk.flat_of


def conflict(pieces: list[Piece]) -> str | None:
    """How chunks of one tensor contradict each other, or None."""
    first = pieces[0]
    for piece in pieces[1:]:
        for what, one, other in (
            ("dtype", first.dtype, piece.dtype),
            ("global shape", first.chunk.tensor_shape, piece.chunk.tensor_shape),
            ("flattening", first.chunk.flat_of is not None, piece.chunk.flat_of is not None),
        ):
            if one != other:
                return f"rank {first.rank} says its {what} is {one}, rank {piece.rank} says {other}"
    return None


def gap(pieces: list[Piece]) -> str | None:
    """The part of a tensor that none of its chunks covers, as an index, or None."""
    missing = coverage.first_gap(
        pieces[0].chunk.global_shape,
        (coverage.region(piece.chunk.offsets, piece.chunk.shape) for piece in pieces),
    )
    if missing is None:
        return None
    flat = " of the flattened tensor" if pieces[0].chunk.flat_of is not None else ""
    return f"{coverage.describe(missing)}{flat}"


def inconsistencies(headers: Mapping[int, ShardHeader], world_size: int, file: str) -> list[Damage]:
    """Where the shards contradict each other, as damages of `file`.

    With a header missing from `headers`, gaps and lost replicas are its consequence and not reported again.
    """
    found = []
    complete = all(rank in headers for rank in range(world_size))
    pieces = locate(headers[rank] for rank in sorted(headers))
    for name, all_pieces in pieces.items():
        chunks = sharded_pieces(all_pieces)
        if not chunks:
            continue
        problem = conflict(chunks)
        if problem is not None:
            found.append(
                Damage(file, f"the chunks of {name} contradict each other: {problem}", tensors=(name,))
            )
        elif complete and (missing := gap(chunks)) is not None:
            found.append(Damage(file, f"no rank holds {missing} of {name}", tensors=(name,)))
    for rank in sorted(headers):
        for name, owner in headers[rank].replicas.items():
            if owner in headers and all(piece.rank != owner for piece in pieces.get(name, ())):
                problem = (
                    f"rank {rank} says its replica of {name} is with rank {owner}, which does not have it"
                )
                found.append(Damage(file, problem, rank=rank, tensors=(name,)))
    return found


def _piece(
    rank: int, entry: TensorEntry | ViewEntry, start: int, stop: int, stride: tuple[int, ...] | None
) -> Piece:
    chunk = entry.chunk
    return Piece(
        rank,
        entry.dtype,
        Chunk.whole(entry.shape) if chunk is None else chunk,
        start,
        stop,
        chunk is not None,
        stride,
    )
