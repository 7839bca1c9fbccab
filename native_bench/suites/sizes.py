"""The sizes of what the suites measure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """small: how many small tensors a state has. blocks: of one shard. ranks, tensors: of a large world, and
    of each of its shards. steps: in one root. buffer: bytes, for digest, codec and arena. state: bytes of the
    tensors that are saved and restored."""

    small: int
    blocks: int
    ranks: int
    tensors: int
    steps: int
    buffer: int
    state: int


FULL = Sizes(
    small=20_000, blocks=100_000, ranks=4096, tensors=500, steps=1000, buffer=16 << 20, state=1 << 30
)
QUICK = Sizes(small=200, blocks=500, ranks=64, tensors=10, steps=30, buffer=1 << 20, state=4 << 20)
