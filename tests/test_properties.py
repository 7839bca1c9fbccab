"""Does any state come back, through real files, a real writer process and both ways of reading?"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import ckptengine as ck
from ckptengine.adapters.aliases import dense_stride
from ckptengine.adapters.leaves import same_strides
from ckptengine.adapters.state import flatten
from ckptengine.format.dtypes import safetensors_code
from ckptengine.testing.strategies import DTYPES, blank, shown, states
from tests.adapters.fake import bits
from tests.adapters.test_roundtrip import addresses
from tests.helpers.checkpoints import read_manifest
from tests.helpers.writers import LentWriter

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

# A save takes its time to be durable, and what a state may be is a lot to draw.
usual = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
many = settings(usual, max_examples=400)

_steps = count(1)


@dataclass(frozen=True, repr=False)
class Example:
    """A state that can be shown when it fails."""

    state: dict[Any, Any]

    def __repr__(self) -> str:
        return shown(self.state)


@pytest.fixture(scope="module", params=["raw", "zstd"])
def ckpt(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, lent_writers: None
) -> Iterator[ck.Checkpointer]:
    config = ck.Config(block_nbytes=4096, codec=request.param, keep_last=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptengine.monitor.WriterProcess", LentWriter)
        with ck.Checkpointer(tmp_path_factory.mktemp("root"), config=config) as made:
            yield made


def save(ckpt: ck.Checkpointer, state: Any) -> Path:
    return Path(ckpt.save(next(_steps), state).path)


# --- equality ------------------------------------------------------------------------------------


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    elif type(value) in (list, tuple):
        for inner in value:
            yield from leaves(inner)


def check_equal(found: Any, saved: Any, where: str = "state") -> None:
    """Equal in types, order, dtype, shape and bits, all the way down."""
    if isinstance(saved, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        assert (found.dtype, found.shape) == (saved.dtype, saved.shape), where
        assert bits(found) == bits(saved), where
        return
    assert type(found) is type(saved), f"{where}: {found!r} for {saved!r}"
    if isinstance(saved, dict):
        assert list(map(typed, found)) == list(map(typed, saved)), where
        for key, value in saved.items():
            check_equal(found[key], value, f"{where}[{key!r}]")
    elif isinstance(saved, list | tuple) and not isinstance(saved, torch.Size):
        assert len(found) == len(saved), where
        for index, value in enumerate(saved):
            check_equal(found[index], value, f"{where}[{index}]")
    elif isinstance(saved, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (saved.dtype, saved.shape), where
        assert content(found) == content(saved), where
    elif isinstance(saved, set | frozenset):
        assert sorted(map(typed, found)) == sorted(map(typed, saved)), where
    else:
        assert typed(found) == typed(saved), where


def content(array: np.ndarray[Any, Any] | np.generic) -> bytes:
    """The bytes of an array's elements, without what lies between the fields of a structure."""
    if array.dtype.names is None:
        return array.tobytes()
    return b"".join(content(array[name]) for name in array.dtype.names)


def typed(value: Any) -> str:
    """Tells apart what `==` does not: 1 and True, 0.0 and -0.0, one nan and another."""
    if isinstance(value, float):
        return f"float {struct.pack('>d', value).hex()}"
    if isinstance(value, complex):
        return f"complex {typed(value.real)} {typed(value.imag)}"
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(typed, value))}"
    return f"{type(value).__qualname__} {value!r}"


def check_layout(found: Any, saved: Any) -> None:
    """Dense strides and numpy's order are kept; tensors share memory exactly where they did."""
    pairs = list(zip(leaves(found), leaves(saved), strict=True))
    for tensor, source in pairs:
        stride = dense_stride(source) if not source.is_conj() else None
        if stride is not None:
            assert same_strides(tuple(source.shape), tensor.stride(), stride)
        elif source.is_contiguous():
            assert tensor.is_contiguous()
    for (one, its_source), (other, others_source) in combinations(pairs, 2):
        shared = bool(addresses(one) & addresses(other))
        if shared:
            assert addresses(its_source) & addresses(others_source)
            assert one.data_ptr() - other.data_ptr() == its_source.data_ptr() - others_source.data_ptr()
        elif its_source.numel() and not (its_source.is_conj() or others_source.is_conj()):
            assert not same_tensor(its_source, others_source)


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """One tensor under two names."""
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())


def check_numpy_order(found: Any, saved: Any) -> None:
    if isinstance(saved, np.ndarray):
        fortran = saved.flags.f_contiguous and not saved.flags.c_contiguous
        assert found.flags.f_contiguous if fortran else found.flags.c_contiguous
        assert found.flags.writeable
    elif isinstance(saved, dict):
        for key, value in saved.items():
            check_numpy_order(found[key], value)
    elif type(saved) in (list, tuple):
        for one, other in zip(found, saved, strict=True):
            check_numpy_order(one, other)


# --- the properties ------------------------------------------------------------------------------


def check_all(ckpt: ck.Checkpointer, state: dict[Any, Any]) -> None:
    path = save(ckpt, state)
    with ck.open_checkpoint(path) as c:
        for loaded in (c.load(), c.load(rank=0)):
            check_equal(loaded, state)
            check_layout(loaded, state)
            check_numpy_order(loaded, state)
    target = blank(state)
    before = [(id(tensor), tensor.data_ptr(), tensor.stride()) for tensor in leaves(target)]
    info = ckpt.restore(target)
    check_equal(target, state)
    assert [(id(tensor), tensor.data_ptr(), tensor.stride()) for tensor in leaves(target)] == before
    assert info.path == str(path)
    assert ck.verify(path).ok


_w = torch.arange(48, dtype=torch.float32).view(6, 8)


@usual
@example(
    Example({"": {"": torch.ones(2)}, ".": torch.zeros(2), "a.b": torch.ones(3), "a": {"b": torch.zeros(3)}})
)
@example(Example({1: torch.ones(1), "1": torch.zeros(1), None: 2, (1, "x"): [torch.tensor(3)]}))
@example(
    Example({"t": _w, "tied": _w, "t()": _w.t(), "rows": _w[2:4], "columns": _w[:, 1:3], "flat": _w.view(-1)})
)
@example(Example({"__pad__.0": torch.ones(1), "__metadata__": torch.ones(2), "$": torch.ones(3)}))
@example(
    Example({"e": torch.ones(2, 1).expand(2, 3), "w": _w.view(-1).unfold(0, 4, 2), "x": _w.view(-1)[4:20]})
)
@given(states().map(Example))
def test_any_state_comes_back(ckpt: ck.Checkpointer, made: Example) -> None:
    check_all(ckpt, made.state)


@pytest.mark.slow
@pytest.mark.timeout(900)
@many
@given(states(max_leaves=40).map(Example))
def test_any_large_state_comes_back(ckpt: ck.Checkpointer, made: Example) -> None:
    check_all(ckpt, made.state)


@settings(usual, max_examples=20)
@given(states().map(Example), st.data())
def test_a_state_is_restored_into_tensors_of_any_layout(
    ckpt: ck.Checkpointer, made: Example, data: st.DataObject
) -> None:
    """Not only into a target whose tensors are tied and laid out as they were saved."""

    def other(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            order = data.draw(st.permutations(range(value.dim())))
            base = torch.empty([value.shape[i] for i in order], dtype=value.dtype)
            return base.permute([order.index(i) for i in range(value.dim())])
        if isinstance(value, dict):
            return type(value)((key, other(inner)) for key, inner in value.items())
        return type(value)(map(other, value)) if type(value) in (list, tuple) else value

    save(ckpt, made.state)
    target = other(blank(made.state))
    ckpt.restore(target)
    check_equal(target, made.state)


@settings(usual, max_examples=20)
@given(states().map(Example))
def test_safetensors_reads_every_tensor_of_a_raw_shard(ckpt: ck.Checkpointer, made: Example) -> None:
    items = flatten(made.state).items
    path = save(ckpt, made.state)
    shard = path / read_manifest(path).shards[0].path
    if ckpt.config.codec == "zstd":
        assert shard.suffix == ".ckptz"
        return
    with safe_open(str(shard), framework="pt") as file:
        names = {name for name in file.keys() if not name.startswith("__pad__.")}  # noqa: SIM118
        assert names == {item.name for item in items}
        for item in items:
            found = file.get_tensor(item.name)
            if isinstance(item.source, bytes):
                assert bits(found) == item.source
            else:
                assert bits(found) == bits(item.source)
                if safetensors_code(item.dtype) is not None:
                    assert (str(found.dtype), tuple(found.shape)) == (f"torch.{item.dtype}", item.shape)
                else:
                    assert (found.dtype, found.dim()) == (torch.uint8, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(ckpt: ck.Checkpointer, dtype: torch.dtype) -> None:
    def memory() -> torch.Tensor:
        return (torch.arange(24 * dtype.itemsize, dtype=torch.uint8) % 2).view(dtype)

    whole = memory()
    state = {
        "whole": whole.view(2, 3, 4),
        "part": whole[3:9],
        "permuted": memory().view(2, 3, 4).permute(2, 0, 1),
        "gaps": memory().view(6, 4)[::2, 1:3],
        "expanded": memory()[:3].view(3, 1).expand(3, 4),
        "scalar": memory()[5],
        "empty": memory()[:0].view(0, 3),
    }
    check_all(ckpt, state)
