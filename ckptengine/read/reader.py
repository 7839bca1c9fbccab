"""How are a shard's bytes read, checked and delivered, as fast as the storage gives them?

Each of a few threads takes the next block of the plan and reads, digests and delivers it. A raw block is
delivered while it is read (`read.raw_block`), a compressed one when it has passed its check. So a read that
ends well has checked every byte it delivered; one that fails may have delivered some of a damaged block, and
leaves that where it went.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from ckptengine.codecs import block as codec
from ckptengine.errors import CheckpointError, CorruptCheckpointError, StorageError
from ckptengine.format.blocks import stored_offsets
from ckptengine.format.digest import digest
from ckptengine.format.limits import PAGE, round_up
from ckptengine.format.shard import ShardHeader
from ckptengine.phases import Phase
from ckptengine.read import raw_block
from ckptengine.read.damage import Damage, touched
from ckptengine.read.plan import BlockRead, Destination, plan_reads
from ckptengine.read.spent import Spent
from ckptengine.read.tally import ReadStats as ReadStats
from ckptengine.read.tally import Tally
from ckptengine.storage.direct import AlignedBuffer, Memory
from ckptengine.storage.memcopy import move
from ckptengine.storage.store import BlockReader, ReadSource, Store
from ckptengine.storage.threads import in_threads
from ckptengine.tracing import recorder
from ckptengine.tracing.tensors import TensorsOf

MAX_POOL_NBYTES = 256 << 20
"""All buffers of one read together; with larger blocks fewer threads read, but always one."""

RESIDENCY_SAMPLES = 8
"""Of so many blocks a read asks whether they are in the page cache, before it decides on its threads."""

Progress = Callable[[int], None]
"""Called after each block with the bytes read from the file for it, never by two threads at once."""


def read_shard(
    store: Store,
    path: str,
    header: ShardHeader,
    destinations: Iterable[Destination],
    *,
    threads: int = 4,
    progress: Progress | None = None,
    verify: bool = True,
) -> ReadStats:
    """Delivers ranges of a shard's data section into memory.

    `header` must have passed `open_header`. The destinations' memory must stay valid and writable until this
    returns. Raises CorruptCheckpointError at the first damaged block (path, rank, offset in the file, tensors
    it holds) and StorageError where the file system fails; the other threads stop after the block they are
    at, and the destinations may hold any bytes. verify: False does not check the blocks' digests.
    """
    began = time.perf_counter()
    reads = plan_reads(header.blocks, destinations)
    planned = time.perf_counter() - began
    with ShardReader(store, path, header, verify=verify) as shard:
        stats = shard.deliver(reads, threads=threads, progress=progress)
    return replace(stats, phases={**stats.phases, "plan": Phase(planned, 0, planned)})


def find_damage(
    store: Store, path: str, header: ShardHeader, *, threads: int = 4, progress: Progress | None = None
) -> list[Damage]:
    """Every damaged block of a shard, in order; a block that cannot be read counts as damaged.

    Raises StorageError where this process, not the file, is why it cannot be read.
    """
    found: list[Damage] = []
    with ShardReader(store, path, header) as shard:

        def check(block: int, buffers: Buffers) -> None:
            try:
                shard.read(BlockRead(block, ()), buffers)
            except BlockDamagedError as error:
                found.append(error.damage)
            except StorageError as error:
                if error.is_local:
                    raise
                found.append(shard.damage(block, f"it cannot be read: {error.message}"))
            if progress is not None:
                with lock:
                    progress(round_up(shard.extent(block)[1], PAGE))

        lock = threading.Lock()
        blocks = range(header.blocks.count)
        in_threads(blocks, shard.threads_for(blocks, threads), lambda: shard.buffers_for(blocks), check)
    return sorted(found, key=lambda damage: damage.block or 0)


class BlockDamagedError(Exception):
    """A block failed its check; `find_damage` notes it, `deliver` turns it into a CorruptCheckpointError."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(damage.reason)
        self.damage = damage


class Buffers:
    """One thread's memory: for a piece of a raw block, or for a whole block and its compressed form; and what
    the thread's time was spent on."""

    def __init__(self, nbytes: int, stored_nbytes: int) -> None:
        self.plain: Memory = AlignedBuffer(nbytes)
        self.stored = AlignedBuffer(stored_nbytes) if stored_nbytes else None
        self.spent = Spent()


class ShardReader:
    """An open shard whose blocks are read and checked. Thread-safe, as long as each thread brings its own
    buffers."""

    def __init__(self, store: Store, path: str, header: ShardHeader, *, verify: bool = True) -> None:
        self.path = path
        self._verify = verify
        self.header = header
        self._blocks = header.blocks
        self._stored = header.stored_nbytes
        self._offsets = stored_offsets(header.stored_nbytes) if header.stored_nbytes is not None else None
        try:
            self._file: BlockReader = store.open(path)
        except FileNotFoundError:
            raise Damage(path, "the shard file is missing", rank=header.rank).error() from None
        except CheckpointError as error:
            self._set_rank(error)
            raise

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def block_nbytes(self, block: int) -> int:
        """How long a block is, as it is delivered."""
        start, stop = self._blocks.span(block)
        return stop - start

    def extent(self, block: int) -> tuple[int, int]:
        """Where a block lies in the file: its offset and stored length, without the padding after it."""
        start, stop = self._blocks.span(block)
        if self._offsets is None or self._stored is None:
            return self.header.header_nbytes + start, stop - start
        return self.header.header_nbytes + self._offsets[block], self._stored[block]

    def buffers_for(self, blocks: Sequence[int], *, keep: bool = False) -> Buffers:
        """Buffers that fit each of the blocks; with `keep`, whole."""
        return self.buffers_of(*self.buffer_nbytes_for(blocks, keep))

    def buffers_of(self, plain: int, stored: int) -> Buffers:
        """Buffers of sizes that are this shard's, or of several like it."""
        try:
            return Buffers(plain, stored)
        except (MemoryError, OverflowError, OSError):
            if plain + stored <= MAX_POOL_NBYTES:
                raise StorageError(
                    f"there is no memory for {plain + stored} bytes of buffers",
                    errno=errno.ENOMEM,
                    path=self.path,
                    rank=self.header.rank,
                ) from None
            # A compressed shard's header may claim any block size, and a small file may seem to keep the
            # promise.
            raise CorruptCheckpointError(
                f"the shard has blocks of {plain} bytes, for which there is no memory",
                path=self.path,
                rank=self.header.rank,
            ) from None

    def threads_for(self, blocks: Sequence[int], threads: int) -> int:
        """How many threads the blocks and the bound on memory allow, up to `threads`.

        Of raw blocks up to twice as many, since a thread is at digest and copy half of the time when CPUs are
        scarce; but where the page cache has them, never more than there are CPUs: each keeps one busy, and
        more would push each other's pieces out of its cache.
        """
        plain, stored = self.buffer_nbytes_for(blocks)
        each = plain + stored
        if not stored and threads > 1:
            threads = min(threads, len(os.sched_getaffinity(0))) if self.are_cached(blocks) else 2 * threads
        return max(1, min(threads, MAX_POOL_NBYTES // max(1, each)))

    def are_cached(self, blocks: Sequence[int]) -> bool:
        """Whether the page cache seems to have all of the blocks: a few are asked about."""
        some = (*blocks[:: max(1, len(blocks) // RESIDENCY_SAMPLES)], *blocks[-1:])
        try:
            return all(self._file.source(*self.extent(block)) == "cache" for block in some)
        except StorageError:  # told of when the block is read
            return False

    def buffer_nbytes_for(self, blocks: Sequence[int], keep: bool = False) -> tuple[int, int]:
        """Of a thread's buffers: for bytes as they are delivered, and as they are stored if compressed."""
        plain = stored = 0
        for block in blocks:
            start, stop = self._blocks.span(block)
            length = self.extent(block)[1]
            if length == stop - start and not keep:
                plain = max(plain, raw_block.buffer_nbytes(length))
            else:
                plain = max(plain, stop - start)
            if length != stop - start:
                stored = max(stored, round_up(length, PAGE))
        return plain, stored

    def read(self, read: BlockRead, buffers: Buffers, *, keep: bool = False) -> bool:
        """Reads one block, makes its copies and checks it. Returns whether the page cache had it. With `keep`
        it makes no copies, and the whole block is in the buffer afterwards.

        Raises BlockDamagedError, or StorageError; of a raw block, parts may have been delivered then.
        """
        block = read.block
        start, stop = self._blocks.span(block)
        offset, length = self.extent(block)
        if offset + round_up(length, PAGE) > self._file.size:
            raise BlockDamagedError(
                self.damage(block, f"the file ends at byte {self._file.size}, before the block does")
            )
        try:
            if length == stop - start:
                found, source = raw_block.deliver(
                    self._file,
                    offset,
                    length,
                    read.copies,
                    buffers.plain,
                    verify=self._verify,
                    keep=keep,
                    spent=buffers.spent,
                )
                self._check(block, found)
            else:
                plain, source = self._decompress(block, buffers)
                began = time.monotonic_ns()
                found = digest(plain) if self._verify else None
                digested = time.monotonic_ns()
                self._check(block, found)
                scatter(read, buffers.plain.address, buffers.spent)
                ended = time.monotonic_ns()
                buffers.spent.verify_ns += digested - began
                if (trace := recorder.current) is not None:
                    trace.add("digest", "cpu", began, digested, {"bytes": len(plain)})
                    trace.add("copy", "cpu", digested, ended, {"bytes": read.nbytes_wanted})
        except CheckpointError as error:
            self._set_rank(error)
            raise
        return source == "cache"

    def _decompress(self, block: int, buffers: Buffers) -> tuple[memoryview, ReadSource]:
        start, stop = self._blocks.span(block)
        offset, length = self.extent(block)
        plain = buffers.plain.view[: stop - start]
        assert buffers.stored is not None
        stored = buffers.stored.view[: round_up(length, PAGE)]
        began = time.monotonic_ns()
        source = self._file.pread_into(offset, stored)
        at_hand = time.monotonic_ns()
        buffers.spent.read_ns += at_hand - began
        if bytes(stored[length:]).strip(b"\0"):
            raise BlockDamagedError(self.damage(block, "the padding after it is not zero"))
        try:
            assert self.header.methods is not None
            codec.unpack_into(stored[:length], self.header.methods[block], plain)
        except ValueError as error:
            raise BlockDamagedError(self.damage(block, f"it does not decompress: {error}")) from None
        unpacked = time.monotonic_ns()
        buffers.spent.decompress_ns += unpacked - at_hand
        if (trace := recorder.current) is not None:
            trace.add("decompress", "cpu", at_hand, unpacked, {"bytes": len(plain)})
        return plain, source

    def _check(self, block: int, found: bytes | None) -> None:
        if found is not None and found != self.header.block_digest(block):
            raise BlockDamagedError(self.damage(block, "its digest differs from the header's"))

    def load_alone(self, block: int) -> Memory:
        """One block, checked, in a buffer for the caller to keep. Raises what `deliver` raises."""
        buffers = self.buffers_for([block], keep=True)
        try:
            self.read(BlockRead(block, ()), buffers, keep=True)
        except BlockDamagedError as error:
            raise error.damage.error() from None
        return buffers.plain

    def deliver(
        self, reads: Sequence[BlockRead], *, threads: int, progress: Progress | None = None
    ) -> ReadStats:
        """Reads and checks the blocks and makes their copies; see `read_shard`."""
        blocks = [read.block for read in reads]
        tally = Tally()

        def step(read: BlockRead, buffers: Buffers) -> None:
            nbytes = self.take(read, buffers, tally)
            if progress is not None:
                with tally.lock:
                    progress(nbytes)

        in_threads(
            reads, self.threads_for(blocks, threads), lambda: tally.entered(self.buffers_for(blocks)), step
        )
        return tally.stats()

    def take(self, read: BlockRead, buffers: Buffers, tally: Tally) -> int:
        """Reads one block, makes its copies, checks it and counts all of it in. Returns the bytes read from
        the file. Raises what `read_shard` raises."""
        trace = recorder.current
        started = recorder.clock()
        try:
            cached = self.read(read, buffers)
        except BlockDamagedError as error:
            raise error.damage.error() from None
        start, stop = self._blocks.span(read.block)
        stored = self.extent(read.block)[1]
        if trace is not None:
            args = {"shard": self.header.rank, "block": read.block, "bytes": stored}
            args |= self._tensors(start, stop)
            trace.add("block", "whole", started, recorder.clock(), args)
            trace.flush_if_due()
        nbytes = round_up(stored, PAGE)
        tally.count(
            read=nbytes,
            cached=nbytes if cached else 0,
            delivered=read.nbytes_wanted,
            decompressed=stop - start if stored != stop - start else 0,
            verified=stop - start if self._verify else 0,
        )
        return nbytes

    @cached_property
    def _tensors(self) -> TensorsOf:
        return TensorsOf((entry.name, entry.start, entry.stop) for entry in self.header.tensors)

    def damage(self, block: int, reason: str) -> Damage:
        start, stop = self._blocks.span(block)
        offset, length = self.extent(block)
        tensors = touched(self.header, start, stop)
        return Damage(self.path, reason, self.header.rank, offset, length, block, tensors)

    def _set_rank(self, error: CheckpointError) -> None:
        if error.rank is None:
            error.rank = self.header.rank


def scatter(read: BlockRead, address: int, spent: Spent | None = None) -> None:
    """Makes a block's copies, from the block's bytes at `address`; spent: the calling thread's."""
    began = time.monotonic_ns()
    for at, nbytes, to in read.copies:
        move(to, address + at, nbytes)
    if spent is None:
        return
    spent.scatter_ns += time.monotonic_ns() - began
    spent.scattered_nbytes += read.nbytes_wanted
