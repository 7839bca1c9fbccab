"""What all ranks hold of a tensor: the same from INDEX as from the headers, whatever the tensor is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptengine.format import dtypes
from ckptengine.format.entries import ShardHeader, TensorEntry, ViewEntry
from ckptengine.format.geometry import Chunk
from ckptengine.format.index import index_from_headers
from ckptengine.format.layout import lay_out
from ckptengine.read import tensors
from ckptengine.read.held import Held, HeldTensors, held_tensors
from ckptengine.read.tensors import read_index
from ckptengine.storage.posix import PosixStore
from ckptengine.testing.synthetic import World, write_step
from tests.helpers.checkpoints import read_manifest

RUN = "a000001-000000000000-00000000"


def header(
    rank: int, world_size: int, content: dict[str, Any], views: tuple[ViewEntry, ...] = ()
) -> ShardHeader:
    """content: name → (dtype, chunk, or shape of a whole tensor)."""
    shapes = {name: what.shape if isinstance(what, Chunk) else what for name, (_, what) in content.items()}
    nbytes = {name: int(np.prod(shape)) * dtypes.itemsize(content[name][0]) for name, shape in shapes.items()}
    placed, data_nbytes = lay_out([(name, nbytes[name], 16) for name in content])
    spans = {name: span for name, *span in placed}
    entries = [
        TensorEntry(name, dtype, shapes[name], *spans[name], what if isinstance(what, Chunk) else None)
        for name, (dtype, what) in content.items()
    ]
    made = ShardHeader(
        run=RUN,
        attempt=f"{RUN}-000001.0",
        step=1,
        rank=rank,
        world_size=world_size,
        codec="raw",
        block_nbytes=4096,
        data_nbytes=data_nbytes,
        tensors=tuple(entries),
        views=views,
        tree={entry.name: {"$": "t", "i": i} for i, entry in enumerate(entries)},
    )
    made.validate()
    return made


def held(*headers: ShardHeader) -> HeldTensors:
    return HeldTensors(index_from_headers(headers), lambda: headers)


def shown(found: Held | None) -> Any:
    assert found is not None
    rows = found.rows
    chunks = zip(rows.rank.tolist(), rows.offsets.tolist(), rows.shape.tolist(), strict=True)
    return [(rank, tuple(offsets), tuple(shape)) for rank, offsets, shape in chunks]


def test_a_tensor_of_which_one_rank_has_all_is_sharded_if_others_say_so() -> None:
    """A dimension of size 1, split over two ranks: the first has a whole tensor, the second none of it."""
    empty = Chunk((1, 3), (1, 0), (0, 3))
    found = held(header(0, 2, {"w": ("float32", (1, 3))}), header(1, 2, {"w": ("float32", empty)})).find("w")
    assert shown(found) == [(0, (0, 0), (1, 3)), (1, (1, 0), (0, 3))]
    assert found is not None
    assert found.sharded
    assert found.conflict is None


def test_the_parts_that_one_rank_has_of_a_tensor_are_found_together() -> None:
    parts = {f"w@{i}": ("int8", Chunk((6,), (i,), (1,))) for i in (4, 0)}
    whole = {"w@3": ("int8", (2,))}
    rest = {"w": ("int8", Chunk((6,), (1,), (3,)))}
    tensors = held(header(0, 3, parts), header(1, 3, rest | whole), header(2, 3, whole))
    assert tensors.names() == {"w", "w@3"}
    assert sorted(shown(tensors.find("w"))) == [(0, (0,), (1,)), (0, (4,), (1,)), (1, (1,), (3,))]
    assert shown(tensors.find("w@3")) == [(1, (0,), (2,)), (2, (0,), (2,))]


def test_ranks_own_tensors_that_are_not_alike_are_told_apart() -> None:
    """INDEX has only the lowest rank's."""
    tensors = held(*[header(rank, 3, {"own": ("int8", (4 - rank // 2,))}) for rank in range(3)])
    assert shown(tensors.find("own")) == [(0, (0,), (4,)), (1, (0,), (4,))]
    of_last = tensors.find("own", 2)
    assert shown(of_last) == [(2, (0,), (3,))]
    assert of_last is not None
    assert of_last.conflict is not None
    assert not of_last.sharded


def test_a_view_in_another_order_keeps_its_strides() -> None:
    view = ViewEntry("t", "w", 0, "int16", (3, 2), (1, 3))
    tensors = held(header(0, 1, {"w": ("int16", (2, 3))}, (view,)))
    found = tensors.find("t")
    assert found is not None
    assert found.rows.strides_of(0) == (1, 3)
    assert found.rows.only([0]).strides_of(0) == (1, 3)
    assert tensors.find("nothing") is None
    assert tensors.holder("nothing") is None


@pytest.mark.parametrize("damage", ["none", "missing", "flipped"])
def test_the_headers_are_asked_where_index_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    world = World(5, tensors=3)
    path = Path(write_step(tmp_path, world))
    manifest = read_manifest(path)
    if damage == "missing":
        (path / "INDEX").unlink()
    elif damage == "flipped":
        data = bytearray((path / "INDEX").read_bytes())
        data[40] ^= 1
        (path / "INDEX").write_bytes(data)
    monkeypatch.setattr(tensors, "HEADERS_UP_TO_SHARDS", 0)
    asked: list[int] = []

    def headers() -> list[ShardHeader]:
        asked.append(1)
        return [world.header(rank) for rank in range(world.ranks)]

    store = PosixStore()
    found = held_tensors(store, str(path), manifest, headers)
    assert found.names() == {*world.names, world.last}
    assert shown(found.find(world.names[1])) == [(rank, (rank, 0), (1, 64)) for rank in range(5)]
    assert found.holder(world.last) == 4
    assert bool(asked) == (damage != "none")
    assert (read_index(store, str(path), manifest) is None) == (damage != "none")
