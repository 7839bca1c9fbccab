"""Which tensors does a block hold, in few words?"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any

_SHOWN = 3


class TensorsOf:
    """Of a shard: `(name, start, stop)` of its tensors in the data section, in order, none overlapping."""

    def __init__(self, spans: Iterable[tuple[str, int, int]]) -> None:
        filled = [(name, start, stop) for name, start, stop in spans if stop > start]
        self._names = [name for name, _, _ in filled]
        self._starts = [start for _, start, _ in filled]
        self._stops = [stop for _, _, stop in filled]

    def __call__(self, start: int, stop: int) -> dict[str, Any]:
        """For an event's arguments: how many have a byte in [start, stop), and the first ones' names."""
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        return {"tensors": max(last - first, 0), "first": self._names[first : min(last, first + _SHOWN)]}
