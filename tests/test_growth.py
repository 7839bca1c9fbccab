"""Does what one rank has to do to restore stay the same, however many ranks there are?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptengine.testing.synthetic import World, write_step
from ckptengine.testing.worlds import restore_two_ranks
from tests.helpers.counting import CountingStore


def state(world: World) -> dict[str, Any]:
    return {"tensors": {name: torch.zeros(world.rows, 64) for name in world.names}, "rank": -1}


def restored(root: Path, ranks: int) -> tuple[CountingStore, int, CountingStore]:
    """What rank 1's restore asked of the store, how many bytes it was told by others, and the coordinator's
    store."""
    world = World(ranks, tensors=20, sharded=False)
    write_step(root, world, shards=(0, 1))
    stores = {0: CountingStore(), 1: CountingStore()}
    states = {rank: state(world) for rank in (0, 1)}
    results = restore_two_ranks(str(root), ranks, 1, states.__getitem__, stores.__getitem__)
    for rank, into in states.items():
        assert into["rank"] == rank
        assert all(
            torch.equal(tensor, torch.full((1, 64), float(rank))) for tensor in into["tensors"].values()
        )
    return stores[1], results[1][1], stores[0]


def test_a_rank_reads_and_hears_as_much_in_a_large_world_as_in_a_small_one(tmp_path: Path) -> None:
    few, heard_of_few, _ = restored(tmp_path / "few", 3)
    many, heard_of_many, coordinator = restored(tmp_path / "many", 1000)
    assert many.opened == few.opened == {"shard-00001.safetensors": 2}
    assert many.calls == few.calls == {}
    # Longer numbers make a header, and an answer, a little longer.
    assert many.nbytes == pytest.approx(few.nbytes, rel=0.05)
    assert heard_of_many <= heard_of_few + 8
    # The coordinator reads what is about all: the manifest, and no header but its own.
    assert coordinator.opened == {"MANIFEST.json": 1, "shard-00000.safetensors": 2}
