"""Which blocks of a shard must be read, and where do their bytes go?

Pure: addresses are numbers here. A block is the unit of I/O and of digest, so one that holds a single wanted
byte is read whole, and one that holds none is not read at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import msgspec

from ckptengine.format.blocks import BlockTable


class Destination(msgspec.Struct, frozen=True, gc=False):
    """Bytes `start` to `stop` of a shard's data section go to memory at `address`, in one piece."""

    start: int
    stop: int
    address: int


class Copy(NamedTuple):
    """`nbytes` bytes, from byte `at` of the block on, go to `address`."""

    at: int
    nbytes: int
    address: int


@dataclass(frozen=True, slots=True)
class BlockRead:
    """One block to read, and the copies out of it."""

    block: int
    copies: tuple[Copy, ...]

    @property
    def nbytes_wanted(self) -> int:
        return sum(copy.nbytes for copy in self.copies)


def plan_reads(blocks: BlockTable, destinations: Iterable[Destination]) -> list[BlockRead]:
    """The blocks that hold the destinations' bytes, ascending, each once.

    Destinations may come in any order, be empty, and overlap in the shard (the same bytes are then delivered
    to each); in memory they must not overlap, since blocks are scattered in no particular order.
    Raises ValueError where one lies outside the data section.
    """
    size = blocks.block_nbytes
    copies: dict[int, list[Copy]] = {}
    # The block that the last copy was out of.
    first = end = 0
    into: list[Copy] = []
    for start, stop, address in _joined(destinations):
        if start < 0 or stop > blocks.data_nbytes:
            raise ValueError(
                f"destination [{start}, {stop}) lies outside the data section of {blocks.data_nbytes} bytes"
            )
        while start < stop:
            if not first <= start < end:
                block = start // size
                first, end = block * size, (block + 1) * size
                into = copies.setdefault(block, [])
            nbytes = min(stop, end) - start
            into.append(Copy(start - first, nbytes, address))
            start += nbytes
            address += nbytes
    return [BlockRead(block, tuple(copies[block])) for block in sorted(copies)]


def _joined(destinations: Iterable[Destination]) -> Iterator[tuple[int, int, int]]:
    """The destinations in shard order; neighbours in the shard that are neighbours in memory too become one
    copy."""
    first = end = address = 0
    for item in sorted(destinations, key=attrgetter("start")):
        start, stop = item.start, item.stop
        if stop <= start:
            if stop < start:
                raise ValueError(f"destination [{start}, {stop}) ends before it starts")
            continue
        if start == end and first < end and address + end - first == item.address:
            end = stop
            continue
        if first < end:
            yield first, end, address
        first, end, address = start, stop, item.address
    if first < end:
        yield first, end, address
