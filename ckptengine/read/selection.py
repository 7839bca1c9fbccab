"""Which part of a tensor does an index select?"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptengine.format.limits import PAGE


@dataclass(frozen=True, slots=True)
class Selection:
    """A basic index, applied to a shape: for each dimension where it starts, how many it takes and at which
    step.

    dropped: the dimensions indexed with an int, which the result does not have.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    dropped: frozenset[int] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return tuple(count for dim, count in enumerate(self.counts) if dim not in self.dropped)

    @property
    def hull(self) -> tuple[int, ...]:
        """The shape of the smallest box that holds all that is selected."""
        return tuple(
            (count - 1) * step + 1 if count else 0
            for count, step in zip(self.counts, self.steps, strict=True)
        )

    def boxes(self, itemsize: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The boxes to read, `(offsets, shape)`: one below the other they make up an array for `finish`.

        One box is the rule. With a step in the first dimension that skips a page or more, each index of that
        dimension is a box of its own, so that what lies between them is not read.
        """
        hull = self.hull
        if not self._by_rows(itemsize):
            return [(self.starts, hull)]
        first, step = self.starts[0], self.steps[0]
        return [((first + i * step, *self.starts[1:]), (1, *hull[1:])) for i in range(self.counts[0])]

    def finish(self, itemsize: int) -> tuple[slice | int, ...]:
        """The index that takes the selection out of what `boxes` gave."""
        steps = (1, *self.steps[1:]) if self._by_rows(itemsize) else self.steps
        return tuple(0 if dim in self.dropped else slice(None, None, step) for dim, step in enumerate(steps))

    def _by_rows(self, itemsize: int) -> bool:
        return bool(self.counts) and (self.steps[0] - 1) * prod(self.hull[1:]) * itemsize >= PAGE


def select(index: Any, shape: tuple[int, ...]) -> Selection:
    """Ints, slices with a positive step, and one Ellipsis, as NumPy and torch read them.

    Raises IndexError where they do not fit the shape, ValueError for a step that is not positive, and
    TypeError for any other kind of index.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    ellipses = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can have only one Ellipsis")
    missing = len(shape) - (len(items) - len(ellipses))
    if missing < 0:
        raise IndexError(f"too many indices: {len(items) - len(ellipses)} for {len(shape)} dimensions")
    at = ellipses[0] if ellipses else len(items)
    items[at : at + 1] = [slice(None)] * missing
    starts, counts, steps, dropped = [], [], [], set()
    for dim, (item, size) in enumerate(zip(items, shape, strict=True)):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step < 1:
                raise ValueError(f"the step of a slice must be positive, not {step}")
            starts.append(min(start, size))
            counts.append(len(range(start, stop, step)))
            steps.append(step if counts[-1] > 1 else 1)
            continue
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise TypeError(f"a slice is indexed with ints, slices and Ellipsis, not {type(item).__name__}")
        i = operator.index(item)
        if not -size <= i < size:
            raise IndexError(f"index {i} is out of range for dimension {dim} of size {size}")
        starts.append(i % size)
        counts.append(1)
        steps.append(1)
        dropped.add(dim)
    return Selection(tuple(starts), tuple(counts), tuple(steps), frozenset(dropped))
