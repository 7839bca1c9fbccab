"""How are parts of several shards read at once, by one set of threads?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ckptengine.format.shard import ShardHeader
from ckptengine.phases import Phase
from ckptengine.read.ordered import OrderedRead, deliver
from ckptengine.read.plan import Destination, plan_reads
from ckptengine.read.reader import ShardReader
from ckptengine.read.tally import ReadStats
from ckptengine.storage.store import Store

OPEN_SHARDS = 64
"""So many are open at a time: one rank may need a few bytes of thousands."""


@dataclass(frozen=True, slots=True)
class ShardPart:
    """What is wanted of a shard. `header` must have passed `open_header`."""

    path: str
    header: ShardHeader
    destinations: Sequence[Destination]


def read_shards(
    store: Store, parts: Sequence[ShardPart], *, threads: int = 4, verify: bool = True
) -> ReadStats:
    """Delivers ranges of the shards' data sections into memory, as `read_shard` does those of one.

    Each path must be there once. No thread waits at the end of a shard for the others: the next shard's
    blocks are begun. An error in one shard ends the read of all.
    """
    stats = ReadStats()
    for first in range(0, len(parts), OPEN_SHARDS):
        some = dict(enumerate(parts[first : first + OPEN_SHARDS]))
        began = time.perf_counter()
        reads = [
            OrderedRead(number, read, ())
            for number, part in some.items()
            for read in plan_reads(part.header.blocks, part.destinations)
        ]
        planned = time.perf_counter() - began
        with ExitStack() as held:
            shards = {
                number: held.enter_context(ShardReader(store, part.path, part.header, verify=verify))
                for number, part in some.items()
            }
            stats += deliver(shards, reads, threads, lambda _: None)
        stats += ReadStats(phases={"plan": Phase(planned, 0, planned)})
    return stats
