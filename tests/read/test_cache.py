from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptengine.errors import CorruptCheckpointError
from ckptengine.read.cache import BlockCache
from ckptengine.read.plan import BlockRead, Destination
from ckptengine.read.reader import Buffers, ShardReader
from ckptengine.storage.posix import PosixStore
from tests.helpers.checkpoints import RankContent, Tensor, flip, shard_bytes

PAGE = 4096


class Reads:
    """A shard of 8 blocks, and which of them were read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data = np.arange(8 * PAGE // 4, dtype=np.uint32)
        content, self.header = shard_bytes(RankContent([Tensor("w", self.data)]))
        self.file = folder / "shard"
        self.file.write_bytes(content)
        self.blocks: list[int] = []
        original = ShardReader.read

        def read(shard: ShardReader, read: BlockRead, buffers: Buffers, *, keep: bool = False) -> bool:
            self.blocks.append(read.block)
            return original(shard, read, buffers, keep=keep)

        monkeypatch.setattr(ShardReader, "read", read)

    def get(self, cache: BlockCache, *spans: tuple[int, int]) -> list[int]:
        """Reads spans of the data section; returns the blocks it took from the file."""
        self.blocks.clear()
        out = [np.zeros(stop - start, np.uint8) for start, stop in spans]
        where = [Destination(a, b, buffer.ctypes.data) for (a, b), buffer in zip(spans, out, strict=True)]
        cache.deliver(
            self.header, where, lambda: ShardReader(PosixStore(), str(self.file), self.header), threads=2
        )
        for (start, stop), buffer in zip(spans, out, strict=True):
            np.testing.assert_array_equal(buffer, self.data.view(np.uint8)[start:stop])
        return sorted(self.blocks)


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(tmp_path, monkeypatch)


def test_a_block_wanted_in_part_is_kept(reads: Reads) -> None:
    cache = BlockCache(4 * PAGE)
    assert reads.get(cache, (10, 20)) == [0]
    assert reads.get(cache, (30, 40), (PAGE, PAGE + 5)) == [1]
    assert reads.get(cache, (0, 2 * PAGE)) == []


def test_a_block_wanted_whole_is_not_kept(reads: Reads) -> None:
    cache = BlockCache(4 * PAGE)
    assert reads.get(cache, (PAGE, 2 * PAGE)) == [1]
    assert reads.get(cache, (PAGE, 2 * PAGE)) == [1]


def test_the_block_used_longest_ago_goes_first(reads: Reads) -> None:
    cache = BlockCache(2 * PAGE)
    reads.get(cache, (0, 1))
    reads.get(cache, (PAGE, PAGE + 1))
    assert reads.get(cache, (0, 1)) == []
    assert reads.get(cache, (2 * PAGE, 2 * PAGE + 1)) == [2]
    assert reads.get(cache, (0, 1)) == []
    assert reads.get(cache, (PAGE, PAGE + 1)) == [1]


def test_more_parts_than_can_be_kept_are_read_once_and_not_kept(reads: Reads) -> None:
    cache = BlockCache(2 * PAGE)
    spans = [(block * PAGE, block * PAGE + 1) for block in range(5)]
    assert reads.get(cache, *spans) == [0, 1, 2, 3, 4]
    assert reads.get(cache, spans[4]) == [4]


def test_one_block_is_kept_however_large(reads: Reads) -> None:
    cache = BlockCache(1)
    assert reads.get(cache, (0, 1)) == [0]
    assert reads.get(cache, (5, 6)) == []
    cache.clear()
    assert reads.get(cache, (5, 6)) == [0]


def test_a_damaged_block_is_neither_delivered_nor_kept(reads: Reads) -> None:
    cache = BlockCache(4 * PAGE)
    flip(reads.file, reads.header.header_nbytes)
    for _ in range(2):
        with pytest.raises(CorruptCheckpointError, match="block 0 is damaged"):
            reads.get(cache, (0, 1))
    flip(reads.file, reads.header.header_nbytes)
    assert reads.get(cache, (0, 1)) == [0]
