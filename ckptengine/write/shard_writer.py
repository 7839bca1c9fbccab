"""Writes one rank's staged bytes as a shard file: blocks in parallel, the header last.

Digests are taken of the staged bytes, block by block, while they are in cache. The writer's memory beyond the
arena is one buffer per thread: of up to 8 MiB for raw shards, of a block (and its compressed form) else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptengine.codecs import zstd
from ckptengine.format.blocks import BlockTable
from ckptengine.format.digest import digest, hexdigest
from ckptengine.format.limits import PAGE
from ckptengine.format.shard import HeaderTemplate, seal_header
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.storage.store import BlockWriter, Store
from ckptengine.write import raw_block

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """A shard that is durable: its file size in bytes and its header's digest."""

    size: int
    header_digest: str


def write_shard(
    store: Store,
    path: str,
    *,
    template: HeaderTemplate,
    data: memoryview,
    block_nbytes: int,
    zstd_level: int | None,
    threads: int,
    on_progress: Progress = lambda nbytes: None,
    on_written: Callable[[], None] = lambda: None,
) -> WrittenShard:
    """Write and sync the shard at `path`, which must not exist; `data` is its whole data section.

    `zstd_level` None writes a raw shard. `on_progress` gets the staged bytes done so far, from any thread;
    `on_written` is called between the last write and the sync. On any error the file is removed as far as
    possible and the error raised: after a failed write or sync nothing about the file can be trusted, so it
    is never written again.
    """
    blocks = BlockTable(len(data), block_nbytes)
    # The final size of a compressed shard is not known, and blocks past the end would have to be given back.
    nbytes = template.nbytes + len(data) if zstd_level is None else 0
    writer = store.create(path, nbytes=nbytes)
    try:
        section = _Section(writer, template.nbytes, data, blocks, on_progress)
        digests, stored = (
            section.write_raw(threads) if zstd_level is None else section.write_zstd(threads, zstd_level)
        )
        header = seal_header(template, digests, stored)
        # No sync between data and header: a header that reaches the disk before its blocks is found out by
        # their digests, and nothing refers to this file before the sync below.
        writer.pwrite(0, memoryview(header))
        on_written()
        size = writer.finish()
    except BaseException:
        writer.abort()
        raise
    return WrittenShard(size, hexdigest(header))


class _Section:
    """The data section of one shard while it is written."""

    def __init__(
        self, writer: BlockWriter, base: int, data: memoryview, blocks: BlockTable, on_progress: Progress
    ) -> None:
        self._writer = writer
        self._base = base
        self._data = data
        self._blocks = blocks
        self._on_progress = on_progress
        self._turn = threading.Condition()
        self._next_block = 0
        self._done_nbytes = 0
        self._failed = False
        # Compressed blocks take their place in order; raw ones know it.
        self._next_placed = 0
        self._next_offset = base

    def write_raw(self, threads: int) -> tuple[list[bytes], None]:
        digests = [b""] * self._blocks.count
        largest = raw_block.buffer_nbytes(min(self._blocks.block_nbytes, len(self._data)))

        def with_own_buffer() -> Callable[[int], None]:
            buffer = AlignedBuffer(largest)

            def write(index: int) -> None:
                start, stop = self._blocks.span(index)
                block = self._data[start:stop]
                digests[index] = raw_block.write(self._writer, self._base + start, block, buffer)

            return write

        self._run([with_own_buffer() for _ in range(min(threads, self._blocks.count))])
        return digests, None

    def write_zstd(self, threads: int, level: int) -> tuple[list[bytes], list[int]]:
        digests = [b""] * self._blocks.count
        stored = [0] * self._blocks.count

        def with_own_buffer() -> Callable[[int], None]:
            buffer = AlignedBuffer(_rounded(min(self._blocks.block_nbytes, len(self._data))))

            def write(index: int) -> None:
                start, stop = self._blocks.span(index)
                block = self._data[start:stop]
                digests[index] = digest(block)
                packed = zstd.compress(block, level)
                content = memoryview(block if packed is None else packed)
                padded = _rounded(len(content))
                buffer.view[: len(content)] = content
                buffer.view[len(content) : padded] = bytes(padded - len(content))
                stored[index] = len(content)
                self._writer.pwrite(self._place(index, padded), buffer.view[:padded])

            return write

        self._run([with_own_buffer() for _ in range(min(threads, self._blocks.count))])
        return digests, stored

    def _place(self, index: int, nbytes: int) -> int:
        """The offset of block `index`, whose stored size is known now; waits for the blocks before it."""
        with self._turn:
            self._turn.wait_for(lambda: self._next_placed == index or self._failed)
            if self._failed:
                raise _Stopped
            offset = self._next_offset
            self._next_offset += nbytes
            self._next_placed += 1
            self._turn.notify_all()
            return offset

    def _run(self, workers: list[Callable[[int], None]]) -> None:
        if not workers:
            return

        def drain(write: Callable[[int], None]) -> None:
            try:
                while (index := self._take()) is not None:
                    write(index)
                    self._finished(index)
            except BaseException:
                with self._turn:
                    self._failed = True
                    self._turn.notify_all()
                raise

        with ThreadPoolExecutor(len(workers), thread_name_prefix="ckpt-write") as pool:
            failures = [future.exception() for future in [pool.submit(drain, write) for write in workers]]
        for failure in failures:
            if failure is not None and not isinstance(failure, _Stopped):
                raise failure

    def _take(self) -> int | None:
        with self._turn:
            if self._failed or self._next_block == self._blocks.count:
                return None
            self._next_block += 1
            return self._next_block - 1

    def _finished(self, index: int) -> None:
        start, stop = self._blocks.span(index)
        with self._turn:
            self._done_nbytes += stop - start
            self._on_progress(self._done_nbytes)


class _Stopped(Exception):
    """Another thread has failed; its error is the one to report."""


def _rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
