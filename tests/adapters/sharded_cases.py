"""What runs on every rank of `test_sharded.py`."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ckptengine.adapters.fsdp import training_state
from ckptengine.adapters.leaves import leaves_of
from ckptengine.adapters.restore import RestoreTarget
from ckptengine.errors import StateMismatchError, UnsupportedFormatError, UnsupportedStateError
from tests.adapters.fake import Saved, bits, read_all, same

CPU = torch.device("cpu")


class Block(nn.Module):
    """Odd sizes, so that flat parameters have padding and shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 5)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("not_kept", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(x)))

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": getattr(self, "note", "none")}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.note = state["note"]


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential(Block(), Block(), nn.Linear(5, 3))
    for block in made[:2]:
        block.note = f"made with {seed}"
        block.seen.fill_(seed)
    return made


def adamw(module: nn.Module) -> torch.optim.AdamW:
    decayed = [p for p in module.parameters() if p.ndim != 0]
    return torch.optim.AdamW([{"params": decayed, "lr": 1e-2}])


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> float:
    torch.manual_seed(dist.get_rank())
    loss = torch.tensor(0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(torch.randn(4, 5)).square().sum()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@contextlib.contextmanager
def no_communication() -> Iterator[None]:
    """Fails if this rank joins a collective: only one rank is in here at a time, the other waits for it to
    come out.
    """
    work: list[str] = []
    names = [
        name
        for name in dir(dist.distributed_c10d)
        if name.startswith(("all_", "broadcast", "gather", "scatter", "reduce"))
    ]
    saved = {name: getattr(dist.distributed_c10d, name) for name in names}

    def forbidden(name: str) -> Any:
        def call(*args: Any, **kw: Any) -> Any:
            work.append(name)
            raise AssertionError(f"{name} was called")

        return call

    for name in names:
        if callable(saved[name]) and not isinstance(saved[name], type):
            setattr(dist.distributed_c10d, name, forbidden(name))
            if getattr(dist, name, None) is saved[name]:
                setattr(dist, name, forbidden(name))
    try:
        yield
    finally:
        for name in names:
            setattr(dist.distributed_c10d, name, saved[name])
            if hasattr(dist, name):
                setattr(dist, name, saved[name])
    assert not work, work


def save(state: Any, **options: Any) -> Saved:
    with no_communication():
        return Saved(state, **options)


def restore(saved: Saved, target: Any, **options: Any) -> None:
    with no_communication():
        saved.restore(target, **options)


def tensors(state: Any, name: str = "") -> dict[str, bytes]:
    """Everything in a nested state, in bits."""
    if isinstance(state, DTensor):
        return {name: bits(state.to_local())}
    if isinstance(state, torch.Tensor):
        return {name: bits(state)}
    if isinstance(state, dict):
        return {k: v for key, value in state.items() for k, v in tensors(value, f"{name}.{key}").items()}
    return {}


def local_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """This rank's parameters, buffers and optimizer state as torch has them, without FSDP1's padding."""
    found = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if "not_kept" not in name:
            padding = getattr(tensor, "_shard_numel_padded", 0)
            found[name] = bits(_local(tensor)[: tensor.numel() - padding] if padding else _local(tensor))
    for key, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            found[f"{key}.{name}"] = (
                bits(_local(value)) if isinstance(value, torch.Tensor) else repr(value).encode()
            )
    return found


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def check_tiling(saved: Saved) -> None:
    """Over all ranks, the chunks of each sharded tensor cover it exactly."""
    chunks = {leaf.name: leaf.whole for leaf in leaves_of(saved.header) if leaf.placement is not None}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, chunks)
    by_name: dict[str, list[Any]] = defaultdict(list)
    for of_rank in gathered:
        for name, chunk in of_rank.items():
            by_name[name].append(chunk)
    assert by_name
    for name, parts in by_name.items():
        shape = parts[0].global_shape
        count = torch.zeros(shape, dtype=torch.int)
        for part in parts:
            assert part.global_shape == shape
            count[tuple(slice(o, o + s) for o, s in zip(part.offsets, part.shape, strict=True))] += 1
        assert bool((count == 1).all()), f"{name}: {parts}"
        assert prod(shape) == sum(part.nelem for part in parts)


def check_fresh_restore(wrap: Any, state_of: Any) -> Saved:
    """Train, save, restore into a new model and a new optimizer: bit-equal now, and after another step."""
    module = wrap(model(1))
    optimizer = adamw(module)
    train(module, optimizer)
    saved = save(state_of(module, optimizer))
    expected = local_state(module, optimizer)
    loss = train(module, optimizer, 1)
    after = local_state(module, optimizer)
    assert expected != after

    again = wrap(model(2))
    other = adamw(again)
    restore(saved, state_of(again, other))
    assert local_state(again, other) == expected
    assert train(again, other, 1) == loss
    assert local_state(again, other) == after

    # And into those same ones, which have an optimizer state by now.
    kept = {id(value) for value in _optimizer_tensors(other)}
    restore(saved, state_of(again, other))
    assert local_state(again, other) == expected
    assert {id(value) for value in _optimizer_tensors(other)} == kept
    assert train(again, other, 1) == loss
    blocks = [m for m in again.modules() if isinstance(m, Block)]
    assert [block.note for block in blocks] == ["made with 1"] * 2
    return saved


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def fsdp1(use_orig_params: bool, **options: Any) -> Any:
    def wrap(module: nn.Module) -> nn.Module:
        return FSDP(
            module,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
            device_id=CPU,
            **options,
        )

    return wrap


def paired(module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return {"step": 3, "train": training_state(module, optimizer)}


def bare(module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return {"model": module, "optimizer": optimizer}


NAMES = [f"{block}.{layer}.{kind}" for block in (0, 1) for layer in "ab" for kind in ("weight", "bias")]
NAMES += ["2.weight", "2.bias"]


def check_names(saved: Saved) -> None:
    """The original parameters under their own names, in the model as in the optimizer."""
    names = set(saved.header.leaf_names)
    assert {f"train.model.{name}" for name in NAMES} <= names
    assert not [name for name in names if "flat_param" in name or "_fsdp" in name], names
    keys = {name.split(".state.")[1].rsplit(".", 1)[0] for name in names if ".optimizer.state." in name}
    assert keys <= set(NAMES)


def fsdp1_original_parameters() -> None:
    saved = check_fresh_restore(fsdp1(True), paired)
    check_tiling(saved)
    check_names(saved)


def fsdp1_flat_parameters() -> None:
    saved = check_fresh_restore(fsdp1(False), paired)
    check_tiling(saved)
    check_names(saved)


def fsdp1_flat_and_original_parameters_are_stored_alike() -> None:
    chunks = []
    for use_orig_params in (True, False):
        module = fsdp1(use_orig_params)(model(1))
        saved = save(training_state(module))
        chunks.append(
            {
                leaf.name: leaf.chunk.shape and leaf.chunk.flat_of
                for leaf in leaves_of(saved.header)
                if leaf.chunk
            }
        )
    assert chunks[0].keys() == chunks[1].keys()


def fsdp1_bare_module_and_optimizer() -> None:
    for use_orig_params in (True, False):
        check_fresh_restore(fsdp1(use_orig_params), bare)


def fsdp1_shard_grad_op_and_no_shard() -> None:
    for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        for use_orig_params in (True, False):
            check_fresh_restore(fsdp1(use_orig_params, sharding_strategy=strategy), paired)


def fsdp1_with_a_device_mesh() -> None:
    check_fresh_restore(fsdp1(True, device_mesh=init_device_mesh("cpu", (2,))), paired)


def fsdp1_with_activation_checkpointing() -> None:
    def wrap(module: nn.Module) -> nn.Module:
        apply_activation_checkpointing(module, check_fn=lambda child: isinstance(child, Block))
        return FSDP(module, use_orig_params=True, device_id=CPU)

    check_names(check_fresh_restore(wrap, paired))
    check_fresh_restore(wrap, bare)


def fsdp1_mixed_precision() -> None:
    check_fresh_restore(fsdp1(True, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)), paired)


def fsdp1_before_the_first_forward() -> None:
    module = fsdp1(True)(model(1))
    saved = save(training_state(module))
    other = fsdp1(True)(model(2))
    restore(saved, training_state(other))
    x = torch.ones(2, 5)
    assert torch.equal(module(x), other(x))


def fsdp1_while_gathered() -> None:
    """A forward pass without a backward leaves the root's parameters gathered."""
    for use_orig_params in (True, False):
        module, again = fsdp1(use_orig_params)(model(1)), fsdp1(use_orig_params)(model(2))
        x = torch.ones(2, 5)
        with torch.no_grad():
            expected = module(x)
            assert not torch.equal(again(x), expected)
        saved = save({"m": module})
        restore(saved, {"m": again})
        with torch.no_grad():
            assert torch.equal(again(x), expected)


def fsdp2_while_gathered() -> None:
    module, again = fsdp2(model(1)), fsdp2(model(2))
    x = torch.ones(2, 5)
    with torch.no_grad():
        expected = module(x)
        assert not torch.equal(again(x), expected)
    restore(save({"m": module}), {"m": again})
    with torch.no_grad():
        assert torch.equal(again(x), expected)


def fsdp1_tied_and_ignored_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 5)
            self.block = Block()
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight
            self.ignored = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.block(self.ignored(self.embed(x))))

    def wrap(seed: int, use_orig_params: bool) -> nn.Module:
        torch.manual_seed(seed)
        tied = Tied()
        return FSDP(tied, ignored_modules=[tied.ignored], use_orig_params=use_orig_params, device_id=CPU)

    for use_orig_params in (True, False):
        states = []
        for seed in (1, 2):
            module = wrap(seed, use_orig_params)
            optimizer = torch.optim.AdamW(module.parameters())
            module(torch.arange(4)).sum().backward()
            optimizer.step()
            states.append((module, optimizer))
        saved = save(paired(*states[0]))
        names = set(saved.header.leaf_names)
        assert {"train.model.embed.weight", "train.model.head.weight", "train.model.ignored.weight"} <= names
        part = next(leaf for leaf in leaves_of(saved.header) if leaf.name == "train.model.embed.weight")
        if part.nbytes:
            assert [view.of for view in saved.header.views if view.name == "train.model.head.weight"] == [
                part.name
            ]
        restore(saved, paired(*states[1]))
        assert local_state(*states[0]) == local_state(*states[1])


def fsdp1_local_state_dict() -> None:
    """The dict that torch gives, with a ShardedTensor for each flat parameter and views of it."""
    for use_orig_params in (True, False):
        states = []
        for seed in (1, 2):
            module = fsdp1(use_orig_params)(model(seed))
            with FSDP.state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
                states.append(module.state_dict())
        saved = save({"model": states[0]})
        expected = _sharded_bits(states[0])
        assert expected != _sharded_bits(states[1])
        restore(saved, {"model": states[1]})
        assert _sharded_bits(states[1]) == expected
        check_tiling(saved)
        stored = sum(entry.nbytes for entry in saved.header.tensors)
        assert stored <= 4 * (43 * 2 + 10 + 3 * 2) + 8, "views of a flat parameter are stored once"


def _sharded_bits(state: dict[str, Any]) -> dict[str, bytes]:
    found = {}
    for name, value in state.items():
        if hasattr(value, "local_shards"):
            found[name] = b"".join(bits(shard.tensor) for shard in value.local_shards())
        elif isinstance(value, torch.Tensor):
            found[name] = bits(value)
    return found


def fsdp1_optimizer_of_another_model_is_refused() -> None:
    module = fsdp1(True)(model(1))
    with pytest.raises(UnsupportedStateError, match="not in the model"):
        save(paired(module, adamw(nn.Linear(2, 2))))


def fsdp1_other_parameter_groups_are_a_mismatch() -> None:
    module = fsdp1(True)(model(1))
    saved = save(paired(module, adamw(module)))
    params = list(module.parameters())
    other = torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}])
    with pytest.raises(StateMismatchError, match="2 parameter groups, in the checkpoint 1"):
        restore(saved, paired(module, other))


def training_state_loads_its_own_state_dict() -> None:
    for wrap in (fsdp1(True), fsdp1(False), fsdp2):
        module, again = wrap(model(1)), wrap(model(2))
        optimizer, other = adamw(module), adamw(again)
        train(module, optimizer)
        training_state(again, other).load_state_dict(training_state(module, optimizer).state_dict())
        assert local_state(module, optimizer) == local_state(again, other)
        assert train(module, optimizer) == train(again, other)


def fsdp2(module: nn.Module) -> nn.Module:
    for child in module.children():
        if isinstance(child, Block):
            fully_shard(child)
    return fully_shard(module)  # type: ignore[no-any-return]


def fsdp2_paired() -> None:
    saved = check_fresh_restore(fsdp2, paired)
    check_tiling(saved)
    check_names(saved)


def fsdp2_bare_module_and_optimizer() -> None:
    check_tiling(check_fresh_restore(fsdp2, bare))


def fsdp2_mixed_precision() -> None:
    def wrap(module: nn.Module) -> nn.Module:
        # The gathered parameters are bfloat16, what is stored is float32.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        return fully_shard(module, mp_policy=policy)  # type: ignore[no-any-return]

    check_fresh_restore(wrap, paired)


def fsdp2_replicated_and_sharded() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    check_fresh_restore(lambda module: fully_shard(module, mesh=mesh), paired)


def fsdp2_state_dict_of_tensors() -> None:
    """As DCP users do it: state dicts in, state dicts out."""
    module, again = fsdp2(model(1)), fsdp2(model(2))
    saved = save({"model": module.state_dict()})
    restore(saved, {"model": again.state_dict()})
    assert tensors(module.state_dict()) == tensors(again.state_dict())
    restore(save({"model": module}), {"model": again.state_dict()})
    restore(saved, {"model": again})


def ddp_paired() -> None:
    saved = check_fresh_restore(DistributedDataParallel, paired)
    assert "train.model.0.a.weight" in saved.header.leaf_names


def ddp_bare_module_and_optimizer() -> None:
    check_fresh_restore(DistributedDataParallel, bare)


def dtensors() -> None:
    """Uneven and empty shards, over meshes of one and two dimensions."""
    line = init_device_mesh("cpu", (2,))
    plane = init_device_mesh("cpu", (2, 1))
    cases: list[tuple[tuple[int, ...], Any, Any]] = [
        ((7, 5), line, [Shard(0)]),
        ((7, 5), line, [Shard(1)]),
        ((1, 4), line, [Shard(0)]),
        ((3,), line, [Shard(0)]),
        ((0, 3), line, [Shard(0)]),
        ((4, 6), plane, [Shard(0), Shard(1)]),
        ((5, 3), plane, [Shard(1), Replicate()]),
        ((4, 6), plane, [Shard(0), Shard(0)]),
    ]
    state, target = {}, {}
    for number, (shape, mesh, placements) in enumerate(cases):
        full = torch.arange(prod(shape), dtype=torch.float32).reshape(shape)
        state[f"t{number}"] = distribute_tensor(full, mesh, placements)
        target[f"t{number}"] = distribute_tensor(torch.full(shape, -1.0), mesh, placements)
    saved = save(state)
    check_tiling(
        Saved(
            {
                name: value
                for name, value in state.items()
                if value.numel() and "Replicate" not in repr(value.placements)
            }
        )
    )
    assert tensors(state) != tensors(target)
    restore(saved, target)
    assert tensors(state) == tensors(target)
    by_name = {entry.name: entry for entry in saved.header.tensors}
    assert by_name["t0"].placement == "Shard(0)"
    assert by_name["t0"].chunk.shape == ((4, 5) if dist.get_rank() == 0 else (3, 5))
    assert by_name["t2"].shape == ((1, 4) if dist.get_rank() == 0 else (0, 4))


def dtensor_whole_on_every_rank() -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"r": distribute_tensor(torch.arange(6.0), mesh, [Replicate()])}
    saved = save(state)
    (entry,) = saved.header.tensors
    assert entry.chunk is None
    assert entry.placement == "Replicate()"
    target = {"r": distribute_tensor(torch.zeros(6), mesh, [Replicate()])}
    restore(saved, target)
    assert tensors(state) == tensors(target)


def dtensor_partial_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(UnsupportedStateError, match=r'state\["a"\]\["b"\].*partial'):
        save({"a": {"b": partial}})


def dtensor_in_another_layout_is_a_mismatch() -> None:
    mesh = init_device_mesh("cpu", (2,))
    saved = save({"t": distribute_tensor(torch.arange(24.0).reshape(4, 6), mesh, [Shard(0)])})
    target = {"t": distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)])}
    with pytest.raises(StateMismatchError, match=r"t: the chunk of shape \(4, 3\)"):
        restore(saved, target)
    with pytest.raises(StateMismatchError, match="the whole tensor"):
        restore(saved, {"t": torch.zeros(4, 6)})


def build_gives_parts_to_the_reader() -> None:
    """`build` leaves putting chunks together to who calls it."""
    mesh = init_device_mesh("cpu", (2,))
    saved = save(
        {"t": distribute_tensor(torch.arange(24.0).reshape(4, 6), mesh, [Shard(0)]), "u": [torch.ones(2)]}
    )
    loaded = saved.load()
    assert loaded["t"].shape == (2, 6)
    assert same(loaded["u"], [torch.ones(2)])


# Replicas


def check_replicas(state: Any, target: Any) -> list[Saved]:
    """Save with each replica stored once, restore every rank from the shards of all. Returns the shards."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    saved = save(state, dedup_replicas=True, rank=rank, world_size=world_size)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, (saved.header, bytes(saved.data)))
    shards = []
    for header, data in gathered:
        shard = Saved.__new__(Saved)
        shard.header, shard.data = header, memoryview(data)
        shards.append(shard)
    with pytest.raises(UnsupportedFormatError) if saved.header.replicas else contextlib.nullcontext():
        RestoreTarget(target).match(saved.header)
    with no_communication():
        match = RestoreTarget(target).match(saved.header, others=lambda other: shards[other].header)
        read_all(match, shards.__getitem__)
        match.apply()
    return shards


def stored(shards: list[Saved]) -> list[int]:
    return [sum(entry.nbytes for entry in shard.header.tensors) for shard in shards]


def replicas_of_dtensors_are_stored_once() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sizes = (50, 40, 30, 20, 10)
    state = {str(n): distribute_tensor(torch.randn(n), mesh, [Replicate()]) for n in sizes}
    state["tied"] = state["50"]
    state["part"] = distribute_tensor(torch.randn(6), mesh, [Shard(0)])
    state["plain"] = torch.full((3,), float(dist.get_rank()))
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    shards = check_replicas(state, target)
    assert tensors(target) == tensors(state)
    assert sum(stored(shards)) == 4 * (sum(sizes) + 6 + 3 * len(shards))
    assert max(stored(shards)) <= 4 * (80 + 3 + 3)


def replicas_of_hybrid_shards_are_stored_once() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))

    def wrap(module: nn.Module) -> nn.Module:
        return fully_shard(module, mesh=mesh)  # type: ignore[no-any-return]

    module, again = wrap(model(1)), wrap(model(2))
    optimizer, other = adamw(module), adamw(again)
    train(module, optimizer)
    shards = check_replicas(training_state(module, optimizer), training_state(again, other))
    assert local_state(module, optimizer) == local_state(again, other)
    weights = sum(p.numel() for p in model(1).parameters())
    # Three times the weights, and what each rank has for itself: ten steps and two buffers of three.
    assert sum(stored(shards)) == 4 * (3 * weights + size * (10 + 6))
    assert max(stored(shards)) < 4 * 1.3 * 3 * weights / size + 4 * 16


def replicas_of_ddp_parameters_are_stored_once() -> None:
    module, again = DistributedDataParallel(model(1)), DistributedDataParallel(model(2))
    for number, buffer in enumerate(module.buffers()):
        buffer.fill_(dist.get_rank() + number)
    shards = check_replicas({"model": module}, {"model": again})
    assert tensors(again.state_dict()) == tensors(module.state_dict())
    weights = sum(p.numel() for p in model(1).parameters())
    assert sum(stored(shards)) == 4 * (weights + len(shards) * 6)
