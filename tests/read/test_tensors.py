"""Is INDEX asked where it can tell, and are the headers where it cannot?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from ckptengine.errors import CorruptCheckpointError
from ckptengine.format.digest import hexdigest
from ckptengine.format.entries import ViewEntry
from ckptengine.format.index import build_index
from ckptengine.format.manifest import IndexRef
from ckptengine.read import tensors
from ckptengine.reader_api import CheckpointReader
from ckptengine.testing.synthetic import World, write_step
from tests.helpers.checkpoints import RankContent, Tensor, read_manifest, rewrite_manifest, write_checkpoint
from tests.helpers.counting import CountingStore

RANKS = 64


def opened(path: str | Path, store: CountingStore) -> CheckpointReader:
    return CheckpointReader(store, str(path), allow_pickle=False, threads=2)


def test_only_the_shards_that_hold_a_tensor_are_opened(tmp_path: Path) -> None:
    world = World(RANKS, tensors=20)
    path = write_step(tmp_path, world)
    store = CountingStore()
    with opened(path, store) as c:
        assert c.keys() == sorted([*world.names, world.last])
        assert store.opened == {"MANIFEST.json": 1, "INDEX": 1}
        assert torch.equal(c.get_tensor(world.last), torch.full((64,), float(RANKS - 1)))
        assert {name for name in store.opened if name.startswith("shard")} == {"shard-00063.safetensors"}
        rows = c.get_slice(world.names[3])[5:7]
        assert torch.equal(rows, torch.tensor([[5.0] * 64, [6.0] * 64]))
        assert {name for name in store.opened if name.startswith("shard")} == {
            "shard-00005.safetensors",
            "shard-00006.safetensors",
            "shard-00063.safetensors",
        }
        whole = c.get_tensor(world.names[0])
        assert torch.equal(whole, torch.arange(RANKS, dtype=torch.float32).view(-1, 1).expand(-1, 64))
        assert len(c.where(world.names[0])) == RANKS


def test_few_headers_are_read_without_the_index(tmp_path: Path) -> None:
    world = World(4, tensors=20)
    store = CountingStore()
    with opened(write_step(tmp_path, world), store) as c:
        assert c.keys() == sorted([*world.names, world.last])
        assert "INDEX" not in store.opened


@pytest.mark.parametrize("damage", ["missing", "flipped", "not named"])
def test_without_an_index_the_headers_are_read(tmp_path: Path, damage: str) -> None:
    world = World(RANKS, tensors=4)
    path = Path(write_step(tmp_path, world, index=damage != "not named"))
    if damage == "missing":
        (path / "INDEX").unlink()
    elif damage == "flipped":
        data = bytearray((path / "INDEX").read_bytes())
        data[40] ^= 1
        (path / "INDEX").write_bytes(data)
    store = CountingStore()
    with opened(path, store) as c:
        assert c.keys() == sorted([*world.names, world.last])
        assert sum(name.startswith("shard") for name in store.opened) == RANKS


def test_what_only_a_header_tells_is_asked_of_the_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has a transposed view where rank 1 has a tensor: the lowest rank's counts, which INDEX has
    not."""
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)

    def content(rank: int, ranks: int) -> RankContent:
        if rank:
            return RankContent([Tensor("base", matrix), Tensor("turned", -matrix)])
        return RankContent(
            [Tensor("base", matrix)], [ViewEntry("turned", "base", 0, "float32", (3, 2), (1, 3))]
        )

    path = write_checkpoint(tmp_path, 1, ranks=2, content=content)
    monkeypatch.setattr(tensors, "HEADERS_UP_TO_NBYTES", 0)
    with opened(path, CountingStore()) as c:
        assert torch.equal(c.get_tensor("turned"), torch.from_numpy(matrix.T.copy()))
        assert len(c.where("turned")) == 2


def test_an_index_that_contradicts_a_header_is_found_before_a_byte_is_delivered(tmp_path: Path) -> None:
    world = World(RANKS, tensors=4)
    path = Path(write_step(tmp_path, world))
    headers = [world.header(rank) for rank in range(RANKS)]
    first, second, *rest = headers[7].tensors
    # The two change places: as long, of the same shape, and the other's bytes.
    renamed = msgspec.structs.replace
    swapped = (renamed(first, name=second.name), renamed(second, name=first.name))
    headers[7] = replace(headers[7], tensors=(*swapped, *rest))
    wrong = build_index(headers)
    (path / "INDEX").write_bytes(wrong)
    rewrite_manifest(path, index=IndexRef(len(wrong), hexdigest(wrong)))
    assert read_manifest(path).index is not None
    with opened(path, CountingStore()) as c:
        with pytest.raises(CorruptCheckpointError, match="contradict") as caught:
            c.get_tensor(first.name)
        assert (caught.value.rank, caught.value.fqn) == (7, first.name)
        c.get_slice(first.name)[:7]
        with pytest.raises(CorruptCheckpointError, match="contradict"):
            c.get_slice(first.name)[7]
