"""How are blocks of several shards read in the order in which they are wanted?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptengine.read.plan import BlockRead, Destination, plan_reads
from ckptengine.read.reader import MAX_POOL_NBYTES, Buffers, ShardReader
from ckptengine.read.tally import ReadStats, Tally
from ckptengine.storage.threads import in_threads

Shard = int
"""A number that tells shards apart: in a restore, the rank whose shard it is."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A range of a shard's data section, and what it is a piece of.

    rank: those with a lower one are wanted first. item: a number of the caller's, who counts what arrives.
    """

    destination: Destination
    item: int
    rank: float


@dataclass(frozen=True, slots=True)
class OrderedRead:
    """One block. items: those of which it has bytes, each once."""

    shard: Shard
    read: BlockRead
    items: tuple[int, ...]


def in_order(
    shards: Mapping[Shard, ShardReader], wanted: Mapping[Shard, Iterable[Wanted]]
) -> list[OrderedRead]:
    """The blocks that have what is wanted, each once: first those with bytes of the lowest rank, and of one
    rank those that come first in their shard, from all shards in turn."""
    found: list[tuple[float, int, OrderedRead]] = []
    for shard, ranges in wanted.items():
        blocks = shards[shard].header.blocks
        held: dict[int, dict[int, None]] = defaultdict(dict)
        ranks: dict[int, float] = {}
        destinations = []
        for one in ranges:
            destination = one.destination
            destinations.append(destination)
            if destination.start == destination.stop:
                continue
            first = destination.start // blocks.block_nbytes
            last = (destination.stop - 1) // blocks.block_nbytes
            for block in range(first, last + 1):
                held[block][one.item] = None
                ranks[block] = min(ranks.get(block, one.rank), one.rank)
        for read in plan_reads(blocks, destinations):
            block = read.block
            found.append((ranks[block], block, OrderedRead(shard, read, tuple(held[block]))))
    found.sort(key=lambda one: one[:2])
    return [read for _, _, read in found]


def deliver(
    shards: Mapping[Shard, ShardReader],
    reads: Sequence[OrderedRead],
    threads: int,
    on_block: Callable[[OrderedRead], None],
) -> ReadStats:
    """Reads and checks the blocks in their order and makes their copies, as `read_shard` does.

    on_block: called in a reading thread for each block once it has passed its check. Whatever it raises ends
    the read, as damage does: the other threads stop after the block they are at.
    """
    of_shard: dict[Shard, list[int]] = defaultdict(list)
    for one in reads:
        of_shard[one.shard].append(one.read.block)
    tally = Tally()
    needed = [shards[shard].buffer_nbytes_for(blocks) for shard, blocks in of_shard.items()]
    plain, stored = (max(sizes, default=0) for sizes in zip(*needed, strict=True)) if needed else (0, 0)

    def buffers() -> Buffers:
        shard = shards[next(iter(of_shard))]
        return tally.entered(shard.buffers_of(plain, stored))

    def step(one: OrderedRead, mine: Buffers) -> None:
        shards[one.shard].take(one.read, mine, tally)
        on_block(one)

    allowed = [shards[shard].threads_for(blocks, threads) for shard, blocks in of_shard.items()]
    most = min(max(allowed, default=1), max(1, MAX_POOL_NBYTES // max(1, plain + stored)))
    in_threads(reads, most, buffers, step)
    return tally.stats()
