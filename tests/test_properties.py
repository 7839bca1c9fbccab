"""Does any state come back, through real files, a real writer process and both ways of reading?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import ckptengine as ck
from ckptengine.adapters.state import flatten
from ckptengine.format.dtypes import safetensors_code
from ckptengine.testing.strategies import DTYPES, Stateful, blank, shown, states
from tests.adapters.fake import bits
from tests.helpers.checkpoints import read_manifest
from tests.helpers.equality import check_equal, check_layout, check_numpy_order, leaves, pieces
from tests.helpers.writers import LentWriter

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

# A save takes its time to be durable, and what a state may be is a lot to draw.
usual = settings(
    deadline=None,
    max_examples=30,
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


# --- the properties ------------------------------------------------------------------------------


def check_all(ckpt: ck.Checkpointer, state: dict[Any, Any]) -> None:
    path = save(ckpt, state)
    with ck.open_checkpoint(path) as c:
        for rank in (None, 0):
            loaded = c.load(rank)
            check_equal(loaded, state)
            check_layout(loaded, state, chunks=rank is not None)
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
    Example(
        {"rows": _w[1:4], "overlapping": _w[2:5], "t()": _w[3:].t(), "again": _w[1:4], "sparse": _w[::4, 0]}
    )
)
@example(
    Example({"e": torch.ones(2, 1).expand(2, 3), "w": _w.view(-1).unfold(0, 4, 2), "x": _w.view(-1)[4:20]})
)
@given(states().map(Example))
def test_any_state_comes_back(ckpt: ck.Checkpointer, made: Example) -> None:
    check_all(ckpt, made.state)


@settings(usual, max_examples=8)
@example(Example({"part": ck.LocalChunk(_w[2:4], (6, 8), (2, 0)), "tied": _w[2:4], "row": _w[3]}))
@given(states(parts=True).map(Example))
def test_a_ranks_parts_come_back(ckpt: ck.Checkpointer, made: Example) -> None:
    """Chunks that no other rank completes: they come back to their rank, and the rest is missed elsewhere."""
    path = save(ckpt, made.state)
    with ck.open_checkpoint(path) as c:
        loaded = c.load(rank=0)
        check_equal(loaded, made.state)
        check_layout(loaded, made.state)
        whole = all(piece.chunk.is_whole for piece in pieces(made.state) if isinstance(piece, ck.LocalChunk))
        if not whole:
            with pytest.raises(ck.CorruptCheckpointError, match="not whole: no rank holds"):
                c.load()
    assert ck.verify(path).ok == whole
    target = blank(made.state)
    ckpt.restore(target)
    check_equal(target, made.state)


@pytest.mark.slow
@pytest.mark.timeout(900)
@many
@given(states(max_leaves=40).map(Example))
def test_any_large_state_comes_back(ckpt: ck.Checkpointer, made: Example) -> None:
    check_all(ckpt, made.state)


@settings(usual, max_examples=12)
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
        if isinstance(value, ck.LocalChunk):
            return replace(value, tensor=other(value.tensor))
        if isinstance(value, Stateful):
            return Stateful(other(value.state))
        if isinstance(value, dict):
            return type(value)((key, other(inner)) for key, inner in value.items())
        return type(value)(map(other, value)) if type(value) in (list, tuple) else value

    save(ckpt, made.state)
    target = other(blank(made.state))
    ckpt.restore(target)
    check_equal(target, made.state)


@settings(usual, max_examples=12)
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
