"""Any state of tensors comes back: built anew, and into targets of any layout."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptengine.adapters.items import dense_stride
from ckptengine.format import dtypes
from tests.adapters.fake import Saved, bits, destinations, same

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = sorted(name for name in dtypes._DTYPES if hasattr(torch, name))
POOL_NBYTES = 96


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@st.composite
def recipes(draw: st.DrawFn) -> tuple[Any, ...]:
    """How to make a tensor of one of three pieces of memory: (pool, dtype, offset, shape, stride, is a
    Parameter).
    """
    name = draw(
        st.sampled_from(["float32", "int64", "uint8", "bfloat16", "complex64", draw(st.sampled_from(DTYPES))])
    )
    room = POOL_NBYTES // dtypes.itemsize(name)
    shape: list[int] = []
    stride: list[int] = []
    reach = 1
    kind = draw(st.sampled_from(["c", "permuted", "any"]))
    if kind == "any":
        for _ in range(draw(st.integers(0, 3))):
            size, step = draw(st.integers(0, 3)), draw(st.integers(0, 5))
            if reach + max(size - 1, 0) * step <= room:
                reach += max(size - 1, 0) * step
                shape.append(size)
                stride.append(step)
    else:
        for _ in range(draw(st.integers(0, 3))):
            size = draw(st.integers(0, 4))
            if reach * max(size, 1) <= room:
                shape.insert(0, size)
                stride.insert(0, reach)
                reach *= max(size, 1)
        if kind == "permuted" and shape:
            order = draw(st.permutations(range(len(shape))))
            shape, stride = [shape[i] for i in order], [stride[i] for i in order]
    offset = draw(st.integers(0, room - reach) | st.just(0))
    return draw(st.integers(0, 2)), name, offset, tuple(shape), tuple(stride), draw(st.booleans())


def pools(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (POOL_NBYTES,), dtype=torch.uint8, generator=generator) for _ in range(3)]


def make(recipe: tuple[Any, ...], memory: list[torch.Tensor]) -> torch.Tensor:
    pool, name, offset, shape, stride, is_parameter = recipe
    dtype = torch_dtype(name)
    tensor = torch.empty(0, dtype=dtype).set_(memory[pool].untyped_storage(), offset, shape, stride)
    if is_parameter and (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1:
        return torch.nn.Parameter(tensor)
    return tensor


def addresses(tensor: torch.Tensor) -> set[int]:
    """Of all bytes of all elements."""
    if not tensor.numel():
        return set()
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    itemsize = tensor.element_size()
    return {tensor.data_ptr() + int(o) * itemsize + i for o in offsets.flatten() for i in range(itemsize)}


def nested(tensors: list[torch.Tensor]) -> dict[Any, Any]:
    return {
        "a": {"b": tensors[:2], 3: tuple(tensors[2:4])},
        "c": {str(i): t for i, t in enumerate(tensors[4:])},
    }


def flat(state: dict[Any, Any]) -> list[torch.Tensor]:
    return [*state["a"]["b"], *state["a"][3], *state["c"].values()]


@settings(max_examples=200)
@given(st.lists(recipes(), min_size=1, max_size=8), st.integers(0, 2**30))
def test_tensors_come_back_with_bits_strides_and_ties(made: list[tuple[Any, ...]], seed: int) -> None:
    memory = pools(seed)
    originals = [make(recipe, memory) for recipe in made]
    saved = Saved(nested(originals))
    loaded = flat(saved.load())
    for original, again in zip(originals, loaded, strict=True):
        assert same(original.detach(), again)
        stride = dense_stride(original)
        if stride is not None and again.numel():
            assert again.stride() == stride or not again.is_contiguous()
    for i, a in enumerate(originals):
        for j, b in enumerate(originals[:i]):
            tied = (a.data_ptr(), a.dtype, a.shape, a.stride()) == (
                b.data_ptr(),
                b.dtype,
                b.shape,
                b.stride(),
            )
            shared = bool(addresses(loaded[i]) & addresses(loaded[j]))
            if tied and a.numel() and not a.requires_grad:
                assert shared
            assert not shared or addresses(a) & addresses(b)
    assert saved.flat.nbytes <= sum(t.numel() * t.element_size() for t in originals)


@settings(max_examples=200)
@given(
    st.lists(recipes(), min_size=1, max_size=8),
    st.integers(0, 2**30),
    st.sampled_from(["same", "dense", "tied"]),
)
def test_tensors_come_back_into_targets_of_any_layout(
    made: list[tuple[Any, ...]], seed: int, layout: str
) -> None:
    memory = pools(seed)
    originals = [make(recipe, memory) for recipe in made]
    saved = Saved(nested(originals))
    others = pools(seed + 1)
    if layout == "tied":
        # Sharing memory exactly as the saved ones did.
        targets = [make(recipe, others) for recipe in made]
    elif layout == "same":
        # Of the same strides, each in memory of its own.
        targets = [make(recipe, pools(seed + 1)) for recipe in made]
    else:
        targets = [torch.zeros(t.shape, dtype=torch.uint8).to(torch.uint8) for t in originals]
        targets = [torch.empty(t.shape, dtype=t.dtype) for t in originals]
    state = nested(targets)
    match = saved.restore(state)
    assert [a is b for a, b in zip(flat(state), targets, strict=True)] == [True] * len(targets)
    for original, target in zip(originals, targets, strict=True):
        assert bits(original) == bits(target)
    if layout == "tied":
        read = sum(d.stop - d.start for d in destinations(match))
        # Those that may lie on themselves, or on others, are read once more to be checked.
        assert read <= 2 * saved.flat.nbytes * len(made)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name: str) -> None:
    dtype = torch_dtype(name)
    memory = torch.arange(24 * dtype.itemsize, dtype=torch.uint8)
    state = {
        "whole": memory.view(dtype),
        "permuted": memory.clone().view(dtype).view(4, 6).t(),
        "strided": memory.clone().view(dtype).view(4, 6)[:, ::2],
        "scalar": memory.clone().view(dtype)[3],
        "empty": memory.clone().view(dtype)[:0],
    }
    saved = Saved(state)
    assert same(saved.load(), state)
    assert saved.load()["permuted"].stride() == (1, 6)
    target = {key: torch.empty_strided(t.shape, t.stride(), dtype=dtype) for key, t in state.items()}
    saved.restore(target)
    assert same(target, state)


def test_conjugated_and_negated_views_are_stored_as_their_values() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conj": x.conj(), "neg": x.conj().imag, "plain": x}
    saved = Saved(state)
    loaded = saved.load()
    assert same(loaded["conj"], torch.tensor([1 - 2j, 3 + 4j]))
    assert same(loaded["neg"], torch.tensor([-2.0, 4.0]))
    y = torch.zeros(2, dtype=torch.complex64)
    z = torch.zeros(2, dtype=torch.complex64)
    target = {"conj": y.conj(), "neg": z.conj().imag, "plain": torch.zeros(2, dtype=torch.complex64)}
    saved.restore(target)
    assert same(target["conj"].resolve_conj(), loaded["conj"])
    assert same(y, x)
    assert same(target["neg"].resolve_neg(), loaded["neg"])


def test_a_snapshot_does_not_change_with_values_and_arrays() -> None:
    import numpy as np

    from ckptengine.adapters.state import flatten

    inner, array, data = [1, 2], np.zeros(1000), bytearray(5000)
    state = {"list": inner, "array": array, "data": data, "dict": {"k": inner}}
    flat_state = flatten(state)
    before = pickle.dumps((flat_state.tree, [item.source for item in flat_state.items]))
    inner.append(3)
    array[:] = 1
    data[:] = b"x" * 5000
    state["dict"]["k"] = None  # type: ignore[index]
    assert pickle.dumps((flat_state.tree, [item.source for item in flat_state.items])) == before
