"""How is the state of an object taken, and given back?

An object with `state_dict` and `load_state_dict` is stored as what its `state_dict()` returns. On restore an object is
either *closed*, a module, whose tensors are all there and must match; or *open*, an optimizer or anything else, which
takes whatever was stored.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptengine.adapters import fsdp1
from ckptengine.adapters.tensors import LocalChunk, chunk_of_dtensor, extract, is_tensor, torch_dtype
from ckptengine.errors import StateMismatchError
from ckptengine.format.entries import TensorEntry, ViewEntry
from ckptengine.format.geometry import Chunk

Leaf = TensorEntry | ViewEntry


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


def module_state(module: nn.Module) -> Any:
    """`module.state_dict()`; with FSDP1 inside, its flattened parameters as `LocalChunk`s under their own names."""
    if not fsdp1.has_fsdp1(module):
        return module.state_dict()
    named, _ = fsdp1.named_state(module)
    return OrderedDict((name, _detached(value)) for name, value in named.items())


def named_params(module: nn.Module) -> dict[int, str]:
    """The name each parameter has in the module's state, by its id; the first one, if it has several.

    FSDP1's flattened parameters are left out (see `fsdp1.named_state`).
    """
    state = fsdp1.named_state(module)[0] if fsdp1.has_fsdp1(module) else module.state_dict(keep_vars=True)
    names: dict[int, str] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            names.setdefault(id(value), name)
    return names


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


class Adapter(Protocol):
    """An object as a restore target. Once per restore: `state`, then `problems`, and after the read `load`."""

    closed: bool

    def state(self) -> Any:
        """What the object holds now."""

    def problems(self, loaded: Any) -> list[str]:
        """Why `loaded` (whose tensors are not filled yet) cannot be loaded; for open objects."""

    def fresh(self, path: tuple[Any, ...], entry: Leaf) -> Any:
        """Something to fill for a stored tensor that the object has no place for yet; None: a plain tensor will do."""

    def load(self, loaded: Any) -> None:
        """Open: take the whole state. Closed: take the entries that are not in place already."""


def adapter(value: Any) -> Adapter:
    special = getattr(type(value), "__ckptengine_adapter__", None)
    if special is not None:
        made: Adapter = special(value)
        return made
    if isinstance(value, nn.Module):
        return ModuleAdapter(value)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerAdapter(value)
    return AnyAdapter(value)


class ModuleAdapter:
    closed = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state(self) -> Any:
        return module_state(self._module)

    def problems(self, loaded: Any) -> list[str]:
        return []

    def fresh(self, path: tuple[Any, ...], entry: Leaf) -> Any:
        return None

    def owns(self, value: Any) -> bool:
        """Is a tensor of the module's state one of its own, so that filling it fills the module?"""
        return all(
            not local.tensor.numel() or local.tensor.untyped_storage().data_ptr() in self._storages()
            for local in extract(value)
        )

    def _storages(self) -> set[int]:
        storages = getattr(self, "_found", None)
        if storages is None:
            own = [*self._module.parameters(), *self._module.buffers()]
            storages = {
                local.tensor.untyped_storage().data_ptr()
                for tensor in own
                if not isinstance(tensor, nn.parameter.UninitializedTensorMixin)  # type: ignore[attr-defined]
                for local in extract(tensor)
            }
            self._found = storages
        return storages

    def load(self, loaded: Any) -> None:
        if not loaded:
            return
        if fsdp1.has_fsdp1(self._module):
            left = fsdp1.set_extra_state(self._module, loaded)
            if left:
                raise StateMismatchError(
                    "an FSDP module's state holds entries that are neither parameters, buffers nor extra state",
                    unexpected=tuple(left),
                )
            return
        self._module.load_state_dict(loaded, strict=False)


class AnyAdapter:
    closed = False

    def __init__(self, value: Any) -> None:
        self._value = value

    def state(self) -> Any:
        return self._value.state_dict()

    def problems(self, loaded: Any) -> list[str]:
        return []

    def fresh(self, path: tuple[Any, ...], entry: Leaf) -> Any:
        return None

    def load(self, loaded: Any) -> None:
        self._value.load_state_dict(loaded)


class OptimizerAdapter(AnyAdapter):
    """A bare optimizer: its state is keyed by the position of each parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._params = dict(enumerate(param for group in optimizer.param_groups for param in group["params"]))

    def problems(self, loaded: Any) -> list[str]:
        try:
            stored = [len(group["params"]) for group in loaded["param_groups"]]
        except (TypeError, KeyError):
            return ["what was stored is no optimizer's state"]
        own = [len(group["params"]) for group in self._value.param_groups]
        return [] if own == stored else [f"parameters per group: {own}, in the checkpoint {stored}"]

    def fresh(self, path: tuple[Any, ...], entry: Leaf) -> Any:
        param = self._params.get(path[1]) if len(path) > 2 and path[0] == "state" else None
        return None if param is None else state_like(param, entry)

    def load(self, loaded: Any) -> None:
        load_exactly(self._value, loaded)


def state_like(param: torch.Tensor, entry: Leaf) -> Any:
    """An empty tensor for a stored optimizer state of a parameter: sharded as the parameter is, if it was sharded so."""
    device = param.device
    dtype = torch_dtype(entry.dtype)
    if isinstance(param, DTensor) and entry.placement is not None:
        chunk = chunk_of_dtensor(tuple(param.shape), param.device_mesh, tuple(param.placements))
        if chunk == (entry.chunk or Chunk.whole(entry.shape)):
            local = torch.empty(entry.shape, dtype=dtype, device=device)
            return DTensor.from_local(
                local,
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
    if entry.chunk is not None:
        return None
    # Not torch.empty_like: what is not of the parameter's shape (a step) stays where torch has it, on the CPU.
    return torch.empty(
        entry.shape, dtype=dtype, device=device if entry.shape == tuple(param.shape) else "cpu"
    )


def load_exactly(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """`optimizer.load_state_dict(loaded)`, with every state in the dtype it was stored in.

    torch casts a floating-point state to its parameter's dtype, which would round the float32 moments of a bfloat16
    parameter.
    """
    optimizer.load_state_dict(loaded)
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


def as_plain(value: Any) -> Any:
    """A state with each `LocalChunk` as its tensor: what `load_state_dict` of an object that knows none gets."""
    if isinstance(value, LocalChunk):
        return value.tensor
    if isinstance(value, dict):
        return type(value)((key, as_plain(child)) for key, child in value.items())
    if type(value) in (list, tuple):
        return type(value)(as_plain(child) for child in value)
    return value


__all__ = [
    "Adapter",
    "Leaf",
    "ModuleAdapter",
    "OptimizerAdapter",
    "adapter",
    "as_plain",
    "is_stateful",
    "is_tensor",
    "load_exactly",
    "module_state",
    "named_params",
    "state_dict_of",
    "state_like",
]
