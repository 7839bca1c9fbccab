"""Are blocks of several shards read in the order in which they are wanted, and told of only when checked?"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from ckptengine.errors import CorruptCheckpointError
from ckptengine.read.ordered import OrderedRead, Wanted, deliver, in_order
from ckptengine.read.plan import Destination
from ckptengine.read.reader import ShardReader
from ckptengine.storage.posix import PosixStore
from tests.helpers.checkpoints import RankContent, Tensor, flip, shard_bytes

PAGE = 4096
NAMES = [f"t{i}" for i in range(6)]


class Two:
    """Two shards, of ranks 0 and 1, each of six tensors of one and a half blocks."""

    def __init__(self, folder: Path, codec: str, held: ExitStack) -> None:
        random = np.random.default_rng(3)
        self.arrays: dict[int, dict[str, np.ndarray]] = {}
        self.shards: dict[int, ShardReader] = {}
        self.files: dict[int, Path] = {}
        for rank in (0, 1):
            arrays = {name: random.integers(0, 256, PAGE * 3 // 2, dtype=np.uint8) for name in NAMES}
            content = RankContent(tensors=[Tensor(name, array) for name, array in arrays.items()])
            data, header = shard_bytes(content, codec=codec, block_nbytes=PAGE, rank=rank, ranks=2)
            file = folder / f"shard-{rank}"
            file.write_bytes(data)
            self.arrays[rank], self.files[rank] = arrays, file
            self.shards[rank] = held.enter_context(ShardReader(PosixStore(), os.fspath(file), header))
        self.targets = {
            shard: {name: np.zeros_like(array) for name, array in arrays.items()}
            for shard, arrays in self.arrays.items()
        }

    def wanted(self, ranks: dict[tuple[int, str], float]) -> dict[int, list[Wanted]]:
        """Items are numbered in the order of `ranks`."""
        found: dict[int, list[Wanted]] = {}
        for number, ((shard, name), rank) in enumerate(ranks.items()):
            entry = next(e for e in self.shards[shard].header.tensors if e.name == name)
            address = self.targets[shard][name].ctypes.data
            found.setdefault(shard, []).append(
                Wanted(Destination(entry.start, entry.stop, address), number, rank)
            )
        return found


@pytest.fixture(params=["raw", "zstd"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Two]:
    with ExitStack() as held:
        yield Two(tmp_path, request.param, held)


def test_the_lowest_rank_comes_first_and_no_block_twice(two: Two) -> None:
    ranks = {(1, "t4"): 0.0, (0, "t5"): 1.0, (0, "t0"): 2.0, (1, "t5"): 3.0}
    reads = in_order(two.shards, two.wanted(ranks))
    blocks = [(one.shard, one.read.block) for one in reads]
    assert len(set(blocks)) == len(blocks)
    # t4 is in blocks 6 and 7, t5 in 7 and 8: the block of both comes when the first of them wants it.
    assert blocks == [(1, 6), (1, 7), (0, 7), (0, 8), (0, 0), (0, 1), (1, 8)]
    assert reads[1].items == (0, 3)


def test_each_block_is_told_of_once_its_bytes_are_there(two: Two) -> None:
    ranks = {(shard, name): float(i) for i, name in enumerate(NAMES) for shard in (0, 1)}
    wanted = two.wanted(ranks)
    reads = in_order(two.shards, wanted)
    left = [sum(number in one.items for one in reads) for number in range(len(ranks))]
    lock = threading.Lock()
    whole: list[int] = []

    def note(one: OrderedRead) -> None:
        with lock:
            for parcel in one.items:
                left[parcel] -= 1
                if not left[parcel]:
                    shard, name = list(ranks)[parcel]
                    np.testing.assert_array_equal(two.targets[shard][name], two.arrays[shard][name])
                    whole.append(parcel)

    stats = deliver(two.shards, reads, 3, note)
    assert sorted(whole) == list(range(len(ranks)))
    assert stats.blocks == len(reads)
    assert stats.nbytes_delivered == 12 * PAGE * 3 // 2


def test_one_thread_tells_of_the_blocks_in_their_order(two: Two) -> None:
    ranks = {(0, "t5"): 0.0, (1, "t0"): 1.0, (0, "t0"): 2.0}
    reads = in_order(two.shards, two.wanted(ranks))
    seen: list[OrderedRead] = []
    deliver(two.shards, reads, 1, seen.append)
    assert seen == reads


def test_a_damaged_block_is_never_told_of(two: Two) -> None:
    ranks = {(1, "t4"): 0.0, (0, "t0"): 1.0}
    flip(two.files[1], two.shards[1].extent(7)[0])
    seen: list[tuple[int, int]] = []
    reads = in_order(two.shards, two.wanted(ranks))
    with pytest.raises(CorruptCheckpointError) as caught:
        deliver(two.shards, reads, 1, lambda one: seen.append((one.shard, one.read.block)))
    assert caught.value.rank == 1
    assert "t4" in str(caught.value)
    assert seen == [(1, 6)]


def test_what_is_raised_for_a_block_ends_the_read(two: Two) -> None:
    reads = in_order(two.shards, two.wanted({(0, name): 0.0 for name in NAMES}))
    seen = []

    def stop(one: OrderedRead) -> None:
        seen.append(one)
        raise KeyError("enough")

    with pytest.raises(KeyError):
        deliver(two.shards, reads, 1, stop)
    assert len(seen) == 1


def test_nothing_wanted_is_nothing_read(two: Two) -> None:
    empty = {0: [Wanted(Destination(5, 5, 0), 0, 0.0)]}
    assert in_order(two.shards, empty) == []
    assert deliver(two.shards, [], 4, lambda one: None).blocks == 0
