"""Which parts of which stored chunks make up a target's chunk? Any layout to any layout, as strided boxes.

Pure geometry, of numbers only. A part is one hyper-rectangle of the tensor that one shard has: where its
first byte is in that shard, where its first element goes in the target's memory, and how the elements lie on
either side. So Shard(1) to Shard(0), a flat range to a rectangle, and a copy of a few bytes are the same kind
of thing, and none costs more for having many rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from ckptengine.format import dtypes
from ckptengine.format.geometry import Chunk, c_strides
from ckptengine.format.index import ChunkRows
from ckptengine.read.coverage import Region, subtract

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Sizes: TypeAlias = "tuple[int, ...]"

FEW = 16
"""So many chunks are told apart faster by Python than by numpy."""


class Part(msgspec.Struct, frozen=True, gc=False):
    """A box of a target's chunk, and where a shard has it.

    start: its first byte in the data section of `rank`. source: the strides of its elements there. offset:
    its first element in the target's memory, counted from the target's first. target: the strides of its
    elements there. All but `start` in elements; dimensions that lie in one piece on both sides are one.
    """

    rank: int
    start: int
    shape: Sizes
    source: Sizes
    offset: int
    target: Sizes


@dataclass(frozen=True, slots=True)
class Parts:
    """All there is of a target's chunk. gap: a region of the tensor (of the flattened one if `flat`) that the
    target wants and no rank holds, or None."""

    parts: list[Part]
    gap: Region | None = None
    flat: bool = False


def parts_of(
    rows: ChunkRows, target: Chunk, strides: Sequence[int] | None = None, *, reader: int = 0
) -> Parts:
    """The parts that make up `target`, which is a chunk of the tensor whose stored chunks are `rows`.

    strides: of the target's memory, in elements; None: C order. reader: who asks. Where several ranks hold
    the same chunk, one of them is taken, another one for the next reader. Each element of the target is in
    one part, however the chunks overlap.
    """
    if (rows.global_shape if rows.flat_of is None else rows.flat_of) != target.tensor_shape:
        raise ValueError(f"chunks of different tensors: {rows.global_shape} and {target.tensor_shape}")
    if not target.nelem:
        return Parts([])
    if strides is None:
        strides = c_strides(target.shape)
    if rows.flat_of is None and target.flat_of is not None:
        return _flat_from_boxes(rows, target, strides[0], reader)
    if rows.flat_of is not None and target.flat_of is None:
        return _box_from_ranges(rows, target, strides, reader)
    wanted = tuple(zip(target.offsets, map(sum, zip(target.offsets, target.shape, strict=True)), strict=True))
    claims, gap = _claims(rows, wanted, reader)
    itemsize = dtypes.itemsize(rows.dtype)
    parts = [_part(rows, row, box, itemsize, target.offsets, strides) for row, box in claims]
    return Parts(parts, gap, rows.flat_of is not None)


def _flat_from_boxes(rows: ChunkRows, target: Chunk, step: int, reader: int) -> Parts:
    """A range of the flattened tensor, of which rectangles are stored."""
    shape = target.tensor_shape
    along = c_strides(shape)
    origin = target.offsets[0]
    itemsize = dtypes.itemsize(rows.dtype)
    parts = []
    for wanted in boxes_of_range(origin, origin + target.shape[0], shape):
        claims, gap = _claims(rows, wanted, reader)
        if gap is not None:
            return Parts([], gap)
        for row, box in claims:
            chunk, source = rows.offsets[row].tolist(), rows.strides_of(row)
            offset = sum(lo * stride for (lo, _), stride in zip(box, along, strict=True)) - origin
            parts.append(
                _collapsed(
                    int(rows.rank[row]),
                    int(rows.start[row]) + itemsize * _distance(box, chunk, source),
                    tuple(hi - lo for lo, hi in box),
                    source,
                    offset * step,
                    tuple(stride * step for stride in along),
                )
            )
    return Parts(parts)


def _box_from_ranges(rows: ChunkRows, target: Chunk, strides: Sequence[int], reader: int) -> Parts:
    """A rectangle, of which ranges of the flattened tensor are stored."""
    shape = target.tensor_shape
    along = c_strides(shape)
    itemsize = dtypes.itemsize(rows.dtype)
    inside = tuple((lo, lo + size) for lo, size in zip(target.offsets, target.shape, strict=True))
    first = sum(lo * stride for (lo, _), stride in zip(inside, along, strict=True))
    last = sum((hi - 1) * stride for (_, hi), stride in zip(inside, along, strict=True))
    claims, _ = _claims(rows, ((first, last + 1),), reader)
    parts = []
    at = first
    for row, ((lo, hi),) in [*sorted(claims, key=lambda claim: claim[1]), (-1, ((last + 1, last + 1),))]:
        # What no range holds may lie between two rows of the rectangle.
        for box in boxes_of_range(at, lo, shape):
            missing = _overlap(box, inside)
            if missing is not None:
                return Parts([], missing)
        at = hi
        for box in boxes_of_range(lo, hi, shape):
            common = _overlap(box, inside)
            if common is None:
                continue
            place = sum(begin * stride for (begin, _), stride in zip(common, along, strict=True))
            step = rows.strides_of(row)[0]
            parts.append(
                _collapsed(
                    int(rows.rank[row]),
                    int(rows.start[row]) + itemsize * (place - int(rows.offsets[row, 0])) * step,
                    tuple(stop - begin for begin, stop in common),
                    tuple(stride * step for stride in along),
                    _distance(common, target.offsets, strides),
                    tuple(strides),
                )
            )
    return Parts(parts)


def boxes_of_range(lo: int, hi: int, shape: Sizes) -> Iterator[Region]:
    """A range of a flattened tensor as boxes of the tensor: at most one for each dimension's two ends, and
    one between them."""
    if lo >= hi:
        return
    if not shape:
        yield ()
        return
    inner = prod(shape[1:])
    first, head = divmod(lo, inner)
    last, tail = divmod(hi, inner)
    if first == last:
        for box in boxes_of_range(head, tail, shape[1:]):
            yield (first, first + 1), *box
        return
    if head:
        for box in boxes_of_range(head, inner, shape[1:]):
            yield (first, first + 1), *box
        first += 1
    if first < last:
        yield (first, last), *((0, size) for size in shape[1:])
    if tail:
        for box in boxes_of_range(0, tail, shape[1:]):
            yield (last, last + 1), *box


Claim: TypeAlias = "tuple[int, Region]"
"""A row, and what is taken of it."""


def _claims(rows: ChunkRows, wanted: Region, reader: int) -> tuple[list[Claim], Region | None]:
    """What to take of which row, so that each element that is wanted is taken once; and a part that none
    has."""
    import numpy as np

    begin = np.array([lo for lo, _ in wanted], np.int64)
    end = np.array([hi for _, hi in wanted], np.int64)
    lo = np.maximum(rows.offsets, begin)
    hi = np.minimum(rows.offsets + rows.shape, end)
    hits = np.flatnonzero((lo < hi).all(axis=1))
    if len(hits) > FEW:
        hits = _one_of_each(rows, hits, reader)
        chain = _chain(lo, hi, hits, begin, end)
        if chain is not None:
            regions = _regions(lo, hi, chain)
            return list(zip(chain.tolist(), regions, strict=True)), None
        chosen = hits.tolist()
    else:
        chosen = _one_of_few(rows, hits.tolist(), reader)
    regions = _regions(lo, hi, chosen)
    if len(chosen) == 1 and regions[0] == wanted:
        return [(chosen[0], wanted)], None
    left = [wanted]
    claims = []
    for region, row in sorted(zip(regions, chosen, strict=True)):
        if not left:
            break
        claims += [(row, common) for one in left if (common := _overlap(one, region)) is not None]
        left = [piece for one in left for piece in subtract(one, region)]
    return claims, min(left) if left else None


def _regions(
    lo: NDArray[np.int64], hi: NDArray[np.int64], rows: Sequence[int] | NDArray[np.int64]
) -> list[Region]:
    pairs = zip(lo[rows].tolist(), hi[rows].tolist(), strict=True)
    return [tuple(zip(begins, ends, strict=True)) for begins, ends in pairs]


def _one_of_few(rows: ChunkRows, hits: Sequence[int], reader: int) -> list[int]:
    """Of rows with the same chunk, one."""
    if len(hits) < 2:
        return list(hits)
    alike: dict[tuple[Sizes, Sizes], list[int]] = {}
    for row, offsets, shape in zip(hits, rows.offsets[hits].tolist(), rows.shape[hits].tolist(), strict=True):
        alike.setdefault((tuple(offsets), tuple(shape)), []).append(row)
    return [same[reader % len(same)] for same in alike.values()]


def _one_of_each(rows: ChunkRows, hits: NDArray[np.int64], reader: int) -> NDArray[np.int64]:
    """The same, for many."""
    import numpy as np

    keys = np.concatenate((rows.offsets[hits], rows.shape[hits]), axis=1)
    order = np.lexsort(keys.T[::-1]) if keys.shape[1] else np.arange(len(hits))
    ordered = keys[order]
    new = np.concatenate(([True], (ordered[1:] != ordered[:-1]).any(axis=1)))
    first = np.flatnonzero(new)
    count = np.diff(np.concatenate((first, [len(hits)])))
    chosen: NDArray[np.int64] = hits[order[first + reader % count]]
    return chosen


def _chain(
    lo: NDArray[np.int64],
    hi: NDArray[np.int64],
    hits: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
) -> NDArray[np.int64] | None:
    """The rows in order, if they follow each other along one dimension, take all of the others, and leave
    nothing out; None if it is not as simple as that."""
    import numpy as np

    partial = np.flatnonzero(((lo[hits] != begin) | (hi[hits] != end)).any(axis=0))
    if len(partial) != 1:
        return None
    (dim,) = partial.tolist()
    hits = hits[np.argsort(lo[hits, dim])]
    edges = lo[hits, dim]
    if edges[0] != begin[dim] or hi[hits[-1], dim] != end[dim] or (edges[1:] != hi[hits[:-1], dim]).any():
        return None
    return hits


def _overlap(a: Region, b: Region) -> Region | None:
    common = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return common if all(lo < hi for lo, hi in common) else None


def _part(
    rows: ChunkRows, row: int, box: Region, itemsize: int, origin: Sizes, strides: Sequence[int]
) -> Part:
    source = rows.strides_of(row)
    return _collapsed(
        int(rows.rank[row]),
        int(rows.start[row]) + itemsize * _distance(box, rows.offsets[row].tolist(), source),
        tuple(hi - lo for lo, hi in box),
        source,
        _distance(box, origin, strides),
        tuple(strides),
    )


def _distance(box: Region, origin: Iterable[int], strides: Iterable[int]) -> int:
    """Elements from a chunk's first one to the box's."""
    return sum((lo - begin) * stride for (lo, _), begin, stride in zip(box, origin, strides, strict=True))


def _collapsed(rank: int, start: int, shape: Sizes, source: Sizes, offset: int, target: Sizes) -> Part:
    """With as few dimensions as it can have."""
    sizes: list[int] = []
    here: list[int] = []
    there: list[int] = []
    for size, a, b in zip(shape, source, target, strict=True):
        if size == 1:
            continue
        if sizes and here[-1] == a * size and there[-1] == b * size:
            sizes[-1] *= size
            here[-1], there[-1] = a, b
        else:
            sizes.append(size)
            here.append(a)
            there.append(b)
    return Part(rank, start, tuple(sizes), tuple(here), offset, tuple(there))
