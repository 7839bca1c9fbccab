"""What is damaged, where, and which tensors does it touch?"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ckptengine.errors import CorruptCheckpointError
from ckptengine.format.shard import ShardHeader

_NAMES_IN_MESSAGE = 4


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged place.

    file: relative to the step directory, or the path a shard was opened by. rank: None for a file of no rank.
    offset, nbytes: of the damaged bytes as stored in the file; None where the whole file is meant.
    block: its number, where the damage is a block. tensors: the names whose bytes lie in it.
    """

    file: str
    reason: str
    rank: int | None = None
    offset: int | None = None
    nbytes: int | None = None
    block: int | None = None
    tensors: tuple[str, ...] = ()

    def error(self) -> CorruptCheckpointError:
        if self.block is None:
            message = self.reason
        else:
            message = f"block {self.block} is damaged: {self.reason}; it holds {describe(self.tensors)}"
        return CorruptCheckpointError(
            message,
            path=self.file,
            rank=self.rank,
            fqn=self.tensors[0] if len(self.tensors) == 1 else None,
            offset=self.offset,
            hint="restore an older step, or run `ckpt verify` to see everything that is damaged",
        )


def describe(names: tuple[str, ...]) -> str:
    """Names for a message: all of a few, else the first ones and how many more."""
    if not names:
        return "padding only"
    shown = ", ".join(names[:_NAMES_IN_MESSAGE])
    more = len(names) - _NAMES_IN_MESSAGE
    return f"{shown} and {more} more" if more > 0 else shown


def touched(header: ShardHeader, start: int, stop: int) -> tuple[str, ...]:
    """Names of the tensors with a byte in [start, stop) of the data section, then of the views onto such
    bytes."""
    tensors = header.tensors
    names = []
    # An empty tensor shares its start with its neighbour, so the first candidate is found by where tensors
    # stop.
    for entry in tensors[bisect_right(tensors, start, key=lambda entry: entry.stop) :]:
        if entry.start >= stop:
            break
        if entry.stop > entry.start:
            names.append(entry.name)
    if header.views:
        starts = {entry.name: entry.start for entry in tensors}
        for view in header.views:
            first = starts[view.of] + view.byte_offset
            if first < stop and first + view.extent_nbytes > start:
                names.append(view.name)
    return tuple(names)
