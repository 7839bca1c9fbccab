"""Where does one tensor lie, and what are its values like?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from ckptengine.cli import render
from ckptengine.cli.contents import Contents, Row
from ckptengine.cli.inspect_whole import row_to_json, shape
from ckptengine.format.entries import ViewEntry
from ckptengine.read.world import Piece

if TYPE_CHECKING:
    from ckptengine.cli.statistics import Accumulator, Statistics
    from ckptengine.storage.store import Store

_WINDOW_NBYTES = 64 << 20
"""Read and described at once."""

_PIECES = (
    render.Column("RANK", right=True),
    render.Column("OFFSETS"),
    render.Column("SHAPE"),
    render.Column("BYTES", right=True),
    render.Column("AT", right=True),
    render.Column("FILE"),
)


@dataclass(frozen=True, slots=True)
class Described:
    """Statistics over the pieces of these ranks; None, with the reason, where the bytes are not numbers."""

    statistics: Statistics | None
    ranks: tuple[int, ...] = ()
    reason: str | None = None


def describe(store: Store, contents: Contents, row: Row, rank: int | None) -> Described:
    """Reads the tensor, every block checked against its digest.

    Where ranks hold values of their own under one name, the lowest rank's, or those of `rank`, are described.
    """
    from ckptengine.cli.statistics import Accumulator, can_describe

    pieces = _chosen(row, rank)
    if not pieces:
        return Described(None, reason="it is a large value, not a tensor")
    ranks = tuple(piece.rank for piece in pieces)
    if any(piece.stride is not None for piece in pieces):
        return Described(None, ranks, "it is a view whose elements are spread over another tensor's bytes")
    dtype = pieces[0].dtype
    if not can_describe(dtype):
        return Described(None, ranks, f"the bytes of {dtype} are not numbers")
    accumulator = Accumulator(dtype)
    total = sum(piece.stop - piece.start for piece in pieces)
    done = 0
    with render.progress(f"reading {render.clean(row.name)}") as progress:

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done, total)

        for piece in pieces:
            _read(store, contents, piece, accumulator, advance)
    return Described(accumulator.result(), ranks)


def show(contents: Contents, row: Row, described: Described | None) -> None:
    render.facts(_facts(row))
    render.line()
    if row.pieces:
        render.table(_PIECES, [_cells(contents, piece) for piece in row.pieces])
        render.line()
    if described is None:
        return
    if described.statistics is None:
        render.message(f"no statistics: {described.reason}")
        return
    # Of chunks, several ranks may have the same, or nothing.
    if set(described.ranks) != row.ranks and not any(piece.sharded for piece in row.pieces):
        render.message(
            f"each rank has values of its own: these are rank {described.ranks[0]}'s; --rank shows another's"
        )
    render.facts(_figures(described.statistics, math.prod(row.shape)))


def to_json(contents: Contents, row: Row, described: Described | None) -> None:
    statistics: dict[str, Any] | None = None
    if described is not None and described.statistics is not None:
        statistics = asdict(described.statistics)
        for key in ("mean", "std"):  # of very large values they can overflow; JSON has no infinity
            if statistics[key] is not None and not math.isfinite(statistics[key]):
                statistics[key] = None
        statistics["ranks"] = sorted(described.ranks)
    render.json(
        {
            "path": contents.path,
            "tensor": row_to_json(row) | {"view_of": _base(row), "value_kind": _kind(row)},
            "chunks": [_piece_to_json(contents, piece) for piece in row.pieces],
            "statistics": statistics,
            "no_statistics_because": None if described is None else described.reason,
        }
    )


def _chosen(row: Row, rank: int | None) -> list[Piece]:
    """One piece for each distinct part of the tensor; of equal parts the lowest rank's."""
    if rank is not None:
        pieces = [piece for piece in row.pieces if piece.rank == rank]
        if not pieces and row.pieces:
            raise typer.BadParameter(
                f"rank {rank} holds nothing of this tensor; ranks {render.ranges(row.ranks)} do"
            )
        return pieces
    parts: dict[tuple[tuple[int, ...], tuple[int, ...]], Piece] = {}
    for piece in row.pieces:
        if (piece.dtype, piece.chunk.global_shape) == (row.dtype, row.pieces[0].chunk.global_shape):
            parts.setdefault((piece.chunk.offsets, piece.chunk.shape), piece)
    return list(parts.values())


def _read(
    store: Store, contents: Contents, piece: Piece, accumulator: Accumulator, advance: Callable[[int], None]
) -> None:
    import numpy as np

    from ckptengine.read.plan import Destination
    from ckptengine.read.reader import read_shard

    header = contents.header(piece.rank)
    path = contents.file(piece.rank)
    block = header.block_nbytes
    window = max(1, _WINDOW_NBYTES // block) * block if block <= _WINDOW_NBYTES else _WINDOW_NBYTES
    buffer = np.empty(min(window, piece.stop - piece.start), dtype=np.uint8)
    start = piece.start
    while start < piece.stop:
        # Windows end where blocks do, so that no block is read twice and no element is cut.
        stop = min(piece.stop, (start // window + 1) * window)
        read_shard(store, path, header, [Destination(start, stop, buffer.ctypes.data)])
        accumulator.add(buffer[: stop - start])
        advance(stop - start)
        start = stop


def _facts(row: Row) -> list[tuple[str, str]]:
    facts = [
        ("tensor", render.clean(row.name)),
        ("dtype", row.dtype),
        ("shape", f"{shape(row.shape)}, {render.plural(math.prod(row.shape), 'element')}"),
        ("placement", render.clean(row.placement or "-")),
        ("bytes", f"{render.human_nbytes(row.nbytes)} in {render.plural(len(row.pieces), 'piece')}"),
    ]
    base, kind = _base(row), _kind(row)
    if base is not None:
        facts.append(("view of", f"{render.clean(base)}, whose bytes it shares"))
    if kind is not None:
        facts.append(("kind", f"a large value of type {kind}"))
    return facts


def _base(row: Row) -> str | None:
    return row.entry.of if isinstance(row.entry, ViewEntry) else None


def _kind(row: Row) -> str | None:
    return None if row.entry is None or isinstance(row.entry, ViewEntry) else row.entry.kind


def _cells(contents: Contents, piece: Piece) -> list[str]:
    chunk = piece.chunk
    return [
        str(piece.rank),
        shape(chunk.offsets),
        shape(chunk.shape),
        str(piece.stop - piece.start),
        _place(contents, piece),
        render.clean(contents.file_name(piece.rank)),
    ]


def _place(contents: Contents, piece: Piece) -> str:
    offset = _file_offset(contents, piece)
    if offset is not None:
        return str(offset)
    blocks = contents.header(piece.rank).blocks.covering(piece.start, piece.stop)
    return f"blocks {render.ranges(blocks)}" if blocks else "-"


def _file_offset(contents: Contents, piece: Piece) -> int | None:
    """Where the piece begins in its file; None in a compressed shard, where only blocks have a place."""
    header = contents.header(piece.rank)
    return header.header_nbytes + piece.start if header.stored_nbytes is None else None


def _piece_to_json(contents: Contents, piece: Piece) -> dict[str, Any]:
    return {
        "rank": piece.rank,
        "offsets": list(piece.chunk.offsets),
        "shape": list(piece.chunk.shape),
        "flat": piece.chunk.flat_of is not None,
        "nbytes": piece.stop - piece.start,
        "file": contents.file_name(piece.rank),
        "file_offset": _file_offset(contents, piece),
        "data_start": piece.start,
        "data_stop": piece.stop,
    }


def _figures(statistics: Statistics, nelem: int) -> Sequence[tuple[str, str]]:
    def number(value: int | float | None) -> str:
        if value is None:
            return "-"
        return str(value) if isinstance(value, int) else f"{value:.6g}"

    def part(count: int) -> str:
        return f"{count:,} ({count / statistics.count:.2%})" if count else "0"

    of = " of magnitudes" if statistics.magnitude else ""
    count = f"{statistics.count:,}" + ("" if statistics.count == nelem else f" of {nelem:,} elements")
    return [
        ("count", count),
        ("min", number(statistics.min) + of),
        ("max", number(statistics.max) + of),
        ("mean", number(statistics.mean) + of),
        ("std", number(statistics.std) + of),
        ("zeros", part(statistics.zeros)),
        ("nan", part(statistics.nan)),
        ("inf", part(statistics.inf)),
    ]
