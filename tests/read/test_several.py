"""Are parts of several shards read side by side, and does what is wrong with one of them stop all?"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptengine.errors import CorruptCheckpointError
from ckptengine.read import several
from ckptengine.read.plan import Destination
from ckptengine.read.several import ShardPart, read_shards
from ckptengine.storage.posix import PosixStore
from tests.helpers.checkpoints import RankContent, Tensor, flip, shard_bytes

PAGE = 4096
BLOCKS = 3
SHARDS = 5
WAIT_S = 30.0


class Shards:
    """Five, of three blocks each, of which the middle of each is wanted: half a block, one, and a half."""

    def __init__(self, folder: Path, codec: str) -> None:
        random = np.random.default_rng(3)
        self.parts: list[ShardPart] = []
        self.files: list[Path] = []
        self.wanted: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        for rank in range(SHARDS):
            array = random.integers(0, 256, PAGE * BLOCKS, dtype=np.uint8)
            content = RankContent(tensors=[Tensor("w", array)])
            data, header = shard_bytes(content, codec=codec, block_nbytes=PAGE, rank=rank, ranks=SHARDS)
            file = folder / f"shard-{rank}"
            file.write_bytes(data)
            start, stop = header.tensors[0].start + PAGE // 2, header.tensors[0].stop - PAGE // 2
            target = np.zeros(stop - start, np.uint8)
            self.files.append(file)
            self.wanted.append(array[PAGE // 2 : -PAGE // 2])
            self.targets.append(target)
            where = [Destination(start, stop, target.ctypes.data)]
            self.parts.append(ShardPart(os.fspath(file), header, where))

    def are_there(self) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self.targets, self.wanted, strict=True))


@pytest.fixture(params=["raw", "zstd"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Shards:
    return Shards(tmp_path, request.param)


@pytest.mark.parametrize("threads", [1, 4])
def test_each_shard_gives_what_is_wanted_of_it(shards: Shards, threads: int) -> None:
    stats = read_shards(PosixStore(), shards.parts, threads=threads)
    assert shards.are_there()
    assert stats.blocks == SHARDS * BLOCKS
    assert stats.nbytes_delivered == sum(target.nbytes for target in shards.targets)
    assert {"plan", "read", "verify"} <= stats.phases.keys()


def test_only_some_of_many_shards_are_open_at_a_time(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "OPEN_SHARDS", 2)
    open_now, most = 0, 0

    class Counted(several.ShardReader):
        def __init__(self, *args: Any, **options: Any) -> None:
            nonlocal open_now, most
            super().__init__(*args, **options)
            open_now += 1
            most = max(most, open_now)

        def close(self) -> None:
            nonlocal open_now
            open_now -= 1
            super().close()

    monkeypatch.setattr(several, "ShardReader", Counted)
    read_shards(PosixStore(), shards.parts, threads=3)
    assert shards.are_there()
    assert (most, open_now) == (2, 0)


def test_the_next_shard_is_begun_before_the_one_before_it_is_done(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    read = several.ShardReader.read

    def slow(self: Any, block: Any, buffers: Any, **options: Any) -> bool:
        if self.header.rank == 1:
            begun.set()
        if self.header.rank == 0 and block.block == BLOCKS - 1:
            assert begun.wait(WAIT_S)
        return read(self, block, buffers, **options)

    monkeypatch.setattr(several.ShardReader, "read", slow)
    monkeypatch.setattr(several.ShardReader, "threads_for", lambda self, blocks, threads: threads)
    read_shards(PosixStore(), shards.parts, threads=2)
    assert shards.are_there()


@pytest.mark.parametrize("damaged", range(SHARDS))
@pytest.mark.parametrize("threads", [1, 4])
def test_damage_in_any_of_them_stops_all_and_names_it(
    shards: Shards, damaged: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = shards.parts[damaged]
    flip(shards.files[damaged], part.header.header_nbytes + 3)
    began: list[int] = []
    take = several.ShardReader.take

    def noted(self: Any, *args: Any) -> int:
        began.append(self.header.rank)
        return take(self, *args)

    monkeypatch.setattr(several.ShardReader, "take", noted)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_shards(PosixStore(), shards.parts, threads=threads)
    assert (caught.value.rank, caught.value.path) == (damaged, part.path)
    if threads == 1:
        assert began == [rank for rank in range(damaged) for _ in range(BLOCKS)] + [damaged]


@pytest.mark.parametrize("missing", range(SHARDS))
def test_a_missing_one_is_named(shards: Shards, missing: int) -> None:
    shards.files[missing].unlink()
    with pytest.raises(CorruptCheckpointError, match="missing") as caught:
        read_shards(PosixStore(), shards.parts, threads=2)
    assert (caught.value.rank, caught.value.path) == (missing, shards.parts[missing].path)


def test_a_damaged_one_is_no_matter_without_its_digests(tmp_path: Path) -> None:
    shards = Shards(tmp_path, "raw")
    flip(shards.files[2], shards.parts[2].header.header_nbytes + PAGE)
    read_shards(PosixStore(), shards.parts, threads=2, verify=False)
    assert not np.array_equal(shards.targets[2], shards.wanted[2])
    assert all(np.array_equal(shards.targets[i], shards.wanted[i]) for i in (0, 1, 3, 4))
