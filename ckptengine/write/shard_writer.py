"""Writes one rank's staged bytes as a shard file: blocks in parallel, the header last.

Digests are taken of the staged bytes, block by block, while they are in cache. The writer's memory beyond the
arena is per thread: none for a raw shard whose arena is in huge pages, else one buffer of up to 8 MiB; for a
compressed one, one of a block, of which a frame takes up only as much as it is long.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from ckptengine.codecs import block as codec
from ckptengine.errors import StorageError
from ckptengine.format.blocks import AS_IT_IS, BlockTable
from ckptengine.format.digest import digest, hexdigest
from ckptengine.format.limits import PAGE, round_up
from ckptengine.format.per_rank import OWN_DIGITS
from ckptengine.format.shard import HeaderTemplate, own_spans, seal_header, tensor_spans
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.storage.store import BlockWriter, Store
from ckptengine.tracing import recorder
from ckptengine.tracing.recorder import span
from ckptengine.tracing.tensors import TensorsOf
from ckptengine.write import raw_block
from ckptengine.write.groups import group
from ckptengine.write.methods import MEASURABLE_NBYTES, Chooser, History
from ckptengine.write.staged import Staged

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Compression:
    """How a compressed shard is to be compressed. `level` is zstd's; `auto` leaves blocks as they are where
    the device is faster than the codec, as `history` tells, which also learns from the shard."""

    level: int
    auto: bool
    history: History


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
    compression: Compression | None,
    threads: int,
    huge: bool = False,
    staged: Staged = lambda nbytes: None,
    on_progress: Progress = lambda nbytes: None,
    on_written: Callable[[], None] = lambda: None,
) -> WrittenShard:
    """Write and sync the shard at `path`, which must not exist; `data` is its whole data section, `huge` if
    that lies in huge pages. It may still be filled: `staged` waits for its bytes.

    `compression` None writes a raw shard. `on_progress` gets the staged bytes done so far, from any thread;
    `on_written` is called between the last write and the sync. On any error the file is removed as far as
    possible and the error raised: after a failed write or sync nothing about the file can be trusted, so it
    is never written again.
    """
    blocks = BlockTable(len(data), block_nbytes)
    writer = _create(store, path, template.nbytes + len(data), needed=compression is None)
    meter = _Meter()
    try:
        section = _Section(writer, template, data, blocks, huge, staged, meter, on_progress)
        own = _OwnDigests(template, data, staged)
        stored: list[int] | None = None
        methods: str | None = None
        if compression is None:
            digests = section.write_raw(threads, own.take)
        else:
            # What pays is found out by samples from all over.
            staged(None)
            chooser = Chooser(
                group(tensor_spans(template)),
                data,
                blocks,
                level=compression.level,
                auto=compression.auto,
                direct=writer.direct,
                threads=threads,
                history=compression.history,
            )
            digests, stored, methods = section.write_compressed(threads, compression, chooser, own.take)
        staged(None)
        if own.text is None:
            own.take()  # of a shard without blocks
        header = seal_header(template, digests, stored, methods, own.text)
        # No sync between data and header: a header that reaches the disk before its blocks is found out by
        # their digests, and nothing refers to this file before the sync below.
        with span("write header", "whole"):
            writer.pwrite(0, memoryview(header))
        on_written()
        with meter.writing(0):
            # A compressed shard has been given room for all of its blocks as they are.
            used = None if stored is None else template.nbytes + sum(round_up(n, PAGE) for n in stored)
            size = writer.finish(used)
    except BaseException:
        writer.abort()
        raise
    if compression is not None and methods is not None:
        packed = 2 * methods.count(AS_IT_IS) < len(methods)
        meter.teach(compression.history, threads, chooser.expected_s, direct=writer.direct, packed=packed)
    return WrittenShard(size, hexdigest(header))


def _create(store: Store, path: str, nbytes: int, *, needed: bool) -> BlockWriter:
    """The new file, with `nbytes` reserved: writes that extend a file wait for each other. A compressed shard
    may fit where these do not; what it leaves is given back at the end."""
    try:
        return store.create(path, nbytes=nbytes)
    except StorageError as error:
        if needed or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return store.create(path, nbytes=0)


class _OwnDigests:
    """The digests by which other ranks' tensors are told from this shard's own, if the header keeps them.

    Taken a second time, beside the blocks', by the thread that waits for those: the tensors that are parts of
    global ones have none, so that mostly little is left.
    """

    def __init__(self, template: HeaderTemplate, data: memoryview, staged: Staged) -> None:
        self.text: str | None = None
        self._template = template
        self._data = data
        self._staged = staged

    def take(self) -> None:
        if self._template.own_at is None:
            return
        parts = []
        for start, stop in own_spans(self._template):
            self._staged(stop)
            parts.append(hexdigest(self._data[start:stop])[:OWN_DIGITS])
        self.text = "".join(parts)


class _Meter:
    """Where the time of one shard goes: what the device does, and the threads in the codec."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_end = 0.0
        self._nbytes, self._seconds = 0, 0.0
        self._queued_nbytes, self._queued_s = 0, 0.0
        self._packing_s = 0.0

    @contextmanager
    def writing(self, nbytes: int) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                now = time.monotonic()
                # What is under way together is counted from the end of the one before.
                took = now - max(began, self._last_end)
                self._nbytes += nbytes
                self._seconds += took
                if began <= self._last_end:
                    self._queued_nbytes += nbytes
                    self._queued_s += took
                self._last_end = now

    @contextmanager
    def packing(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        with self._lock:
            self._packing_s += time.monotonic() - began

    def written(self, *, direct: bool) -> tuple[int, float]:
        """Bytes, and the seconds in which they were written.

        direct: only those that were ready when the write before them ended, if that is enough to tell. Of the
        others the device may have been done before their thread, which waits for the codec's, got a core.
        """
        with self._lock:
            if direct and self._queued_nbytes >= MEASURABLE_NBYTES:
                return self._queued_nbytes, self._queued_s
            return self._nbytes, self._seconds

    def teach(self, history: History, threads: int, expected_s: float, *, direct: bool, packed: bool) -> None:
        history.wrote(*self.written(direct=direct), compressed=packed)
        history.packed(expected_s, self._packing_s, threads)


class _Section:
    """The data section of one shard while it is written."""

    def __init__(
        self,
        writer: BlockWriter,
        template: HeaderTemplate,
        data: memoryview,
        blocks: BlockTable,
        huge: bool,
        staged: Staged,
        meter: _Meter,
        on_progress: Progress,
    ) -> None:
        self._writer = writer
        self._base = template.nbytes
        self._trace = recorder.current
        spans = () if self._trace is None else tensor_spans(template)
        self._tensors = TensorsOf((name, start, stop) for name, _, start, stop in spans)
        self._data = data
        self._blocks = blocks
        self._huge = huge
        self._staged = staged
        self._meter = meter
        self._on_progress = on_progress
        self._turn = threading.Condition()
        self._next_block = 0
        self._done_nbytes = 0
        self._failed = False
        # Compressed blocks take their place in order; raw ones know it.
        self._next_placed = 0
        self._next_offset = self._base

    def write_raw(self, threads: int, beside: Callable[[], None]) -> list[bytes]:
        digests = [b""] * self._blocks.count
        largest = raw_block.buffer_nbytes(min(self._blocks.block_nbytes, len(self._data)))

        def with_own_buffer() -> Callable[[int], None]:
            buffer = None if self._huge else AlignedBuffer(largest)

            def write(index: int) -> None:
                start, stop = self._blocks.span(index)
                self._staged(stop)
                block = self._data[start:stop]
                digests[index] = raw_block.write(self._writer, self._base + start, block, buffer)

            return write

        # Half as many again, so that `threads` writes are under way while others take their digests.
        threads += threads // 2
        self._run([with_own_buffer() for _ in range(min(threads, self._blocks.count))], beside=beside)
        return digests

    def write_compressed(
        self, threads: int, compression: Compression, chooser: Chooser, beside: Callable[[], None]
    ) -> tuple[list[bytes], list[int], str]:
        digests = [b""] * self._blocks.count
        stored = [0] * self._blocks.count
        methods = [AS_IT_IS] * self._blocks.count
        largest = round_up(min(self._blocks.block_nbytes, len(self._data)), PAGE)

        def with_own_buffer() -> Callable[[int], None]:
            pages = AlignedBuffer(largest)

            def write(index: int) -> None:
                start, stop = self._blocks.span(index)
                block = self._data[start:stop]
                method = chooser.method(index)
                packed = None
                if method != AS_IT_IS:
                    with span("digest", "cpu"):
                        digests[index] = digest(block)
                    with self._meter.packing(), span("compress", "cpu", {"bytes": len(block)}):
                        packed = codec.pack_into(pages.view, block, method, compression.level)
                if packed is None:
                    stored[index] = len(block)
                    offset = self._place(index, len(block))
                    with self._meter.writing(len(block)):
                        digests[index] = raw_block.write(
                            self._writer, offset, block, None if self._huge else pages
                        )
                else:
                    stored[index], methods[index] = packed, method
                    content = pages.view[: round_up(packed, PAGE)]
                    content[packed:] = bytes(len(content) - packed)
                    offset = self._place(index, len(content))
                    with self._meter.writing(len(content)):
                        self._writer.pwrite(offset, content)
                chooser.wrote(index, methods[index], *self._meter.written(direct=self._writer.direct))

            return write

        workers = [with_own_buffer() for _ in range(min(threads, self._blocks.count))]

        def prepare() -> None:
            chooser.prepare()
            beside()

        self._run(workers, beside=prepare, on_failure=chooser.stop)
        return digests, stored, "".join(methods)

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

    def _run(
        self,
        workers: list[Callable[[int], None]],
        *,
        beside: Callable[[], None] = lambda: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Share the blocks out among the workers, one thread each; `beside` is run by the calling thread."""
        if not workers:
            return

        def drain(write: Callable[[int], None]) -> None:
            try:
                while (index := self._take()) is not None:
                    began = recorder.clock()
                    write(index)
                    if self._trace is not None:
                        self._record(self._trace, index, began)
                    self._finished(index)
            except BaseException:
                fail()
                raise

        def fail() -> None:
            with self._turn:
                self._failed = True
                self._turn.notify_all()
            on_failure()

        with ThreadPoolExecutor(len(workers), thread_name_prefix="ckpt-write") as pool:
            try:
                # Also where a thread cannot be started: the others would wait for what `beside` finds out.
                futures = [pool.submit(drain, write) for write in workers]
                beside()
            except BaseException:
                fail()
                raise
            failures = [future.exception() for future in futures]
        for failure in failures:
            if failure is not None and not isinstance(failure, _Stopped):
                raise failure

    def _record(self, trace: recorder.Recorder, index: int, began: int) -> None:
        start, stop = self._blocks.span(index)
        args = {"block": index, "bytes": stop - start, **self._tensors(start, stop)}
        trace.add("block", "whole", began, recorder.clock(), args)
        trace.flush_if_due()

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
