from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptengine.errors import CorruptCheckpointError, StorageError
from ckptengine.format.shard import ShardHeader
from ckptengine.read import reader
from ckptengine.read.plan import Destination
from ckptengine.read.reader import ReadStats, find_damage, read_shard
from ckptengine.storage.passing import PassingReader
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import BlockReader, ReadSource
from tests.helpers.checkpoints import RankContent, Tensor, flip, shard_bytes

PAGE = 4096
CODECS = ("raw", "zstd")


class Shard:
    """A shard file of 20 blocks: "a" over blocks 0 to 9, "b" to 14, small ones, random bytes that no codec
    shrinks."""

    def __init__(self, folder: Path, codec: str) -> None:
        random = np.random.default_rng(1)
        self.arrays = {
            "a": np.arange(10 * PAGE // 4, dtype=np.int32),
            "b": np.arange(5 * PAGE // 8, dtype=np.float64),
            **{f"small.{i}": np.full(100, i, dtype=np.uint8) for i in range(80)},
            "noise": random.integers(0, 256, 3 * PAGE, dtype=np.uint8),
        }
        content = RankContent(tensors=[Tensor(name, array) for name, array in self.arrays.items()])
        data, self.header = shard_bytes(content, codec=codec, block_nbytes=PAGE, rank=3, ranks=4)
        self.file = folder / "shard-00003"
        self.file.write_bytes(data)
        self.path = os.fspath(self.file)
        self.store = PosixStore()

    def targets(self, names: list[str]) -> tuple[dict[str, np.ndarray], list[Destination]]:
        entries = {entry.name: entry for entry in self.header.tensors}
        made = {name: np.zeros_like(self.arrays[name]) for name in names}
        where = [Destination(entries[n].start, entries[n].stop, made[n].ctypes.data) for n in names]
        return made, where

    def block_of(self, name: str) -> int:
        return next(e.start for e in self.header.tensors if e.name == name) // PAGE

    def offset(self, block: int) -> int:
        with reader.ShardReader(self.store, self.path, self.header) as shard:
            return shard.extent(block)[0]


@pytest.fixture(params=CODECS)
def shard(request: pytest.FixtureRequest, tmp_path: Path) -> Shard:
    return Shard(tmp_path, request.param)


@pytest.mark.parametrize("threads", [1, 4])
def test_every_tensor_arrives(shard: Shard, threads: int) -> None:
    made, where = shard.targets(list(shard.arrays))
    seen: list[int] = []
    stats = read_shard(shard.store, shard.path, shard.header, where, threads=threads, progress=seen.append)
    for name, array in shard.arrays.items():
        np.testing.assert_array_equal(made[name], array)
    assert stats.blocks == shard.header.blocks.count == len(seen)
    assert stats.nbytes_delivered == sum(array.nbytes for array in shard.arrays.values())
    assert stats.nbytes_read == sum(seen) == shard.file.stat().st_size - shard.header.header_nbytes


def test_blocks_that_nobody_wants_are_not_read(shard: Shard) -> None:
    made, where = shard.targets(["b"])
    stats = read_shard(shard.store, shard.path, shard.header, where)
    np.testing.assert_array_equal(made["b"], shard.arrays["b"])
    assert stats.blocks == 5
    # Damage elsewhere is no reason to refuse.
    flip(shard.file, shard.offset(0))
    read_shard(shard.store, shard.path, shard.header, where)


def test_no_destinations_read_nothing(shard: Shard) -> None:
    stats = read_shard(shard.store, shard.path, shard.header, [])
    assert replace(stats, seconds=0.0) == ReadStats()


def test_a_damaged_block_is_named_with_its_tensors(shard: Shard) -> None:
    block = shard.block_of("small.0")
    flip(shard.file, shard.offset(block) + 5)
    _, where = shard.targets(list(shard.arrays))
    with pytest.raises(CorruptCheckpointError) as caught:
        read_shard(shard.store, shard.path, shard.header, where)
    error = caught.value
    assert (error.path, error.rank, error.offset) == (shard.path, 3, shard.offset(block))
    assert f"block {block}" in str(error)
    assert "small.0, small.1, small.2, small.3 and 37 more" in str(error)


def test_damage_delivers_nothing_of_a_compressed_block(tmp_path: Path) -> None:
    shard = Shard(tmp_path, "zstd")
    flip(shard.file, shard.offset(shard.block_of("small.0")))
    made, where = shard.targets(["small.0"])
    with pytest.raises(CorruptCheckpointError, match=r"small\.0"):
        read_shard(shard.store, shard.path, shard.header, where)
    assert not made["small.0"].any()


def test_all_damage_is_found_in_order(shard: Shard) -> None:
    for block in (14, 2, 9):
        flip(shard.file, shard.offset(block))
    found = find_damage(shard.store, shard.path, shard.header)
    assert [damage.block for damage in found] == [2, 9, 14]
    assert [damage.tensors for damage in found] == [("a",), ("a",), ("b",)]
    assert [damage.offset for damage in found] == [shard.offset(block) for block in (2, 9, 14)]
    assert all(damage.rank == 3 and damage.file == shard.path and damage.nbytes for damage in found)


def test_a_sound_shard_has_no_damage(shard: Shard) -> None:
    seen: list[int] = []
    assert find_damage(shard.store, shard.path, shard.header, progress=seen.append) == []
    assert sum(seen) == shard.file.stat().st_size - shard.header.header_nbytes


def test_padding_after_a_compressed_block_must_be_zero(tmp_path: Path) -> None:
    shard = Shard(tmp_path, "zstd")
    assert shard.header.stored_nbytes is not None
    assert shard.header.stored_nbytes[0] < PAGE
    flip(shard.file, shard.offset(1) - 1)
    (damage,) = find_damage(shard.store, shard.path, shard.header)
    assert (damage.block, damage.reason) == (0, "the padding after it is not zero")


def test_a_block_that_does_not_shrink_is_stored_as_it_is(tmp_path: Path) -> None:
    shard = Shard(tmp_path, "zstd")
    assert shard.header.stored_nbytes is not None
    assert PAGE in shard.header.stored_nbytes
    assert min(shard.header.stored_nbytes) < PAGE


def test_a_truncated_file_names_the_blocks_it_lost(shard: Shard) -> None:
    keep = shard.offset(15) + 100
    os.truncate(shard.path, keep)
    found = find_damage(shard.store, shard.path, shard.header)
    assert [damage.block for damage in found] == list(range(15, shard.header.blocks.count))
    assert all(f"ends at byte {keep}" in damage.reason for damage in found)
    _, where = shard.targets(["noise"])
    with pytest.raises(CorruptCheckpointError, match=r"block 1[6-9] is damaged: the file ends"):
        read_shard(shard.store, shard.path, shard.header, where)


def test_a_missing_file_is_named(shard: Shard) -> None:
    shard.file.unlink()
    with pytest.raises(CorruptCheckpointError, match="missing") as caught:
        read_shard(shard.store, shard.path, shard.header, [])
    assert (caught.value.path, caught.value.rank) == (shard.path, 3)


class _FailingStore(PosixStore):
    """Fails every read from the `after`-th on, and counts them."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after
        self.reads = 0
        self.lock = threading.Lock()

    def open(self, path: str) -> BlockReader:
        return _FailingReader(super().open(path), self)


class _FailingReader(PassingReader):
    def __init__(self, inner: BlockReader, store: _FailingStore) -> None:
        super().__init__(inner)
        self._store = store

    def pread_into(self, offset: int, out: memoryview, source: ReadSource | None = None) -> ReadSource:
        with self._store.lock:
            self._store.reads += 1
            failing = self._store.reads > self._store.after
        if failing:
            raise StorageError("could not read: Input/output error", errno=5, path="shard")
        return super().pread_into(offset, out, source)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_storage_failure_stops_all_threads_and_keeps_its_errno(shard: Shard, threads: int) -> None:
    store = _FailingStore(after=4)
    _, where = shard.targets(list(shard.arrays))
    before = threading.active_count()
    with pytest.raises(StorageError, match="Input/output") as caught:
        read_shard(store, shard.path, shard.header, where, threads=threads)
    assert (caught.value.errno, caught.value.rank) == (5, 3)
    assert store.reads <= 4 + 2 * threads
    assert threading.active_count() <= before


def test_an_unreadable_block_is_damage_and_the_others_are_still_checked(shard: Shard) -> None:
    store = _FailingStore(after=shard.header.blocks.count - 2)
    found = find_damage(store, shard.path, shard.header, threads=1)
    assert len(found) == 2
    assert all("cannot be read" in damage.reason for damage in found)


def test_buffers_are_bounded_whatever_is_asked(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = reader.Buffers

    def counted(nbytes: int, stored_nbytes: int) -> reader.Buffers:
        made.append(nbytes + stored_nbytes)
        return original(nbytes, stored_nbytes)

    monkeypatch.setattr(reader, "Buffers", counted)
    monkeypatch.setattr(reader, "MAX_POOL_NBYTES", 4 * PAGE)
    _, where = shard.targets(list(shard.arrays))
    read_shard(shard.store, shard.path, shard.header, where, threads=64)
    assert sum(made) <= 4 * PAGE


class _PlacedStore(PosixStore):
    """Says of all blocks from the `cold_from`th byte on that the page cache does not have them."""

    def __init__(self, cold_from: int) -> None:
        super().__init__()
        self.cold_from = cold_from

    def open(self, path: str) -> BlockReader:
        return _PlacedReader(super().open(path), self.cold_from)


class _PlacedReader(PassingReader):
    def __init__(self, inner: BlockReader, cold_from: int) -> None:
        super().__init__(inner)
        self.cold_from = cold_from

    def source(self, offset: int, nbytes: int) -> ReadSource:
        return "cache" if offset < self.cold_from else "direct"


@pytest.mark.parametrize(
    ("cold_from", "raw", "compressed"),
    [(0, 6, 3), (15 * PAGE, 6, 3), (1 << 40, 2, 3)],
    ids=["disk", "begins in the cache", "cache"],
)
def test_raw_blocks_get_threads_by_where_they_are(
    shard: Shard, cold_from: int, raw: int, compressed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with reader.ShardReader(_PlacedStore(cold_from), shard.path, shard.header) as opened:
        blocks = range(shard.header.blocks.count)
        assert opened.threads_for(blocks, 3) == (raw if shard.header.stored_nbytes is None else compressed)
        assert opened.threads_for(blocks, 1) == 1


def test_a_failing_progress_callback_is_raised(shard: Shard) -> None:
    def refuse(nbytes: int) -> None:
        raise RuntimeError("no terminal")

    _, where = shard.targets(["a"])
    with pytest.raises(RuntimeError, match="no terminal"):
        read_shard(shard.store, shard.path, shard.header, where, progress=refuse)


def test_a_block_too_large_for_memory_is_a_named_error(tmp_path: Path) -> None:
    shard = Shard(tmp_path, "zstd")
    huge = 1 << 60
    header: ShardHeader = replace(
        shard.header, block_nbytes=huge, data_nbytes=huge, stored_nbytes=(100,), digests=bytes(16)
    )
    buffer = ctypes.create_string_buffer(8)
    with pytest.raises(CorruptCheckpointError, match="no memory"):
        read_shard(shard.store, shard.path, header, [Destination(0, 8, ctypes.addressof(buffer))])


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() <= before
