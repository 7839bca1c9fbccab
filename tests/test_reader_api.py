from __future__ import annotations

import enum
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ckptengine.adapters.state import flatten
from ckptengine.adapters.tensors import LocalChunk, torch_dtype
from ckptengine.adapters.values import encode_value
from ckptengine.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotCommittedError,
    UnsupportedStateError,
)
from ckptengine.format.dtypes import is_known
from ckptengine.format.geometry import Chunk
from ckptengine.format.names import MANIFEST_NAME
from ckptengine.read import tensors
from ckptengine.read.plan import BlockRead
from ckptengine.read.reader import ShardReader
from ckptengine.reader_api import CheckpointReader, open_checkpoint
from ckptengine.storage.posix import PosixStore
from ckptengine.verification import verify
from tests.helpers.checkpoints import (
    RankContent,
    Tensor,
    flip,
    read_manifest,
    sample_content,
    write_checkpoint,
)

PAGE = 4096


def content_of(state: Any, *, allow_pickle: bool = False) -> RankContent:
    """What a rank stores of a real state."""
    flat = flatten(state, allow_pickle=allow_pickle)
    stored = []
    for item in flat.items:
        data = item.source
        if isinstance(data, torch.Tensor):
            data = data.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        array = np.frombuffer(data, np.uint8)
        stored.append(
            Tensor(
                item.name,
                array,
                item.chunk,
                item.dtype,
                item.shape,
                item.stride,
                item.placement,
                item.kind,
                item.descr,
            )
        )
    return RankContent(stored, flat.views, flat.replicas, tree=flat.tree)


def save(root: Path, *states: Any, allow_pickle: bool = False, **options: Any) -> Path:
    """A checkpoint of one state per rank."""
    contents = [content_of(state, allow_pickle=allow_pickle) for state in states]
    return write_checkpoint(root, 1, ranks=len(states), content=lambda rank, ranks: contents[rank], **options)


@pytest.fixture(scope="module", params=["headers", "index"], autouse=True)
def _source(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything is to be the same, whether INDEX is made use of or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "HEADERS_UP_TO_NBYTES", 0 if request.param == "index" else 1 << 40)
        yield


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rank, block) of every block read, as it happens."""
    seen: list[tuple[int, int]] = []
    original = ShardReader.read

    def read(self: ShardReader, read: BlockRead, buffers: Any, *, keep: bool = False) -> bool:
        seen.append((self.header.rank, read.block))
        return original(self, read, buffers, keep=keep)

    monkeypatch.setattr(ShardReader, "read", read)
    return seen


# --- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tensors_come_back_whole(tmp_path: Path, codec: str, ranks: int) -> None:
    write_checkpoint(tmp_path, 4, ranks=ranks, codec=codec)
    with open_checkpoint(tmp_path) as c:
        assert c.keys() == ["bias", "embed.weight", "empty", "flat", "head.weight", "own", "rank0.scalar"]
        whole = torch.arange(8 * ranks * 96, dtype=torch.float32).view(8 * ranks, 96)
        for name in ("embed.weight", "head.weight"):
            assert torch.equal(c.get_tensor(name), whole)
        assert torch.equal(c.get_tensor("flat"), torch.arange(30 * 41, dtype=torch.float64).view(30, 41))
        assert torch.equal(c.get_tensor("bias"), torch.arange(33, dtype=torch.int16))
        assert torch.equal(c.get_tensor("rank0.scalar"), torch.tensor(1.5))
        assert c.get_tensor("empty").shape == (0, 3)
        assert c.get_tensor("empty").dtype == torch.float16


def test_the_facts_of_a_checkpoint(tmp_path: Path) -> None:
    metadata = {"loss": 0.5, "tags": ["a", "b"], "when": (1, 2)}
    step = write_checkpoint(tmp_path, 4, metadata=encode_value(metadata))
    with open_checkpoint(step) as c:
        assert (c.step, c.world_size, c.path) == (4, 2, str(step))
        assert c.metadata == metadata
        assert c.fingerprint == c.manifest.fingerprint == read_manifest(step).fingerprint
        assert "step=4" in repr(c)


def test_root_step_and_manifest_are_all_accepted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5)
    step = write_checkpoint(tmp_path, 6)
    write_checkpoint(tmp_path, 7, commit=False)
    for path in (tmp_path, step, step / MANIFEST_NAME):
        with open_checkpoint(path) as c:
            assert c.step == 6


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(NotCommittedError):
        open_checkpoint(write_checkpoint(tmp_path, 1, commit=False))
    step = write_checkpoint(tmp_path, 2)
    flip(step / MANIFEST_NAME, 50)
    with pytest.raises(CorruptCheckpointError):
        open_checkpoint(step)


def test_an_unknown_name_is_a_key_error_with_likely_ones(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    with open_checkpoint(tmp_path) as c:
        with pytest.raises(KeyError, match=r"did you mean 'embed\.weight'"):
            c.get_tensor("embed.wieght")
        with pytest.raises(KeyError, match="no tensor named 'xyz'"):
            c.get_slice("xyz")
        with pytest.raises(KeyError, match="no tensor of rank 1 named"):
            c.get_tensor("rank0.scalar", rank=1)
        with pytest.raises(ValueError, match="rank 2 is not one of the 2"):
            c.get_tensor("own", rank=2)


def test_where_says_who_holds_what(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    with open_checkpoint(tmp_path) as c:
        chunks = [Chunk((16, 96), (0, 0), (8, 96)), Chunk((16, 96), (8, 0), (8, 96))]
        assert c.where("embed.weight") == [(0, chunks[0], 0, 3072), (1, chunks[1], 0, 3072)]
        assert [rank for rank, *_ in c.where("bias")] == [0]


def test_each_ranks_own_tensor_is_had_by_rank(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    with open_checkpoint(tmp_path) as c:
        assert c.get_tensor("own").tolist() == [0] * 5
        assert c.get_tensor("own", rank=0).tolist() == [0] * 5
        assert c.get_tensor("own", rank=1).tolist() == [1] * 6
        assert c.get_tensor("embed.weight", rank=1).shape == (8, 96)
        assert torch.equal(c.get_tensor("bias", rank=1), c.get_tensor("bias"))


DTYPES = sorted({str(value)[6:] for value in vars(torch).values() if isinstance(value, torch.dtype)})


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", [name for name in DTYPES if is_known(name)])
def test_every_dtype_can_be_read_and_sliced(tmp_path: Path, name: str) -> None:
    dtype = torch_dtype(name)
    data = torch.arange(6 * 8 * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = data.view(dtype).view(6, 8)
    save(tmp_path, {"w": tensor})
    with open_checkpoint(tmp_path) as c:
        for found, expected in (
            (c.get_tensor("w"), tensor),
            (c.get_slice("w")[1:5:2, 3], tensor[1:5:2, 3]),
            (c.load()["w"], tensor),
        ):
            assert found.dtype == dtype
            assert found.shape == expected.shape
            view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize)
            if view is None:
                assert torch.equal(found, expected)
            else:
                assert torch.equal(found.view(view), expected.view(view))


# --- slices --------------------------------------------------------------------------------------


def splits(draw: st.DrawFn, size: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, size), max_size=2))
    return sorted([0, *inner, size])


@st.composite
def sharded(draw: st.DrawFn) -> tuple[np.ndarray, list[RankContent]]:
    """A tensor and the ranks that hold it, as a grid of chunks or as ranges of the flattened tensor."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    contents = []
    if draw(st.booleans()):
        cuts = splits(draw, array.size)
        for start, stop in pairwise(cuts):
            chunk = Chunk((array.size,), (start,), (stop - start,), shape)
            contents.append(RankContent([Tensor("w", array.reshape(-1)[start:stop], chunk)]))
    else:
        grids = [splits(draw, size) for size in shape]
        spans = [list(pairwise(cuts)) for cuts in grids]
        for index in np.ndindex(*map(len, spans)):
            bounds = [spans[dim][i] for dim, i in enumerate(index)]
            part = array[tuple(slice(start, stop) for start, stop in bounds)]
            chunk = Chunk(shape, tuple(start for start, _ in bounds), part.shape)
            contents.append(RankContent([Tensor("w", part, chunk)]))
    return array, contents


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    items: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        bound = st.none() | st.integers(-size - 1, size + 1)
        steps = st.none() | st.integers(1, 4)
        items.append(draw(st.builds(slice, bound, bound, steps) | st.integers(-size, size - 1)))
    return tuple(items) + ((...,) if draw(st.booleans()) else ())


@settings(max_examples=60)
@given(data=st.data())
def test_any_slice_of_any_sharding_is_what_numpy_gives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    array, contents = data.draw(sharded())
    step = write_checkpoint(
        tmp_path_factory.mktemp("slices"), 1, ranks=len(contents), content=lambda rank, _: contents[rank]
    )
    with open_checkpoint(step) as c:
        np.testing.assert_array_equal(c.get_tensor("w").numpy(), array)
        part = c.get_slice("w")
        for _ in range(3):
            index = data.draw(indices(array.shape))
            found = part[index].numpy()
            assert found.shape == array[index].shape
            np.testing.assert_array_equal(found, array[index])


def test_a_slice_reads_only_its_blocks(tmp_path: Path, loads: list[tuple[int, int]]) -> None:
    array = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
    write_checkpoint(tmp_path, 1, tensors={"w": array})
    with open_checkpoint(tmp_path) as c:
        part = c.get_slice("w")
        assert loads == []
        np.testing.assert_array_equal(part[30:34].numpy(), array[30:34])
        assert sorted(loads) == [(0, 30), (0, 31), (1, 0), (1, 1)]
        loads.clear()
        np.testing.assert_array_equal(part[::16].numpy(), array[::16])
        assert sorted(loads) == [(0, 0), (0, 16), (1, 0), (1, 16)]
        loads.clear()
        np.testing.assert_array_equal(part[5, 100:200].numpy(), array[5, 100:200])
        assert loads == [(0, 5)]
        loads.clear()
        assert part[3:3].shape == (0, 1024)
        assert loads == []


def test_a_slice_speaks_safetensors(tmp_path: Path) -> None:
    array = np.arange(60, dtype=np.float32).reshape(12, 5)
    step = write_checkpoint(tmp_path, 1, ranks=1, tensors={"w": array})
    with (
        open_checkpoint(step) as c,
        safe_open(str(step / read_manifest(step).shards[0].path), framework="pt") as other,
    ):
        one, two = c.get_slice("w"), other.get_slice("w")
        assert one.get_shape() == two.get_shape()
        assert one.get_dtype() == str(two.get_dtype())
        assert torch.equal(one[2:7, 1], two[2:7, 1])
        assert torch.equal(one[...], two[...])


def test_a_slice_does_not_keep_what_was_read_around_it(tmp_path: Path) -> None:
    array = np.zeros((100, 100), dtype=np.float32)
    write_checkpoint(tmp_path, 1, tensors={"w": array})
    with open_checkpoint(tmp_path) as c:
        assert c.get_slice("w")[::50, ::50].untyped_storage().nbytes() == 4 * 4


def test_small_tensors_of_one_block_read_it_once(tmp_path: Path, loads: list[tuple[int, int]]) -> None:
    tensors = {f"w{i}": np.full(10, i, dtype=np.int64) for i in range(50)}
    write_checkpoint(tmp_path, 1, ranks=1, tensors=tensors)
    with open_checkpoint(tmp_path) as c:
        for name, array in tensors.items():
            np.testing.assert_array_equal(c.get_tensor(name).numpy(), array)
    assert loads == [(0, 0)]


# --- the state -----------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


def rank_state(rank: int) -> dict[str, Any]:
    rows = torch.arange(24, dtype=torch.float32).view(6, 4)[3 * rank : 3 * rank + 3]
    weight = LocalChunk(rows, (6, 4), (3 * rank, 0))
    return {
        "model": {"w": weight, "tied": weight, "scalar": torch.tensor(2)},
        "optimizer": {"state": {0: {"exp": LocalChunk(rows * 2, (6, 4), (3 * rank, 0))}}, "lr": 0.1},
        "rank": rank,
        "rng": torch.full((4 + rank,), rank, dtype=torch.uint8),
        f"only_{rank}": (rank, torch.tensor([rank])),
        "large": b"\1" * 5000 if rank == 0 else b"\2" * 6000,
        "array": np.arange(1000, dtype=np.float32) + rank,
    }


def test_load_gives_whole_tensors_in_the_structure_of_all_ranks(tmp_path: Path) -> None:
    save(tmp_path, rank_state(0), rank_state(1))
    with open_checkpoint(tmp_path) as c:
        state = c.load()
    whole = torch.arange(24, dtype=torch.float32).view(6, 4)
    assert list(state) == ["model", "optimizer", "rank", "rng", "only_0", "large", "array", "only_1"]
    assert torch.equal(state["model"]["w"], whole)
    assert state["model"]["tied"] is state["model"]["w"]
    assert torch.equal(state["optimizer"]["state"][0]["exp"], whole * 2)
    assert (state["rank"], state["rng"].tolist(), state["optimizer"]["lr"]) == (0, [0] * 4, 0.1)
    assert state["only_0"][0] == 0
    assert state["only_1"][0] == 1
    assert state["only_1"][1].tolist() == [1]
    assert state["large"] == b"\1" * 5000
    np.testing.assert_array_equal(state["array"], np.arange(1000, dtype=np.float32))


@pytest.mark.parametrize("rank", [0, 1])
def test_load_of_a_rank_gives_what_it_saved(tmp_path: Path, rank: int) -> None:
    save(tmp_path, rank_state(0), rank_state(1))
    with open_checkpoint(tmp_path) as c:
        state = c.load(rank=rank)
    saved = rank_state(rank)
    assert list(state) == list(saved)
    assert torch.equal(state["model"]["w"], saved["model"]["w"].tensor)
    assert state["model"]["tied"] is state["model"]["w"]
    assert (state["rank"], state["large"]) == (rank, saved["large"])
    assert torch.equal(state["rng"], saved["rng"])
    np.testing.assert_array_equal(state["array"], saved["array"])


@pytest.mark.parametrize("rank", [None, 0])
def test_strides_and_shared_memory_come_back(tmp_path: Path, rank: int | None) -> None:
    base = torch.arange(40, dtype=torch.float32)
    square = torch.randn(4, 6)
    overlapping = torch.arange(20, dtype=torch.int64)
    state = {
        "base": base,
        "even": base[::2],
        "transposed": square.t(),
        "left": overlapping[:12],
        "right": overlapping[8:],
        "expanded": torch.tensor([7.0]).expand(3, 5),
    }
    save(tmp_path, state)
    with open_checkpoint(tmp_path) as c:
        assert set(c.keys()) == set(state)
        loaded = c.load(rank=rank)
        for name, tensor in state.items():
            assert torch.equal(loaded[name], tensor)
            assert torch.equal(c.get_tensor(name), tensor)
            assert torch.equal(c.get_slice(name)[1:], tensor[1:])
    assert loaded["transposed"].stride() == square.t().stride()
    for one, other in (("base", "even"), ("left", "right")):
        assert loaded[one].untyped_storage().data_ptr() == loaded[other].untyped_storage().data_ptr()


def test_several_chunks_on_one_rank_are_one_tensor(tmp_path: Path) -> None:
    whole = np.arange(48, dtype=np.float32).reshape(12, 4)

    def content(rank: int, ranks: int) -> RankContent:
        parts = {0: [0, 6], 1: [3, 9], 2: []}[rank]
        tensors = [Tensor(f"w@{at}_0", whole[at : at + 3], Chunk((12, 4), (at, 0), (3, 4))) for at in parts]
        tree = {"w": {"$": "tuple", "v": [{"$": "t", "i": i} for i in range(len(parts))]}}
        return RankContent(tensors, tree=tree)

    write_checkpoint(tmp_path, 1, ranks=3, content=content)
    with open_checkpoint(tmp_path) as c:
        assert c.keys() == ["w"]
        assert [rank for rank, *_ in c.where("w")] == [0, 0, 1, 1]
        np.testing.assert_array_equal(c.get_tensor("w").numpy(), whole)
        np.testing.assert_array_equal(c.load()["w"].numpy(), whole)
        first, second = c.load(rank=1)["w"]
        np.testing.assert_array_equal(first.numpy(), whole[3:6])
        np.testing.assert_array_equal(second.numpy(), whole[9:])
        assert c.load(rank=2)["w"] == ()


@pytest.mark.parametrize("holder", [0, 1])
def test_a_tensor_of_which_one_rank_has_all_and_the_others_nothing_is_whole(
    tmp_path: Path, holder: int
) -> None:
    """As a DTensor of one row in Shard(0): the whole says nothing of chunks, and the empty ones do."""
    whole = np.arange(6, dtype=np.float32).reshape(1, 6)

    def content(rank: int, ranks: int) -> RankContent:
        if rank == holder:
            return RankContent([Tensor("w", whole)])
        return RankContent([Tensor("w", whole[:0], Chunk((1, 6), (int(rank > holder), 0), (0, 6)))])

    write_checkpoint(tmp_path, 1, ranks=3, content=content)
    with open_checkpoint(tmp_path) as c:
        np.testing.assert_array_equal(c.get_tensor("w").numpy(), whole)
        np.testing.assert_array_equal(c.get_slice("w")[:, 2:5].numpy(), whole[:, 2:5])
        np.testing.assert_array_equal(c.load()["model"]["w"].numpy(), whole)
        assert c.get_tensor("w", rank=2).shape == (0, 6)
    assert verify(tmp_path).ok


def test_a_name_that_looks_like_a_part_is_a_name(tmp_path: Path) -> None:
    save(tmp_path, {"w@0": torch.ones(3), "w": torch.zeros(2)})
    with open_checkpoint(tmp_path) as c:
        assert c.keys() == ["w", "w@0"]
        assert torch.equal(c.get_tensor("w@0"), torch.ones(3))
        assert torch.equal(c.load()["w@0"], torch.ones(3))


def test_a_value_that_cannot_be_decoded_is_named_with_its_path(tmp_path: Path) -> None:
    content = RankContent(tree={"deep": {"dtype": {"$": "dtype", "v": "no_such_dtype"}}})
    step = write_checkpoint(tmp_path, 1, ranks=1, content=lambda rank, ranks: content)
    with open_checkpoint(step) as c, pytest.raises(CorruptCheckpointError, match='"dtype"') as caught:
        c.load()
    assert caught.value.path == str(step)


def test_values_are_had_by_name(tmp_path: Path) -> None:
    state = {
        "step": 7,
        "deep": {"pair": (1, 2.5), "color": Color.RED, "none": None, 3: "three"},
        "w": torch.ones(2),
        "array": np.arange(2000),
        "names": {"b", "a"},
        "empty": [],
    }
    save(tmp_path, state)
    with open_checkpoint(tmp_path) as c:
        found = c.values()
        np.testing.assert_array_equal(found.pop("array"), np.arange(2000))
        assert found == {
            "step": 7,
            "deep.pair.0": 1,
            "deep.pair.1": 2.5,
            "deep.color": Color.RED,
            "deep.none": None,
            "deep.3": "three",
            "names": {"a", "b"},
            "empty": [],
        }
        assert c.get_value("deep") == state["deep"]
        assert c.get_value("deep.pair") == (1, 2.5)
        assert torch.equal(c.get_value("w"), torch.ones(2))
        with pytest.raises(KeyError, match=r"did you mean 'deep\.pair'"):
            c.get_value("deep.pear")


def test_values_of_other_ranks_are_had_by_rank(tmp_path: Path) -> None:
    save(tmp_path, rank_state(0), rank_state(1))
    with open_checkpoint(tmp_path) as c:
        assert c.get_value("rank", rank=1) == 1
        assert c.get_value("only_1.0") == 1
        assert c.values(rank=1)["large"] == b"\2" * 6000
        with pytest.raises(KeyError):
            c.get_value("only_1", rank=0)
        with pytest.raises(KeyError, match="is no tensor but a value"):
            c.get_tensor("large", rank=0)


def test_pickled_values_are_read_on_request_only(tmp_path: Path) -> None:
    state = {"odd": complex, "w": torch.ones(2)}
    save(tmp_path, state, allow_pickle=True)
    with open_checkpoint(tmp_path) as c:
        assert torch.equal(c.get_tensor("w"), torch.ones(2))
        with pytest.raises(UnsupportedStateError, match="allow_pickle=True"):
            c.load()
    with open_checkpoint(tmp_path, allow_pickle=True) as c:
        assert c.load()["odd"] is complex


# --- damage, deletion, threads -------------------------------------------------------------------


def test_damage_is_met_only_where_it_is_read(tmp_path: Path) -> None:
    array = np.arange(16 * 1024, dtype=np.float32).reshape(16, 1024)
    step = write_checkpoint(tmp_path, 1, ranks=1, tensors={"w": array})
    ref = read_manifest(step).shards[0]
    flip(step / ref.path, ref.header_nbytes + 3 * PAGE)
    with open_checkpoint(step) as c:
        np.testing.assert_array_equal(c.get_slice("w")[4:].numpy(), array[4:])
        for read in (lambda: c.get_slice("w")[2:4], lambda: c.get_tensor("w"), c.load):
            with pytest.raises(CorruptCheckpointError, match="block 3 is damaged") as caught:
                read()
            assert (caught.value.rank, caught.value.fqn) == (0, "w")
            assert caught.value.path == str(step / ref.path)


def test_a_tensor_with_a_gap_is_named_with_the_gap(tmp_path: Path) -> None:
    def content(rank: int, ranks: int) -> RankContent:
        made = sample_content(rank, ranks)
        if rank == 1:
            made.tensors = [tensor for tensor in made.tensors if tensor.name != "flat"]
        return made

    write_checkpoint(tmp_path, 1, ranks=3, content=content)
    with open_checkpoint(tmp_path) as c:
        with pytest.raises(CorruptCheckpointError, match=r"no rank holds \[417:827\] of the flat") as caught:
            c.get_tensor("flat")
        assert caught.value.fqn == "flat"
        assert c.get_tensor("embed.weight").shape == (24, 96)


def test_an_open_step_is_not_deleted(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 1)
    store = PosixStore()
    with open_checkpoint(step), store.try_lock_exclusive(str(step)) as held:
        assert not held
    with store.try_lock_exclusive(str(step)) as held:
        assert held
        (step / MANIFEST_NAME).unlink()
        with pytest.raises(CheckpointNotFoundError, match="being removed"):
            open_checkpoint(step)


def delete(step: Path) -> None:
    shutil.rmtree(step)


def save_anew(step: Path) -> None:
    shutil.rmtree(step)
    write_checkpoint(step.parent, 1, save=2)


@pytest.mark.parametrize("change", [delete, save_anew])
def test_a_step_that_goes_while_it_is_open_is_a_clear_error(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    step = write_checkpoint(tmp_path, 1)
    with open_checkpoint(step) as c:
        assert c.keys()
        change(step)
        with pytest.raises(CheckpointNotFoundError, match="deleted or saved anew while it was open"):
            c.get_tensor("embed.weight")


def test_nothing_is_read_after_close(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    c = open_checkpoint(tmp_path)
    part = c.get_slice("embed.weight")
    c.close()
    c.close()
    for read in (c.keys, c.load, lambda: c.get_tensor("embed.weight"), lambda: part[0]):
        with pytest.raises(ValueError, match="closed"):
            read()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_one_reader_serves_many_threads(tmp_path: Path, codec: str) -> None:
    tensors = {f"w{i}": np.arange(i, i + 700 * (i % 5 + 1), dtype=np.int32) for i in range(40)}
    write_checkpoint(tmp_path, 1, tensors=tensors, codec=codec)

    def read(name: str) -> tuple[str, torch.Tensor, torch.Tensor]:
        barrier.wait()
        return name, c.get_tensor(name), c.get_slice(name)[100:200]

    barrier = threading.Barrier(8)
    with open_checkpoint(tmp_path) as c, ThreadPoolExecutor(8) as pool:
        for name, whole, part in pool.map(read, tensors):
            np.testing.assert_array_equal(whole.numpy(), tensors[name])
            np.testing.assert_array_equal(part.numpy(), tensors[name][100:200])


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() <= before


def test_a_reader_needs_no_process_group(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    assert not torch.distributed.is_initialized()
    with open_checkpoint(tmp_path) as c:
        assert isinstance(c, CheckpointReader)
        c.load()
    assert not torch.distributed.is_initialized()
