"""How does one rank read its part of what several need, and get the rest from the others, both at once?

Reading threads take what this rank alone needs, and its turns: these blocks go into a slot of the channel,
where they are checked, copied to where they belong and published. A few more threads take what the others
publish and copy that, with the same copies as if it had been read. All go through the turns in the same
order, so the member whose turn is the earliest that is not done never waits: whatever each one's threads and
rounds are, all get on.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptengine.phases import Phase
from ckptengine.read.channel import Channel, StoppedHereError
from ckptengine.read.plan import BlockRead, Copy
from ckptengine.read.reader import MAX_POOL_NBYTES, Buffers, ShardReader, scatter
from ckptengine.read.sharing import Block, Schedule, Turn
from ckptengine.read.spent import Spent
from ckptengine.read.tally import ReadStats, Tally
from ckptengine.storage.direct import AlignedBuffer, Memory
from ckptengine.storage.threads import in_threads
from ckptengine.tracing import recorder

RECEIVERS = 2
"""Threads that copy what other ranks have read."""

POOL_NBYTES = MAX_POOL_NBYTES // 4
"""Of the reading threads' own buffers. The channel has its slots, and a restore in rounds a buffer of its
own."""

_NS = 1e-9


@dataclass(frozen=True, slots=True)
class _Job:
    block: Block
    read: BlockRead
    turn: Turn | None


class _Receiving:
    """One thread's nanoseconds of waiting for the others, and what it spent on copies."""

    def __init__(self) -> None:
        self.waited_ns = 0
        self.spent = Spent()


class _Reading(_Receiving):
    def __init__(self, buffers: Buffers) -> None:
        super().__init__()
        self.buffers = buffers


class Exchange:
    """One rank's part in a cell. `deliver` for each round of a restore, then `finish`; `abandon` instead
    where something failed, also elsewhere than in here.

    me: this rank's position in the cell. retain: there are several rounds, and the block in which two of them
    meet may be wanted twice.
    """

    def __init__(self, schedule: Schedule, me: int, channel: Channel, *, retain: bool) -> None:
        self._me = me
        self._channel = channel
        self._retain = retain
        self._todo: dict[Block, Turn] = {turn.block: turn for turn in schedule.of(me)}
        self._kept: tuple[Block, Memory] | None = None
        self._failures: list[BaseException] = []
        self.nbytes_received = 0
        self.nbytes_sent = 0

    def deliver(
        self, shards: Mapping[int, ShardReader], reads: Mapping[int, Sequence[BlockRead]], threads: int
    ) -> ReadStats:
        """Reads or receives the blocks, by the rank whose shard it is, and makes their copies.

        Of a block that is wanted once more after another round, what was kept is used, or it is read. Raises
        what `read_shard` raises, and what a channel's waits raise.
        """
        began = time.monotonic_ns()
        tally = Tally()
        reading: list[_Job] = []
        receiving: list[_Job] = []
        for shard in sorted(reads):
            for read in reads[shard]:
                block = (shard, read.block)
                turn = self._todo.get(block)
                if turn is not None:
                    del self._todo[block]
                elif self._kept is not None and self._kept[0] == block:
                    scatter(read, self._kept[1].address)
                    continue
                job = _Job(block, read, turn)
                (receiving if turn is not None and turn.reader != self._me else reading).append(job)
        kept = self._to_keep(shards, [*reading, *receiving])
        waits: list[_Receiving] = []

        def receive(job: _Job, mine: _Receiving) -> None:
            self._receive(job, shards[job.block[0]], mine, tally, kept)

        def enter() -> _Receiving:
            waits.append(_Receiving())
            return waits[-1]

        helper = threading.Thread(
            target=lambda: self._guarded(lambda: in_threads(receiving, RECEIVERS, enter, receive)),
            name="ckptengine-receive",
            daemon=True,
        )
        if receiving:
            helper.start()
        readers: list[_Reading] = []
        try:
            self._guarded(lambda: self._read_all(shards, reading, threads, tally, readers, kept))
        finally:
            if receiving:
                read_by = time.monotonic_ns()
                helper.join()
                tail_ns = time.monotonic_ns() - read_by
            else:
                tail_ns = 0
        if self._failures:
            raise self._failures[0]
        if kept is not None:
            self._kept = kept
        stats = tally.stats()
        received = sum(shards[job.block[0]].block_nbytes(job.block[1]) for job in receiving)
        self.nbytes_received += received
        slots_ns = sum(one.waited_ns for one in readers)
        spent_ns = sum(one.waited_ns + one.spent.scatter_ns for one in waits) + slots_ns
        exchange = Phase((tail_ns + slots_ns / max(1, len(readers))) * _NS, received, spent_ns * _NS)
        seconds = (time.monotonic_ns() - began) * _NS
        return replace(stats, seconds=seconds, phases={**stats.phases, "exchange": exchange})

    def finish(self) -> None:
        """After the last round: wait until the others have what this rank has read."""
        if self._todo:
            raise RuntimeError(f"{len(self._todo)} blocks were to be exchanged, and no round wanted them")
        self._channel.finish()

    def abandon(self) -> None:
        """Have the other ranks stop too. No thread is at work any more."""
        self._channel.stop()
        self._channel.give_up(list(self._todo.values()))

    def close(self) -> None:
        self._channel.close()

    def _to_keep(
        self, shards: Mapping[int, ShardReader], jobs: Sequence[_Job]
    ) -> tuple[Block, Memory] | None:
        """Room for the last block of those that go round: the next round may want the rest of it."""
        last = max((job.block for job in jobs if job.turn is not None), default=None)
        if not self._retain or last is None:
            return None
        return last, AlignedBuffer(shards[last[0]].block_nbytes(last[1]))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Note the first failure, and have all others stop."""
        try:
            work()
        except BaseException as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if not isinstance(error, StoppedHereError) or not self._failures:
            self._failures.append(error)
        self._channel.stop()

    def _read_all(
        self,
        shards: Mapping[int, ShardReader],
        jobs: Sequence[_Job],
        threads: int,
        tally: Tally,
        readers: list[_Reading],
        kept: tuple[Block, Memory] | None,
    ) -> None:
        if not jobs:
            return
        plain = stored = 0
        allowed = 1
        for shard in {job.block[0] for job in jobs}:
            blocks = [job.read.block for job in jobs if job.block[0] == shard]
            sizes = shards[shard].buffer_nbytes_for(blocks)
            plain, stored = max(plain, sizes[0]), max(stored, sizes[1])
            allowed = max(allowed, shards[shard].threads_for(blocks, threads))
        most = max(1, min(allowed, POOL_NBYTES // max(1, plain + stored)))
        any_shard = shards[jobs[0].block[0]]

        def enter() -> _Reading:
            readers.append(_Reading(tally.entered(any_shard.buffers_of(plain, stored))))
            return readers[-1]

        def step(job: _Job, mine: _Reading) -> None:
            try:
                shard = shards[job.block[0]]
                if job.turn is None:
                    shard.take(job.read, mine.buffers, tally)
                    return
                began = time.monotonic_ns()
                slot = self._channel.slot(job.turn)
                mine.waited_ns += time.monotonic_ns() - began
                nbytes = shard.block_nbytes(job.block[1])
                # Not read into the slot: devices are slow to fill the small pages that shared memory has, and
                # the copy is made while the piece is in the core's cache.
                into_slot = Copy(0, nbytes, slot.address)
                shard.take(BlockRead(job.read.block, (into_slot, *job.read.copies)), mine.buffers, tally)
                tally.correct(delivered=-nbytes)
                if kept is not None and kept[0] == job.block:
                    ctypes.memmove(kept[1].address, slot.address, nbytes)
                self._channel.publish(job.turn, nbytes)
                with tally.lock:
                    self.nbytes_sent += nbytes
            except BaseException as error:
                # Before another thread, which waits for the channel, can be the first to have failed.
                self._failed(error)
                raise

        in_threads(jobs, most, enter, step)

    def _receive(
        self,
        job: _Job,
        shard: ShardReader,
        mine: _Receiving,
        tally: Tally,
        kept: tuple[Block, Memory] | None,
    ) -> None:
        assert job.turn is not None
        trace = recorder.current
        nbytes = shard.block_nbytes(job.block[1])
        asked = time.monotonic_ns()
        try:
            address = self._channel.receive(job.turn, nbytes)
            there = time.monotonic_ns()
            mine.waited_ns += there - asked
            scatter(job.read, address, mine.spent)
            if kept is not None and kept[0] == job.block:
                ctypes.memmove(kept[1].address, address, nbytes)
            self._channel.release(job.turn)
        except BaseException as error:
            self._failed(error)
            raise
        tally.count(read=0, cached=0, delivered=job.read.nbytes_wanted, decompressed=0, verified=0)
        if trace is not None:
            args = {"shard": job.block[0], "block": job.block[1], "bytes": nbytes}
            trace.add("wait for a rank's block", "wait", asked, there, args)
            trace.add("copy", "cpu", there, time.monotonic_ns(), args)
            trace.flush_if_due()
