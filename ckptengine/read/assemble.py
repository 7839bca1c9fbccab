"""Which bytes of the stored pieces make up a part of a tensor?"""

from __future__ import annotations

from collections.abc import Iterable

from ckptengine.format import dtypes
from ckptengine.format.geometry import Chunk, copy_runs, intersect
from ckptengine.read.plan import Destination
from ckptengine.read.world import Piece


def gather(pieces: Iterable[Piece], target: Chunk, address: int) -> dict[int, list[Destination]]:
    """For each rank what to read so that `target` lies at `address`, in C order.

    Pieces are chunks in C order of the tensor that `target` is a part of; of equal chunks the first is read.
    What no piece holds is left as it is.
    """
    found: dict[int, list[Destination]] = {}
    seen = set()
    for piece in pieces:
        if piece.chunk in seen:
            continue
        seen.add(piece.chunk)
        box = intersect(piece.chunk, target)
        if box is None:
            continue
        wanted = found.setdefault(piece.rank, [])
        for source, to, nbytes in copy_runs(box, piece.chunk, target, dtypes.itemsize(piece.dtype)):
            start = piece.start + source
            wanted.append(Destination(start, start + nbytes, address + to))
    return found
