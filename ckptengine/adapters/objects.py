"""How is the state of an object taken, and given back?

An object with `state_dict` and `load_state_dict` is stored as what its `state_dict()` returns. On restore an
object is either *closed*, a module, whose tensors are all there and must match; or *open*, an optimizer or
anything else, which takes whatever was stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from functools import cache
from inspect import signature
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptengine.adapters import fsdp1, wrappers
from ckptengine.adapters.leaves import Leaf
from ckptengine.adapters.replicas import Replication
from ckptengine.adapters.tensors import Local, LocalChunk, chunk_of_dtensor, extract, torch_dtype
from ckptengine.errors import StateMismatchError


def is_stateful(value: Any) -> bool:
    """Is the value an object that is stored as its `state_dict()`?"""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def state_dict_of(value: Any) -> Any:
    """The object's state, without communication."""
    if isinstance(value, nn.Module):
        return module_state(value)
    return value.state_dict()


def optimizers_of(value: Any) -> list[torch.optim.Optimizer]:
    """The optimizers whose state is in the object's."""
    if isinstance(value, torch.optim.Optimizer):
        return [value]
    return value.optimizers() if isinstance(value, StatefulAdapter) else []


def module_state(module: nn.Module) -> Any:
    """`module.state_dict()`; with FSDP1 inside, its flattened parameters as `LocalChunk`s under their own
    names.
    """
    if not fsdp1.has_fsdp1(module):
        return module.state_dict()
    named, _ = fsdp1.named_state(module)
    return OrderedDict((name, _detached(value)) for name, value in named.items())


def is_extra_state(key: Any) -> bool:
    """Is it a module's own affair, of any type and size, even if it is a tensor?"""
    return isinstance(key, str) and key.rpartition(".")[2] == "_extra_state"


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


class Adapter(Protocol):
    """An object as a restore target. Once per restore: `state`, `problems` and, after the read, `load`."""

    def parts(self) -> dict[str, Any] | None:
        """The objects it is made of, each restored by itself; None if it is one."""

    def state(self) -> Any:
        """What the object holds now."""

    def problems(self, loaded: Any) -> list[str]:
        """Why `loaded` (whose tensors are not filled yet) cannot be loaded; for open objects."""

    def parameter_names(self) -> list[str]:
        """If its state is keyed by names of a model's parameters: these."""

    def fresh(self, path: tuple[Any, ...], leaf: Leaf) -> Any:
        """Something to fill for a stored tensor that the object has no place for yet; None: a plain tensor
        will do.
        """

    def load(self, loaded: Any) -> None:
        """Open: take the whole state. Closed: take the entries that are not in place already."""


def adapter(value: Any) -> Adapter:
    if isinstance(value, nn.Module):
        return ModuleAdapter(value)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerAdapter(value)
    return value if isinstance(value, StatefulAdapter | PlainModule) else AnyAdapter(value)


class _Whole:
    """What most adapters have in common."""

    def parts(self) -> dict[str, Any] | None:
        return None

    def problems(self, loaded: Any) -> list[str]:
        return []

    def parameter_names(self) -> list[str]:
        return []

    def fresh(self, path: tuple[Any, ...], leaf: Leaf) -> Any:
        return None


class ModuleAdapter(_Whole):
    """A module, under the names that it has in its own state."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._storages: set[int] | None = None

    def state(self) -> Any:
        if fsdp1.has_fsdp1(self.module):
            fsdp1.reshard(self.module)
        return module_state(self.module)

    def buffers(self) -> set[str]:
        """The names that buffers have in the state."""
        return {
            f"{in_state}{name}"
            for in_state, _, one in wrappers.prefixes(self.module)
            for name in one._buffers
        }

    def otherwise_named(self, state: Iterable[str], stored: Collection[str]) -> dict[str, str]:
        """What was stored under another name than it has here, for its wrappers only: by the former, the
        latter. state: the names here."""
        plain = wrappers.plain_names(self.module, state)
        here = {name for name in plain if name not in stored}
        return {plain[name]: name for name in here if plain[name] in stored and plain[name] not in plain}

    def owns(self, value: Any) -> bool:
        """Is a tensor of the module's state one of its own, so that filling it fills the module?"""
        if isinstance(value, LocalChunk):
            return True
        if self._storages is None:
            own = (*self.module.parameters(), *self.module.buffers())
            self._storages = {_storage(local.tensor) for tensor in own for local in _parts(tensor)}
        return all(
            not local.tensor.numel() or _storage(local.tensor) in self._storages for local in _parts(value)
        )

    def load(self, loaded: Any) -> None:
        if not loaded:
            return
        if fsdp1.has_fsdp1(self.module):
            left = fsdp1.set_extra_state(self.module, loaded)
            if left:
                raise StateMismatchError(
                    "an FSDP module's state holds what is neither parameter, buffer nor extra state",
                    unexpected=tuple(left),
                )
            return
        self.module.load_state_dict(loaded, strict=False)


class PlainModule(ModuleAdapter):
    """A module under plain names, whatever wraps it or modules in it; see `wrappers`. It is an object of its
    own in a state."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._own_names: dict[str, str] = {}

    def state(self) -> Any:
        return self._under_plain_names(super().state())

    def state_dict(self) -> Any:
        return self._under_plain_names(module_state(self.module))

    def _under_plain_names(self, state: Any) -> Any:
        plain = wrappers.plain_names(self.module, state)
        if not plain:
            return state
        self._own_names = {other: name for name, other in plain.items()}
        return OrderedDict((plain[name], value) for name, value in state.items())

    def buffers(self) -> set[str]:
        return {
            name
            for in_state, plain, one in wrappers.prefixes(self.module)
            for buffer in one._buffers
            for name in (f"{in_state}{buffer}", f"{plain}{buffer}")
        }

    def otherwise_named(self, state: Iterable[str], stored: Collection[str]) -> dict[str, str]:
        return wrappers.known_by_another_name(stored, set(state))

    def load(self, loaded: Any) -> None:
        super().load({self._own_names.get(name, name): value for name, value in loaded.items()})

    def load_state_dict(self, state: Any) -> None:
        self.load(state)


def _parts(value: Any) -> list[Local]:
    try:
        return extract(value, in_place=True)
    except ValueError:
        # No target for a restore, and reported as that.
        return []


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class AnyAdapter(_Whole):
    def __init__(self, value: Any) -> None:
        self._value = value

    def state(self) -> Any:
        return self._value.state_dict()

    def load(self, loaded: Any) -> None:
        self._value.load_state_dict(loaded)


class StatefulAdapter(AnyAdapter):
    """An object that is its own adapter: what it does as a restore target is its own affair."""

    def __init__(self) -> None:
        super().__init__(self)

    def state_dict(self) -> Any:
        return self.state()

    def load_state_dict(self, state: Any) -> None:
        self.load(state)

    def announce(self, replication: Replication) -> None:
        """Say what of the state other ranks are known to hold alike."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those whose state is in this one's."""
        return []


class OptimizerAdapter(AnyAdapter):
    """A bare optimizer: its state is keyed by the position of each parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.optimizer = optimizer
        self._params = dict(enumerate(param for group in optimizer.param_groups for param in group["params"]))

    def problems(self, loaded: Any) -> list[str]:
        try:
            stored = [len(group["params"]) for group in loaded["param_groups"]]
            is_state = isinstance(loaded["state"], dict)
        except (TypeError, KeyError):
            is_state = False
        if not is_state:
            return ["what was stored is no optimizer's state"]
        own = [len(group["params"]) for group in self._value.param_groups]
        if own != stored:
            return [f"parameters per group: {own}, in the checkpoint {stored}"]
        keys = [key for group in loaded["param_groups"] for key in group["params"]]
        return other_optimizer(
            self._value,
            loaded,
            [
                # What FSDP1 has flattened is not always as large as its state.
                (index, key, None if getattr(param, "_fsdp_flattened", False) else param)
                for key, (index, param) in zip(keys, self._params.items(), strict=True)
            ],
        )

    def fresh(self, path: tuple[Any, ...], leaf: Leaf) -> Any:
        param = self._params.get(path[1]) if len(path) > 2 and path[0] == "state" else None
        return None if param is None else state_like(param, leaf, path[-1])

    def load(self, loaded: Any) -> None:
        load_exactly(self._value, loaded)


_FILLED_IN = {"capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"}
"""Options that torch's optimizers give a default when a state of an older torch is loaded."""

_STATES = {
    "ASGD": {"ax"},
    "Adadelta": {"square_avg", "acc_delta"},
    "Adagrad": {"sum"},
    "Adam": {"exp_avg", "exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq"},
    "Adamax": {"exp_avg", "exp_inf"},
    "NAdam": {"exp_avg", "exp_avg_sq"},
    "RAdam": {"exp_avg", "exp_avg_sq"},
    "RMSprop": {"square_avg"},
    "Rprop": {"prev", "step_size"},
    "SGD": set[str](),
}
"""By torch's optimizers: what each needs to continue once a parameter has a state, in the parameter's shape.
"""

_OPTIONAL_STATES = {"grad_avg", "max_exp_avg_sq", "momentum_buffer"}
"""What they also have in the parameter's shape, depending on the options."""


def other_optimizer(
    optimizer: torch.optim.Optimizer, loaded: Any, params: Iterable[tuple[Any, Any, torch.Tensor | None]]
) -> list[str]:
    """Why a state whose groups are as large was not an optimizer's like this one.

    params: of each, how to call it, its key in `loaded["state"]` and itself; None if its state may be of
    another shape than it. Nothing is said of what the optimizer itself may adapt as it loads.
    """
    if (
        type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
        or optimizer._optimizer_load_state_dict_pre_hooks
    ):
        return []
    pairs = list(zip(optimizer.param_groups, loaded["param_groups"], strict=False))
    problems = [
        f"options of parameter group {index}: {differences}"
        for index, (own, stored) in enumerate(pairs)
        if (differences := _other_keys(*_other_options(optimizer, own, stored)))
    ]
    if problems:
        return problems
    same_options = all(_set_alike(own, stored) for own, stored in pairs)
    return [
        f"state of parameter {name!r}: {difference}"
        for name, key, param in params
        if param is not None and isinstance(stored := loaded["state"].get(key), dict) and stored
        for difference in _other_state(optimizer, param, stored, same_options)
    ]


def _other_options(optimizer: torch.optim.Optimizer, own: Any, stored: Any) -> tuple[set[str], set[str]]:
    """The options that only the optimizer has, and that only what was stored has. Schedulers and users add
    their own to a group.
    """
    missing = (own.keys() & optimizer.defaults.keys()) - stored.keys() - _FILLED_IN
    if not _is_torchs(type(optimizer).__setstate__):
        missing = set()  # Another's optimizer may fill in options that it once did not have.
    unexpected = (stored.keys() - own.keys() - _FILLED_IN) & _options_of_torch()
    return missing, unexpected


def _is_torchs(what: Any) -> bool:
    return str(what.__module__).startswith("torch.optim.")


@cache
def _options_of_torch() -> frozenset[str]:
    return frozenset(
        option
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        for option in signature(kind).parameters
    )


def _other_keys(missing: set[Any], unexpected: set[Any]) -> str:
    sides = (("only here", missing), ("only in the checkpoint", unexpected))
    return ", ".join(f"{side} {sorted(keys, key=str)}" for side, keys in sides if keys)


def _set_alike(own: Any, stored: Any) -> bool:
    """Are the same options switched on?"""
    return all(
        bool(own[key]) == bool(stored[key])
        for key in (own.keys() & stored.keys()) - _FILLED_IN
        if isinstance(own[key], bool | int | float) and isinstance(stored[key], bool | int | float)
    )


def _other_state(
    optimizer: torch.optim.Optimizer, param: torch.Tensor, stored: Any, same_options: bool
) -> list[str]:
    kind = type(optimizer)
    needed = _STATES.get(kind.__name__) if _is_torchs(kind) else None
    current = optimizer.state.get(param)
    own = current if isinstance(current, dict) else {}
    missing, unexpected = own.keys() - stored.keys(), stored.keys() - own.keys()
    if needed is not None and needed - stored.keys():
        return [_other_keys(needed - stored.keys(), unexpected - needed - {"step"})]
    # What depends on the options comes with them. What only one side has, the other may not have needed yet.
    if missing and unexpected and same_options:
        return [_other_keys(missing, unexpected)]
    shaped = {
        name
        for name, value in own.items()
        if isinstance(value, torch.Tensor) and value.shape == param.shape and name != "step"
    }
    if needed is not None:
        shaped |= needed | _OPTIONAL_STATES
    return [
        f"{name}: shape {list(value.shape)} in the checkpoint, the parameter's is {list(param.shape)}"
        for name, value in stored.items()
        if name in shaped and isinstance(value, torch.Tensor) and value.shape != param.shape
    ]


def state_like(param: torch.Tensor, leaf: Leaf, name: Any) -> Any:
    """An empty tensor for a stored optimizer state of a parameter, which is called `name`: sharded as the
    parameter is, if it is of its shape. None if it is a part of something else.
    """
    device = param.device
    dtype = torch_dtype(leaf.dtype)
    shape = leaf.shape if leaf.chunk is None else leaf.chunk.tensor_shape
    alike = shape == tuple(param.shape) and name != "step"
    if isinstance(param, DTensor) and alike and (shape or leaf.placement is not None):
        chunk = chunk_of_dtensor(shape, param.device_mesh, tuple(param.placements))
        return DTensor.from_local(
            torch.empty(chunk.shape, dtype=dtype, device=device),
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    if leaf.chunk is not None and not alike:
        return None
    # Not torch.empty_like: what is not of the parameter's shape (a step) stays where torch has it, on the
    # CPU.
    return torch.empty(shape, dtype=dtype, device=device if shape == tuple(param.shape) else "cpu")


class _Keys(list[Any]):
    """The keys of a group's parameters. torch looks in them for the group of each single state, which in a
    list takes 20 µs among 5,000.
    """

    def __init__(self, keys: Iterable[Any] = ()) -> None:
        super().__init__(keys)
        self._all = frozenset(self)

    def __contains__(self, key: object) -> bool:
        return key in self._all


def load_exactly(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """`optimizer.load_state_dict(loaded)`, with every state in the dtype it was stored in.

    torch casts a floating-point state to its parameter's dtype, which would round the float32 moments of a
    bfloat16 parameter.
    """
    groups = [{**group, "params": _Keys(group["params"])} for group in loaded["param_groups"]]
    optimizer.load_state_dict({**loaded, "param_groups": groups})
    params = [param for group in optimizer.param_groups for param in group["params"]]
    keys = [key for group in loaded["param_groups"] for key in group["params"]]
    for key, param in zip(keys, params, strict=True):
        stored = loaded["state"].get(key)
        state = optimizer.state.get(param)
        if not isinstance(stored, dict) or not isinstance(state, dict):
            continue
        for name, value in stored.items():
            got = state.get(name)
            if isinstance(value, torch.Tensor) and isinstance(got, torch.Tensor) and got.dtype != value.dtype:
                state[name] = value.to(got.device)
