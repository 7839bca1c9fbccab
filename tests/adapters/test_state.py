"""How a state is taken apart: names, order, ties, refusals."""

from __future__ import annotations

import gc
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from ckptengine.adapters.state import FlatState, flatten
from ckptengine.adapters.tensors import LocalChunk
from ckptengine.errors import UnsupportedStateError
from tests.adapters.fake import Saved, bits, header_of, same


def names(flat: FlatState) -> list[str]:
    return [item.name for item in flat.items]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def test_names_are_the_keys_joined_with_dots() -> None:
    flat = flatten(
        {"model": {"layer.0.weight": ones(2)}, "opt": {0: [ones(1), (ones(3),)]}, (1, 2): {None: ones(1)}}
    )
    assert names(flat) == ["model.layer.0.weight", "opt.0.0", "opt.0.1.0", "(1, 2).None"]


def test_tensors_are_stored_in_the_order_of_the_walk() -> None:
    flat = flatten([ones(1), {"b": ones(1), "a": ones(1)}, b"x" * 2000, ones(1)])
    assert names(flat) == ["0", "1.b", "1.a", "2", "3"]


def test_paths_with_the_same_name_get_different_ones_each_time_the_same() -> None:
    state = {"a": {"b": ones(1)}, "a.b": ones(2), 1: ones(3), "1": ones(4), False: ones(5)}
    state = {**state, "__metadata__": ones(6), "__pad__.0": ones(7)}
    flat = flatten(state)
    assert len(set(names(flat))) == len(flat.items)
    assert names(flat) == names(flatten(state))
    assert {"a.b", "1"} <= set(names(flat))
    header_of(flat)
    assert same(Saved(state).load(), state)


def test_keys_that_are_no_unicode_give_names_that_are() -> None:
    state = {"\udc80": ones(1), "\\udc80": ones(2), "ü": ones(3)}
    assert all(name.encode() for name in names(flatten(state)))
    assert same(Saved(state).load(), state)


def test_a_state_is_a_container_or_an_object() -> None:
    for state in (ones(1), 1, None, {1}):
        with pytest.raises(UnsupportedStateError, match="a state is a dict"):
            flatten(state)
    assert names(flatten(nn.Linear(2, 2))) == ["weight", "bias"]
    assert names(flatten((ones(1),))) == ["0"]
    assert flatten({}).items == []


class Counter:
    def __init__(self) -> None:
        self.value = 3

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "t": ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_objects_are_stored_as_their_state_dict() -> None:
    flat = flatten({"counter": Counter()})
    assert flat.tree == {"counter": {"$": "object", "v": {"value": 3, "t": {"$": "t", "i": 0}}}}
    assert names(flat) == ["counter.t"]


def test_a_class_is_no_object_with_state() -> None:
    with pytest.raises(UnsupportedStateError, match=r'state\["c"\]'):
        flatten({"c": Counter})


def test_refusal_inside_an_object_names_the_way_there() -> None:
    counter = Counter()
    counter.value = object()  # type: ignore[assignment]
    with pytest.raises(UnsupportedStateError) as caught:
        flatten({"a": [counter]})
    assert caught.value.fqn == 'state["a"][0].state_dict()["value"]'


def test_an_object_that_contains_itself_is_refused() -> None:
    class Loop(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"me": self}

    with pytest.raises(UnsupportedStateError, match="contains itself"):
        flatten({"loop": Loop()})


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(ones(2), 0.1, 0, torch.qint8)


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([ones(1), ones(2)], layout=torch.jagged)


def _masked() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(ones(2))


REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": _quantized,
    "meta": lambda: torch.empty(2, device="meta"),
    "nested": _nested,
    "fake": _masked,
    "lazy parameter": lambda: nn.LazyLinear(3).weight,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_without_plain_bytes_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedStateError, match=r'^state\["a"\]\[1\]: cannot store a'):
        flatten({"a": [0, REFUSED[kind]()]})


def test_tensors_inside_a_function_transform_are_refused() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedStateError, match="function transform"):
            flatten({"x": x})
        return x

    torch.vmap(inner)(ones(2, 3))


def test_tensor_in_a_key_or_a_set_is_refused() -> None:
    with pytest.raises(UnsupportedStateError):
        flatten({"a": {ones(1)}})
    with pytest.raises(UnsupportedStateError):
        flatten({ones(1): 1})


def test_subclasses_that_are_plain_tensors_are_stored() -> None:
    class Named(nn.Parameter):
        pass

    class Tagged(torch.Tensor):
        pass

    state = {"p": Named(ones(2)), "t": ones(3).as_subclass(Tagged), "buffer": nn.Buffer(ones(1))}
    saved = Saved(state)
    assert same(saved.load(), {"p": ones(2), "t": ones(3), "buffer": ones(1)})


def test_a_failed_flatten_leaves_the_collector_as_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(UnsupportedStateError):
        flatten({"a": object()})
    assert gc.isenabled()


# Large values


@pytest.mark.parametrize(
    "value",
    [
        b"x" * 1025,
        bytearray(b"y" * 5000),
        np.arange(1000),
        np.asfortranarray(np.arange(1200).reshape(30, 40)),
        np.zeros(300, [("a", "<i4"), ("b", ">f8")]),
        np.array(["word"] * 200),
    ],
    ids=repr,
)
def test_large_values_go_to_the_data_section(value: Any) -> None:
    saved = Saved({"v": [value, (value,)]})
    assert [entry.kind for entry in saved.header.tensors] == [type(value).__name__] * 2
    again = saved.load()
    assert same(again, {"v": [value, (value,)]})
    if isinstance(value, np.ndarray):
        assert again["v"][0].flags.writeable


def test_small_values_stay_in_the_tree() -> None:
    assert flatten({"v": [b"x" * 1024, np.zeros(128), bytearray(10)]}).items == []


# Chunks


def test_local_chunks_are_stored_with_their_place() -> None:
    state = {"rect": LocalChunk(ones(2, 3), (4, 6), (2, 3)), "flat": LocalChunk(ones(5), (24,), (7,), (4, 6))}
    rect, flat = Saved(state).header.tensors
    assert (rect.chunk.global_shape, rect.chunk.offsets, rect.chunk.shape) == ((4, 6), (2, 3), (2, 3))
    assert flat.chunk.flat_of == (4, 6)


@pytest.mark.parametrize(
    "chunk",
    [
        LocalChunk(torch.ones(2, 3), (4, 6), (3, 3)),
        LocalChunk(torch.ones(2, 3), (4, 6), (0,)),
        LocalChunk(torch.ones(2), (7,), (0,), (2, 3)),
    ],
)
def test_chunks_outside_their_tensor_are_refused(chunk: LocalChunk) -> None:
    with pytest.raises(UnsupportedStateError, match=r'state\["a"\]: a malformed LocalChunk'):
        flatten({"a": chunk})


@pytest.mark.filterwarnings("ignore:Please use DTensor")
def test_a_sharded_tensor_of_several_local_shards_is_a_tuple_of_chunks(tmp_path: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        from torch.distributed._shard.sharded_tensor import Shard

        def sharded(*tensors: torch.Tensor) -> ShardedTensor:
            shards = [Shard.from_tensor_and_offsets(t, [2 * i, 0], 0) for i, t in enumerate(tensors)]
            return ShardedTensor._init_from_local_shards(shards, 2 * len(tensors), 3)

        state = {"one": sharded(ones(2, 3)), "two": sharded(ones(2, 3), ones(2, 3) * 2)}
        saved = Saved(state)
        assert [entry.name for entry in saved.header.tensors] == ["one", "two@0_0", "two@2_0"]
        target = {"one": sharded(torch.zeros(2, 3)), "two": sharded(torch.zeros(2, 3), torch.zeros(2, 3))}
        saved.restore(target)
        for key in state:
            for a, b in zip(state[key].local_shards(), target[key].local_shards(), strict=True):
                assert bits(a.tensor) == bits(b.tensor)
    finally:
        dist.destroy_process_group()


# Ties


def stored_nbytes(flat: FlatState) -> int:
    return sum(item.nbytes for item in flat.items)


def test_tied_weights_are_stored_once_and_come_back_tied() -> None:
    weight = nn.Parameter(torch.randn(3, 4))
    state = {"a": weight, "b": weight.detach(), "c": weight.t(), "d": weight[1:]}
    saved = Saved(state)
    assert names(saved.flat) == ["a"]
    loaded = saved.load()
    assert same(loaded, {k: v.detach() for k, v in state.items()})
    loaded["a"].fill_(7)
    assert all(bool((t == 7).all()) for t in loaded.values())


def test_a_view_before_its_base_is_still_a_view() -> None:
    base = torch.arange(10.0)
    saved = Saved([base[3:5], base])
    assert names(saved.flat) == ["1"]
    assert [view.of for view in saved.header.views] == ["1"]
    assert same(saved.load(), [base[3:5], base])


def test_neighbours_in_one_storage_are_not_tied() -> None:
    base = torch.arange(10.0)
    flat = flatten([base[:5], base[5:]])
    assert names(flat) == ["0", "1"]
    assert flat.views == []
    loaded = Saved([base[:5], base[5:]]).load()
    assert loaded[0].untyped_storage().nbytes() == 20


def test_overlapping_parts_are_stored_as_the_memory_they_cover() -> None:
    base = torch.arange(10.0)
    state = [base[:6], base[4:], base[::2]]
    saved = Saved(state)
    assert names(saved.flat) == ["0#storage"]
    assert stored_nbytes(saved.flat) == 40
    loaded = saved.load()
    assert same(loaded, state)
    loaded[0][4] = -1
    assert float(loaded[1][0]) == float(loaded[2][2]) == -1


def test_columns_of_a_wide_matrix_are_stored_one_by_one() -> None:
    wide = torch.randn(50, 100)
    state = [wide[:, 0], wide[:, 1], wide[:, 0]]
    saved = Saved(state)
    assert stored_nbytes(saved.flat) == 400
    assert [view.name for view in saved.header.views] == ["2"]
    assert same(saved.load(), state)


def test_an_expanded_tensor_stores_its_elements() -> None:
    expanded = torch.arange(3).expand(4, 3)
    saved = Saved({"e": expanded})
    assert stored_nbytes(saved.flat) == 96
    assert same(saved.load()["e"], expanded)


def test_an_expanded_tensor_beside_its_base_is_a_view_of_it() -> None:
    base = torch.arange(3)
    saved = Saved([base.expand(4, 3), base])
    assert stored_nbytes(saved.flat) == 24
    assert saved.load()[0].stride() == (0, 1)


def test_views_of_another_dtype_are_tied() -> None:
    base = torch.arange(4, dtype=torch.int32)
    saved = Saved([base, base.view(torch.uint8), base.view(torch.float32)])
    assert stored_nbytes(saved.flat) == 16
    loaded = saved.load()
    loaded[0][0] = -1
    assert loaded[1][:4].tolist() == [255] * 4


def test_tensors_that_share_an_array_are_tied() -> None:
    array = np.arange(6, dtype=np.float32)
    saved = Saved([torch.from_numpy(array), torch.from_numpy(array[2:4])])
    assert stored_nbytes(saved.flat) == 24


def test_channels_last_comes_back_as_channels_last() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    loaded = Saved({"x": image, "y": image}).load()
    assert same(loaded, {"x": image, "y": image})
    assert loaded["x"].is_contiguous(memory_format=torch.channels_last)
    assert loaded["x"].data_ptr() == loaded["y"].data_ptr()


def test_empty_tensors_are_not_tied() -> None:
    base = torch.arange(4.0)
    flat = flatten([base[:0], base[:0], torch.empty(0, 3), base[2:2]])
    assert len(flat.items) == 4


def test_the_name_of_shared_memory_is_free_for_others() -> None:
    base = torch.arange(10.0)
    state = OrderedDict([("a", base[:6]), ("a#storage", ones(1)), ("b", base[4:])])
    saved = Saved(state)
    assert len(saved.header.leaf_names) == 4
    assert same(saved.load(), state)
