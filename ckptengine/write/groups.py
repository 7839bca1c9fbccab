"""Which bytes of a data section are alike? Those of one dtype and one role, as weights or a moment of Adam.

A tensor's role is the first and the last part of its name, whatever the digits. `model.layers.3.fc.weight`
and `model.layers.4.fc.weight` are a group, `optimizer.state.3.exp_avg` and `optimizer.state.3.exp_avg_sq` are
not.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ckptengine.format import dtypes
from ckptengine.format.blocks import PLANES, BlockTable

MAX_GROUPS = 64
"""More would be sampled for longer than it pays; the dtype alone then makes a group."""

SAMPLE_PIECES = 8
PIECE_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Group:
    """Bytes [start, stop) of the data section that are alike, in order.

    word: the size of the elements whose byte planes may pay; 1 if there are none.
    """

    name: str
    word: int
    runs: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def sample(self, data: memoryview) -> bytes:
        """A few pieces of it, evenly spread and of whole elements; all of it if it is small."""
        total = self.nbytes
        if total <= SAMPLE_PIECES * PIECE_NBYTES:
            return b"".join(data[start:stop] for start, stop in self.runs)
        begins = [0, *accumulate(stop - start for start, stop in self.runs)]
        parts = []
        for i in range(SAMPLE_PIECES):
            at = i * (total - PIECE_NBYTES) // (SAMPLE_PIECES - 1)
            run = bisect_right(begins, at) - 1
            skip = (at - begins[run]) // self.word * self.word
            left = PIECE_NBYTES
            while left and run < len(self.runs):
                start, stop = self.runs[run]
                part = data[start + skip : min(start + skip + left, stop)]
                parts.append(part)
                left -= len(part)
                run, skip = run + 1, 0
        return b"".join(parts)


def group(spans: Iterable[tuple[str, str, int, int]]) -> list[Group]:
    """The groups of `(name, dtype, start, stop)` in offset order; empty tensors are in none."""
    spans = [span for span in spans if span[2] < span[3]]
    for label in (_role, lambda name: ""):
        groups: dict[tuple[str, str], list[list[int]]] = {}
        for name, dtype, start, stop in spans:
            runs = groups.setdefault((dtype, label(name)), [])
            if runs and runs[-1][1] == start:
                runs[-1][1] = stop
            else:
                runs.append([start, stop])
        if len(groups) <= MAX_GROUPS:
            break
    return [
        Group(f"{dtype} {role}".rstrip(), _word(dtype), tuple((start, stop) for start, stop in runs))
        for (dtype, role), runs in groups.items()
    ]


def shares(groups: Sequence[Group], blocks: BlockTable) -> list[dict[int, int]]:
    """For each block, how many bytes of which group (by its index) lie in it."""
    found: list[dict[int, int]] = [{} for _ in range(blocks.count)]
    for i, one in enumerate(groups):
        for start, stop in one.runs:
            for block in blocks.covering(start, stop):
                begin, end = blocks.span(block)
                nbytes = min(stop, end) - max(start, begin)
                found[block][i] = found[block].get(i, 0) + nbytes
    return found


def _role(name: str) -> str:
    first, _, rest = re.sub(r"\d+", "#", name).partition(".")
    return f"{first}…{rest.rpartition('.')[2]}" if rest else first


def _word(dtype: str) -> int:
    size = dtypes.itemsize(dtype)
    if dtype.startswith("complex"):
        size //= 2
    return size if size in PLANES else 1
