"""Where are a shard's blocks? Pure arithmetic over the data section."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptengine.format.limits import PAGE, round_up

AS_IT_IS = "0"
ZSTD = "1"
PLANES = {2: "2", 4: "4", 8: "8"}
"""How a block of a compressed shard is stored: as it is, as one zstd frame, or as one zstd frame of its byte
planes, by the elements' size."""
METHODS = frozenset((AS_IT_IS, ZSTD, *PLANES.values()))
METHOD_NAMES = {
    AS_IT_IS: "as they are",
    ZSTD: "zstd",
    **{method: f"zstd of {size}-byte planes" for size, method in PLANES.items()},
}


@dataclass(frozen=True, slots=True)
class BlockTable:
    """A data section of `data_nbytes` cut every `block_nbytes`; the last block may be short."""

    data_nbytes: int
    block_nbytes: int

    def __post_init__(self) -> None:
        if self.data_nbytes < 0 or self.data_nbytes % PAGE:
            raise ValueError(f"data_nbytes must be a non-negative multiple of {PAGE}, not {self.data_nbytes}")
        if self.block_nbytes <= 0 or self.block_nbytes % PAGE:
            raise ValueError(f"block_nbytes must be a positive multiple of {PAGE}, not {self.block_nbytes}")

    @property
    def count(self) -> int:
        return -(-self.data_nbytes // self.block_nbytes)

    def span(self, i: int) -> tuple[int, int]:
        """The bytes [start, stop) of the data section that block i holds."""
        if not 0 <= i < self.count:
            raise IndexError(f"block {i} of {self.count}")
        start = i * self.block_nbytes
        return start, min(start + self.block_nbytes, self.data_nbytes)

    def covering(self, start: int, stop: int) -> range:
        """The blocks that hold the bytes [start, stop); none when the range is empty."""
        if not 0 <= start <= stop <= self.data_nbytes:
            raise ValueError(f"bytes [{start}, {stop}) are not in a data section of {self.data_nbytes} bytes")
        if start == stop:
            return range(0)
        return range(start // self.block_nbytes, (stop - 1) // self.block_nbytes + 1)


def stored_offsets(stored_lengths: Iterable[int]) -> tuple[int, ...]:
    """Where each block of a compressed shard starts, from the end of the header; each fills whole pages."""
    offsets = []
    at = 0
    for length in stored_lengths:
        offsets.append(at)
        at += round_up(length, PAGE)
    return tuple(offsets)
