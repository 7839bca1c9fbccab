"""Do the chunks of a tensor cover all of it, and if not, which part is missing?"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]
Region = tuple[Interval, ...]
"""A hyper-rectangle: (start, stop) for each dimension."""


def region(offsets: Iterable[int], shape: Iterable[int]) -> Region:
    return tuple((offset, offset + size) for offset, size in zip(offsets, shape, strict=True))


def first_gap(shape: tuple[int, ...], chunks: Iterable[Region]) -> Region | None:
    """A part of `shape` that no chunk covers, or None. Chunks may overlap.

    Sorted chunks of a mesh leave one or a few regions uncovered at each moment, so the work is about linear
    in their number; the check stays exact for any other arrangement.
    """
    whole: Region = tuple((0, size) for size in shape)
    left = [] if _is_empty(whole) else [whole]
    for chunk in sorted(chunks):
        if not left:
            break
        left = [piece for one in left for piece in subtract(one, chunk)]
    return min(left) if left else None


def describe(gap: Region) -> str:
    """A region as it would be written as an index: `[0:4, 2:8]`."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in gap)}]"


def subtract(area: Region, cut: Region) -> list[Region]:
    """What a cut leaves of `area`, as disjoint regions."""
    if any(cut[d][0] >= stop or cut[d][1] <= start for d, (start, stop) in enumerate(area)) or _is_empty(cut):
        return [area]
    left = []
    for d, (start, stop) in enumerate(area):
        low, high = max(start, cut[d][0]), min(stop, cut[d][1])
        if start < low:
            left.append((*area[:d], (start, low), *area[d + 1 :]))
        if high < stop:
            left.append((*area[:d], (high, stop), *area[d + 1 :]))
        area = (*area[:d], (low, high), *area[d + 1 :])
    return left


def _is_empty(area: Region) -> bool:
    return any(stop <= start for start, stop in area)
