"""What runs on every rank of `test_reshard.py`: one group saves, another restores into another layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ckptengine as ck
from ckptengine.adapters import wrappers
from ckptengine.adapters.tensors import LocalChunk, extract
from ckptengine.format.geometry import Chunk
from ckptengine.format.names import step_dirname
from tests.adapters.fake import bits
from tests.adapters.sharded_cases import adamw, fsdp1, fsdp2, model, train
from tests.dist.cases import checkpointer, rank


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# --- tensors of every kind -----------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (12, 10),
    "uneven": (7, 5),
    "one row": (1, 6),
    "vector": (11,),
    "cube": (4, 6, 8),
    "wide": (3, 4000),
    "scalar": (),
    "empty": (0, 4),
}


def full(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(prod(shape), dtype=torch.float32).reshape(shape) + len(name)


# Each new mesh has process groups of its own, and these threads.
@cache
def _line() -> DeviceMesh:
    return init_device_mesh("cpu", (size(),))


@cache
def _plane() -> DeviceMesh:
    rows = 2 if size() % 2 == 0 else 1
    return init_device_mesh("cpu", (rows, size() // rows), mesh_dim_names=("a", "b"))


@cache
def _half() -> DeviceMesh:
    """Without rank 0, which has nothing of what is on it."""
    return DeviceMesh("cpu", list(range(size() // 2, size())))


def _distributed(mesh: Callable[[], DeviceMesh], *placements: Placement) -> Callable[[torch.Tensor], Any]:
    def make(tensor: torch.Tensor) -> Any:
        fitting = [
            placement if placement.is_replicate() or placement.dim < tensor.dim() else Replicate()
            for placement in placements
        ]
        return distribute_tensor(tensor, mesh(), fitting)

    return make


def _sharded(tensor: torch.Tensor) -> Any:
    """A ShardedTensor of which a rank has the rows that its number is a divisor's rest of: several, or none."""
    if not tensor.dim() or not tensor.numel():
        return tensor
    shards = [
        LocalShard.from_tensor_and_offsets(tensor[i : i + 1].clone(), [i, *[0] * (tensor.dim() - 1)], rank())
        for i in range(len(tensor))
        if i % size() == rank()
    ]
    return init_from_local_shards(shards, *tensor.shape)


LAYOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": lambda tensor: tensor.clone(),
    "rows": _distributed(_line, Shard(0)),
    "columns": _distributed(_line, Shard(1)),
    "last": _distributed(_line, Shard(2)),
    "replicated": _distributed(_line, Replicate()),
    "hybrid": _distributed(_plane, Replicate(), Shard(0)),
    "hybrid columns": _distributed(_plane, Shard(1), Replicate()),
    "tensor parallel": _distributed(_plane, Shard(0), Shard(1)),
    "twice": _distributed(_plane, Shard(0), Shard(0)),
    "sharded tensor": _sharded,
    "not on all ranks": _distributed(_half, Shard(0)),
}


def save_layout(root: str, layout: str, step: int) -> None:
    state = {name: LAYOUTS[layout](full(name)) for name in SHAPES}
    with checkpointer(root) as ckpt:
        ckpt.save(step, {"w": state, "epoch": 3})


def wrong_for_a_reader(root: str, step: int) -> list[str]:
    """What one process does not see as it was saved."""
    path = f"{root}/{step_dirname(step)}"
    wrong = [f"damage: {damage}" for damage in ck.verify(path).damages]
    with ck.open_checkpoint(path) as whole:
        state = whole.load()["w"]
        for name in SHAPES:
            for found in (whole.get_tensor(f"w.{name}"), whole.get_slice(f"w.{name}")[...], state[name]):
                if bits(found) != bits(full(name)):
                    wrong.append(name)
    return wrong


def restore_layouts(root: str, step: int, first: int) -> list[str]:
    """Into every third layout from the first on; returns those that do not hold what they should."""
    wrong = []
    with checkpointer(root) as ckpt:
        for layout, make in list(LAYOUTS.items())[first::3]:
            target = {name: make(torch.full_like(full(name), -1.0)) for name in SHAPES}
            state = {"w": target, "epoch": 0}
            info = ckpt.restore(state, step=step)
            assert info.unexpected == info.missing == ()
            assert state["epoch"] == 3
            wrong += [
                f"{layout}: {name}" for name in SHAPES if _bits(target[name]) != _bits(make(full(name)))
            ]
    return wrong


def _bits(value: Any) -> list[bytes]:
    if isinstance(value, ShardedTensor):
        return [bits(shard.tensor) for shard in value.local_shards()]
    return [bits(value.to_local() if isinstance(value, DTensor) else value)]


# --- models and their optimizers -----------------------------------------------------------------


def _hybrid(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=_plane())  # type: ignore[no-any-return]


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp1 original": fsdp1(True),
    "fsdp1 flat": fsdp1(False),
    "fsdp1 whole": fsdp1(True, sharding_strategy=ShardingStrategy.NO_SHARD),
    "fsdp2": fsdp2,
    "fsdp2 hybrid": _hybrid,
    "ddp": DistributedDataParallel,
    "plain": lambda module: module,
}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
}


def _step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Alike on every rank and in every world, as far as sums of equal gradients are."""
    torch.manual_seed(0)
    optimizer.zero_grad()
    module(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()


def save_training(root: str, wrap: str, optimizer: str, number: int) -> None:
    module = WRAPS[wrap](model(1))
    made = OPTIMIZERS[optimizer](module)
    for _ in range(2):
        _step(module, made)
    with checkpointer(root) as ckpt:
        ckpt.save(number, {"train": ck.training_state(module, made), "step": 2})


def restore_training(root: str, optimizer: str, number: int) -> dict[str, int]:
    """Into every way to wrap a model. Returns how many tensors were compared with the whole ones."""
    compared = {}
    with ck.open_checkpoint(f"{root}/{step_dirname(number)}") as whole:
        for wrap, make in WRAPS.items():
            if wrap == "fsdp2 hybrid" and size() == 1:
                continue
            module = make(model(2))
            made = OPTIMIZERS[optimizer](module)
            state = {"train": ck.training_state(module, made), "step": 0}
            for _ in range(2):  # into a new optimizer, and into one with a state
                with checkpointer(root) as ckpt:
                    info = ckpt.restore(state, step=number)
                assert info.missing == info.unexpected == ()
                assert state["step"] == 2
                compared[wrap] = _compare(whole, state["train"].state(), "train")
                _step(module, made)
    return compared


def save_with_wrappers_in_the_names(root: str) -> None:
    """As `training_state` once named what is in a DDP module."""
    module = DistributedDataParallel(model(1))
    made = adamw(module)
    for _ in range(2):
        _step(module, made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrappers, "plain_names", lambda module, names: {})
        with checkpointer(root) as ckpt:
            ckpt.save(1, {"train": ck.training_state(module, made)})
            ckpt.save(2, {"train": ck.training_state(module.module, made)})


def restore_from_wrappers_in_the_names(root: str) -> list[int]:
    """Into every way to wrap a model; whatever is in step 1 is in step 2 too, under plain names."""
    compared = []
    with ck.open_checkpoint(f"{root}/{step_dirname(1)}") as old:
        assert "train.model.module.0.a.weight" in old.keys()
    with ck.open_checkpoint(f"{root}/{step_dirname(2)}") as whole:
        for wrap, make in WRAPS.items():
            if wrap == "fsdp2 hybrid" and size() == 1:
                continue
            module = make(model(2))
            state = {"train": ck.training_state(module, adamw(module))}
            with checkpointer(root) as ckpt:
                info = ckpt.restore(state, step=1)
            assert info.missing == info.unexpected == ()
            compared.append(_compare(whole, state["train"].state(), "train"))
    return compared


def _compare(whole: Any, state: Any, name: str) -> int:
    """Each part of a state with the same part of what was saved."""
    if isinstance(state, torch.Tensor | LocalChunk):
        expected = whole.get_tensor(name)
        for local in extract(state):
            assert bits(local.tensor) == bits(part(expected, local.chunk)), name
        return 1
    if isinstance(state, dict):
        return sum(_compare(whole, value, f"{name}.{key}") for key, value in state.items())
    return 0


def part(tensor: torch.Tensor, chunk: Chunk | None) -> torch.Tensor:
    if chunk is None:
        return tensor
    if chunk.flat_of is not None:
        tensor = tensor.reshape(-1)
    bounds = zip(chunk.offsets, chunk.shape, strict=True)
    return tensor[tuple(slice(at, at + n) for at, n in bounds)]


def training_goes_on(root: str, wrap: str, first: bool) -> float:
    """Two steps, a save; or a restore, one more step, and its loss."""
    module = WRAPS[wrap](model(1 if first else 2))
    optimizer = adamw(module)
    with checkpointer(root) as ckpt:
        state = {"train": ck.training_state(module, optimizer)}
        if first:
            for _ in range(2):
                _step(module, optimizer)
            ckpt.save(1, state)
        else:
            ckpt.restore(state)
        _step(module, optimizer)
    torch.manual_seed(1)
    return float(module(torch.randn(4, 5)).square().sum().detach())


# --- FSDP1's own dicts ---------------------------------------------------------------------------


def _local_state(seed: int) -> dict[str, Any]:
    if size() == 1:
        # FSDP flattens nothing there: as it would, and as it names it.
        parts = dict(model(seed).named_children())
        flat = {f"{name}._flat_param": part for name, part in parts.items() if name != "2"}
        return {
            name: torch.cat([param.detach().reshape(-1) for param in part.parameters()])
            for name, part in ({"_flat_param": parts["2"]} | flat).items()
        }
    module = fsdp1(False)(model(seed))
    with FSDP.state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
        return dict(module.state_dict())


def save_local_state_dict(root: str) -> None:
    with checkpointer(root) as ckpt:
        ckpt.save(1, {"model": _local_state(1)})


def restore_local_state_dict(root: str) -> int:
    target, expected = _local_state(2), _local_state(1)
    flat = [name for name in target if name.endswith("_flat_param")]
    assert [_bits(target[name]) for name in flat] != [_bits(expected[name]) for name in flat]
    with checkpointer(root) as ckpt:
        ckpt.restore({"model": {name: target[name] for name in flat}}, strict=False)
    assert [_bits(target[name]) for name in flat] == [_bits(expected[name]) for name in flat]
    return len(flat)


# --- values, damage, errors ----------------------------------------------------------------------


def own_state(of_rank: int, ranks: int) -> dict[str, Any]:
    rows = torch.arange(40.0).reshape(20, 2).chunk(ranks)
    start = of_rank * -(-20 // ranks)
    mine = LocalChunk(rows[of_rank].clone(), (20, 2), (start, 0))
    return {"w": mine, "rng": torch.full((5,), of_rank), "seen": 100 * of_rank, "lr": 0.5}


def save_own(root: str, steps: list[int]) -> None:
    with checkpointer(root) as ckpt:
        for step in steps:
            ckpt.save(step, own_state(rank(), size()))


def restore_whole(root: str) -> ck.RestoreInfo:
    target = {"w": torch.zeros(20, 2), "lr": 0.0}
    with checkpointer(root) as ckpt:
        info = ckpt.restore(target, strict=False)
    assert torch.equal(target["w"], torch.arange(40.0).reshape(20, 2))
    assert target["lr"] == 0.5
    return info


def restore_own_is_refused(root: str) -> str:
    target = own_state(0, 1) | {"w": torch.zeros(20, 2)}
    with checkpointer(root) as ckpt, pytest.raises(ck.StateMismatchError) as caught:
        ckpt.restore(target)
    assert not target["w"].any()
    return str(caught.value)


def restore_with_another_layout_on(odd: int, root: str) -> tuple[int, float]:
    """As many ranks as saved: one of them wants all of a tensor, the others what they had."""
    target: dict[str, Any] = own_state(rank(), size())
    for value in (target["w"].tensor, target["rng"]):
        value.zero_()
    if rank() == odd:
        target["w"] = torch.zeros(20, 2)
    with checkpointer(root) as ckpt:
        ckpt.restore(target)
    assert torch.equal(target["rng"], torch.full((5,), rank()))
    local = target["w"] if rank() == odd else target["w"].tensor
    return target["seen"], float(local.sum())


def restore_mismatched_on(odd: int, root: str) -> str:
    target: dict[str, Any] = {"w": torch.zeros(20, 3 if rank() == odd else 2), "lr": 0.0}
    with checkpointer(root) as ckpt, pytest.raises(ck.StateMismatchError) as caught:
        ckpt.restore(target, strict=False)
    assert not target["w"].any()
    assert caught.value.rank == odd
    return str(caught.value)


def restore_without_a_place(root: str) -> str:
    with checkpointer(root) as ckpt, pytest.raises(ck.StateMismatchError) as caught:
        ckpt.restore({"w": torch.zeros(20, 2)} | ({"lr": 0.0} if rank() == 0 else {}))
    return str(caught.value)


def pieces_of_a_pipeline(root: str, save: bool) -> list[float]:
    """Twelve layers, of which each rank has some."""
    mine = [layer for layer in range(12) if layer * size() // 12 == rank()]
    state = {"layers": {str(layer): torch.full((3,), float(layer) if save else -1.0) for layer in mine}}
    with checkpointer(root) as ckpt:
        if save:
            ckpt.save(1, state)
        else:
            ckpt.restore(state)
    return [float(tensor[0]) for tensor in state["layers"].values()]
