"""One rank's part in a read that several ranks share, round by round."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from ckptengine.adapters.restore import Match
from ckptengine.phases import Stopwatch
from ckptengine.read.exchange import Exchange
from ckptengine.read.plan import plan_reads
from ckptengine.read.reader import ShardReader
from ckptengine.read.tally import ReadStats
from ckptengine.read_once import Sharing
from ckptengine.step_shards import StepShards


def read_together(
    match: Match, shards: StepShards, threads: int, verify: bool, common: Sharing, watch: Stopwatch
) -> ReadStats | None:
    """Fill the target of a match, each block read by one of the ranks that need it; None, with nothing done,
    if each rank reads for itself.

    common: of a rank that has a cell. Whatever goes wrong here, the other ranks of the cell stop as well.
    """
    opened: dict[int, ShardReader] = {}
    with ExitStack() as held:

        def open_all() -> Mapping[int, ShardReader]:
            opened.update(shards.readers(match, verify, held))
            return opened

        with watch.measure("exchange"), common.telling():
            exchange = common.open(open_all, retain=not match.one_round)
        if exchange is None:
            return None
        try:
            stats = _deliver(match, opened, threads, exchange, watch)
            with watch.measure("exchange"):
                exchange.finish()
        except BaseException:
            exchange.abandon()
            raise
        finally:
            exchange.close()
        common.done(exchange)
        return stats


def _deliver(
    match: Match,
    readers: Mapping[int, ShardReader],
    threads: int,
    exchange: Exchange,
    watch: Stopwatch,
) -> ReadStats:
    stats = ReadStats()
    rounds = match.rounds()
    while True:
        with watch.measure("plan"):
            one = next(rounds, None)
            if one is None:
                return stats
            reads = {
                rank: plan_reads(readers[rank].header.blocks, wanted)
                for rank, wanted in one.destinations.items()
            }
        read = exchange.deliver(readers, reads, threads)
        watch.add_all(read.phases)
        stats += read
        with watch.measure("scatter"):
            one.finish()
