"""Which blocks are worth keeping while tensors are read one by one?"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from ckptengine.format.shard import ShardHeader
from ckptengine.read.plan import BlockRead, Destination, plan_reads
from ckptengine.read.reader import ShardReader, scatter
from ckptengine.storage.direct import Memory


class BlockCache:
    """Keeps the last checked blocks of which a part was wanted: the next small tensor is likely to lie in
    one.

    Without it, reading the thousand tensors of a block one by one would read and digest the block a thousand
    times. Blocks wanted whole are not kept. Holds up to `nbytes`, or one block where that is larger.
    Thread-safe.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._held = 0
        self._blocks: OrderedDict[tuple[int, int], Memory] = OrderedDict()
        self._lock = threading.Lock()

    def deliver(
        self,
        header: ShardHeader,
        destinations: Iterable[Destination],
        open_shard: Callable[[], ShardReader],
        threads: int,
    ) -> None:
        """As `read_shard`, but from the kept blocks where it can. The shard is only opened if it is
        needed."""
        whole: list[BlockRead] = []
        partial: list[BlockRead] = []
        for read in plan_reads(header.blocks, destinations):
            held = self._get(header.rank, read.block)
            if held is not None:
                scatter(read, held.address)
                continue
            start, stop = header.blocks.span(read.block)
            (whole if read.nbytes_wanted >= stop - start else partial).append(read)
        if not whole and not partial:
            return
        if len(partial) > 1 and len(partial) * header.block_nbytes > self._nbytes:
            # More than can be kept: read them all in parallel.
            whole, partial = sorted(whole + partial, key=lambda read: read.block), []
        with open_shard() as shard:
            for read in partial:
                held = shard.load_alone(read.block)
                scatter(read, held.address)
                self._put(header.rank, read.block, held)
            shard.deliver(whole, threads=threads)

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._held = 0

    def _get(self, rank: int, block: int) -> Memory | None:
        with self._lock:
            held = self._blocks.get((rank, block))
            if held is not None:
                self._blocks.move_to_end((rank, block))
            return held

    def _put(self, rank: int, block: int, data: Memory) -> None:
        with self._lock:
            old = self._blocks.pop((rank, block), None)
            self._held += data.view.nbytes - (old.view.nbytes if old is not None else 0)
            self._blocks[rank, block] = data
            while self._held > self._nbytes and len(self._blocks) > 1:
                self._held -= self._blocks.popitem(last=False)[1].view.nbytes
