from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.errors import StorageError
from ckptengine.format.digest import digest
from ckptengine.read import raw_block
from ckptengine.read.plan import Copy
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import ReadSource

SOURCES: tuple[ReadSource, ...] = ("cache", "direct", "buffered")
MIB = 1 << 20


class MemoryReader:
    """A file in memory that claims to come from anywhere, and notes what was read where."""

    def __init__(self, data: bytes, source: ReadSource) -> None:
        self._data = data
        self._source = source
        self.size = len(data)
        self.reads: list[tuple[int, int]] = []

    def source(self, offset: int, nbytes: int) -> ReadSource:
        return self._source

    def pread_into(self, offset: int, out: memoryview, source: ReadSource | None = None) -> ReadSource:
        assert source == self._source
        out[:] = self._data[offset : offset + len(out)]
        self.reads.append((offset, len(out)))
        return self._source

    def preadv_into(
        self, offset: int, outs: Sequence[memoryview], source: ReadSource | None = None
    ) -> ReadSource:
        for out in outs:
            self.pread_into(offset, out, source)
            offset += len(out)
        return self._source

    def close(self) -> None:
        pass

    def __enter__(self) -> MemoryReader:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@contextmanager
def small_steps() -> Iterator[None]:
    """As if caches held 8 bytes, so that a few hundred bytes show everything."""
    with mock.patch.multiple(raw_block, PIECE_NBYTES=8, READ_NBYTES=32, STRAIGHT_NBYTES=12, MAX_PIECES=3):
        yield


spans = st.lists(
    st.tuples(st.integers(0, 120), st.integers(1, 60)).map(lambda span: (span[0], min(sum(span), 120))),
    max_size=12,
).map(lambda found: sorted((start, stop) for start, stop in found if start < stop))


@given(
    spans=spans,
    offset=st.integers(0, 20),
    source=st.sampled_from(SOURCES),
    verify=st.booleans(),
    keep=st.booleans(),
)
def test_every_copy_is_made_and_the_digest_is_the_blocks(
    spans: list[tuple[int, int]], offset: int, source: ReadSource, verify: bool, keep: bool
) -> None:
    block = os.urandom(120)
    file = MemoryReader(bytes(offset) + block + b"after", source)
    spans = [] if keep else spans
    gap = 3
    memory = np.full(sum(stop - start + gap for start, stop in spans) + gap, 0xEE, np.uint8)
    expected = memory.copy()
    copies, at = [], gap
    for start, stop in spans:
        copies.append(Copy(start, stop - start, memory.ctypes.data + at))
        expected[at : at + stop - start] = np.frombuffer(block[start:stop], np.uint8)
        at += stop - start + gap
    with small_steps(), AlignedBuffer(120 if keep else raw_block.buffer_nbytes(120)) as buffer:
        found, came_from = raw_block.deliver(file, offset, 120, copies, buffer, verify=verify, keep=keep)
        assert not keep or bytes(buffer.view) == block
    assert found == (digest(block) if verify else None)
    assert came_from == source
    np.testing.assert_array_equal(memory, expected)
    # Every byte is read once.
    assert sorted(file.reads) == file.reads
    assert sum(nbytes for _, nbytes in file.reads) == 120


def test_what_the_page_cache_has_is_read_straight_to_where_it_belongs() -> None:
    block = os.urandom(100)
    file = MemoryReader(block, "cache")
    target = np.zeros(60, np.uint8)
    with small_steps(), AlignedBuffer(32) as buffer:
        buffer.view[:] = bytes(32)
        raw_block.deliver(file, 0, 60, [Copy(0, 60, target.ctypes.data)], buffer)
        assert bytes(buffer.view) == bytes(32)
    assert bytes(target) == block[:60]


@pytest.mark.parametrize("shift", [0, 64, 1])
@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_a_real_file_arrives_wherever_the_destination_lies(
    tmp_path: Path, shift: int, cold: bool, direct_io: str
) -> None:
    block = np.random.default_rng(0).integers(0, 256, 20 * MIB, np.uint8)
    path = tmp_path / "shard"
    path.write_bytes(bytes(4096) + block.tobytes())
    if cold:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    with AlignedBuffer(21 * MIB) as memory, AlignedBuffer(raw_block.buffer_nbytes(20 * MIB)) as buffer:
        cuts = [0, 10, 3 * MIB + 1, 3 * MIB + 500, 20 * MIB]
        copies = [Copy(a, b - a, memory.address + shift + a) for a, b in itertools.pairwise(cuts)]
        with PosixStore(direct_io).open(str(path)) as file:  # type: ignore[arg-type]
            found, _ = raw_block.deliver(file, 4096, 20 * MIB, copies, buffer)
        assert found == digest(block.data)
        np.testing.assert_array_equal(np.frombuffer(memory.view, np.uint8)[shift : shift + 20 * MIB], block)


@pytest.mark.parametrize("cold", [False, True])
def test_a_file_cut_short_while_it_is_read_is_an_error_at_that_place(tmp_path: Path, cold: bool) -> None:
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(3 * MIB))
    target = np.zeros(3 * MIB, np.uint8)
    with PosixStore().open(str(path)) as file, AlignedBuffer(3 * MIB) as buffer:
        os.truncate(path, 2 * MIB + 4096)
        if cold:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        with pytest.raises(StorageError, match=f"ends at byte {2 * MIB + 4096}"):
            raw_block.deliver(file, 0, 3 * MIB, [Copy(0, 3 * MIB, target.ctypes.data)], buffer)
