"""Before which modules' forward does a restore have to have got how far?

Each gate is a module, and the memory that has to be filled before its forward begins: its own parameters and
buffers, but where whoever wraps it touches more than that before, that.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckptengine.adapters import fsdp1, objects
from ckptengine.adapters.parcels import Memory, memory_of

_USE_THEIR_CHILDRENS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Of torch's own modules, those whose forward takes parameters of modules in them that it does not call."""


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """whole: for all modules in it too. compiled: what the module does has been, or will be, compiled.
    watched: the module's own tensors, without those that FSDP exchanges for gathered ones, each with its
    memory; beside: the rest of it."""

    module: nn.Module
    watched: tuple[tuple[torch.Tensor, Memory], ...]
    beside: tuple[Memory, ...] = ()
    whole: bool = False
    compiled: bool = False

    @property
    def memory(self) -> list[Memory]:
        return [*(memory for _, memory in self.watched), *self.beside]

    def is_as_it_was(self, asked: Callable[[Memory], bool] = lambda memory: True) -> bool:
        """Has the module the same tensors, and these the same memory, as when the gate was made? asked: of
        which memory that is to be known."""
        present = {id(tensor) for tensor in _tensors(self.module, self.whole)}
        beside = [memory for memory in self.beside if asked(memory)]
        return all(
            id(tensor) in present and memory in memory_of(tensor)
            for tensor, memory in self.watched
            if asked(memory)
        ) and (not beside or {*beside} <= {*_beside_of(self.module, self.whole)})


def modules_in(state: Any) -> list[nn.Module]:
    """The modules of a state that are saved as such, in its order."""
    found: dict[int, nn.Module] = {}
    stack = [state]
    while stack:
        value = stack.pop()
        if isinstance(value, nn.Module):
            found[id(value)] = value
        elif isinstance(value, objects.ModuleAdapter):
            found[id(value.module)] = value.module
        elif isinstance(value, objects.StatefulAdapter):
            parts = value.parts()
            stack += reversed(list(parts.values())) if parts is not None else ()
        elif isinstance(value, dict):
            stack += reversed(value.values())
        elif type(value) in (list, tuple):
            stack += reversed(value)
    return list(found.values())


def gates_of(roots: Iterable[nn.Module]) -> list[Gate]:
    """In the order in which a forward is likely to come to them: a module before those in it."""
    gates: list[Gate] = []
    seen: set[int] = set()
    for root in roots:
        wrapper = _compiled_wrapper(root)
        if wrapper is not None:
            gates.append(_whole(wrapper, _managed_by_fsdp(root), compiled=True))
            seen.update(map(id, root.modules()))
            continue
        managed = _managed_by_fsdp(root)
        _walk(root, managed, seen, gates)
    return [gate for gate in gates if gate.memory]


def touched_by_strangers(roots: Iterable[nn.Module]) -> list[Memory]:
    """What may be used before any forward that can be held: the buffers, where there are other ranks. A DDP
    around a module, which the state need not know of, sends them to all ranks before the module's forward.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    return [memory for root in roots for buffer in root.buffers() for memory in memory_of(buffer)]


def memory_of_module(value: Any) -> list[Memory] | None:
    """All that a module needs; None if it is none."""
    return _whole(value, _managed_by_fsdp(value)).memory if isinstance(value, nn.Module) else None


def _walk(module: nn.Module, managed: set[int], seen: set[int], gates: list[Gate]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    if _is_compiled(module):
        gates.append(_whole(module, managed, compiled=True))
        seen.update(map(id, module.modules()))
        return
    if isinstance(module, (*_USE_THEIR_CHILDRENS, torch.jit.ScriptModule)):
        gates.append(_whole(module, managed))
        seen.update(map(id, module.modules()))
        return
    own = [tensor for tensor in _tensors(module, whole=False) if id(tensor) not in managed]
    gates.append(Gate(module, _with_memory(own), tuple(_beside_of(module, whole=False))))
    for child in module._modules.values():
        if child is not None:
            _walk(child, managed, seen, gates)


def _whole(module: nn.Module, managed: set[int], *, compiled: bool = False) -> Gate:
    own = [tensor for tensor in _tensors(module, whole=True) if id(tensor) not in managed]
    beside = tuple(_beside_of(module, whole=True))
    return Gate(module, _with_memory(own), beside, whole=True, compiled=compiled)


def _tensors(module: nn.Module, whole: bool) -> Iterator[torch.Tensor]:
    for one in module.modules() if whole else (module,):
        for tensor in (*one._parameters.values(), *one._buffers.values()):
            if tensor is not None:
                yield tensor


def _with_memory(tensors: Iterable[torch.Tensor]) -> tuple[tuple[torch.Tensor, Memory], ...]:
    return tuple((tensor, memory) for tensor in tensors for memory in memory_of(tensor))


def _beside_of(module: nn.Module, whole: bool) -> Iterator[Memory]:
    for one in module.modules() if whole else (module,):
        yield from _beside(one)


def _beside(module: nn.Module) -> Iterator[Memory]:
    """What a wrapper touches before the module's forward, beside the module's own tensors."""
    if _is_a(module, "torch.nn.parallel.distributed", "DistributedDataParallel"):
        # It sends rank 0's buffers to all; with mixed precision, it casts the parameters.
        ddp: Any = module
        for buffer in module.buffers():
            yield from memory_of(buffer)
        if getattr(ddp, "mixed_precision", None) is not None:
            for parameter in module.parameters():
                yield from memory_of(parameter)
    for group in _fsdp2_groups(module):
        for managed in group.fsdp_params:
            yield from memory_of(managed.sharded_param)
    for flat in _fsdp1_flat(module):
        yield from memory_of(fsdp1.local_flat(flat))


def _fsdp2_groups(module: nn.Module) -> list[Any]:
    """The parameter groups that a module of FSDP2 gathers before its forward."""
    if not _is_a(module, "torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule"):
        return []
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    states = [state, *getattr(state, "_states_to_forward_prefetch", ())]
    return [group for one in states for group in _groups_of(one)]


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group  # as torch called it when there was one at most
    return [] if group is None else [group]


def _fsdp1_flat(module: nn.Module) -> list[Any]:
    """The flat parameters that a module of FSDP1 gathers before its forward."""
    if not _is_a(module, "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"):
        return []
    unit: Any = module
    # Which it gathers ahead of time depends on the order of an earlier forward, which only it knows.
    # And parameters that it keeps on the CPU are pinned, in other memory, when the outermost one first runs.
    early = getattr(unit, "forward_prefetch", False) or unit.cpu_offload.offload_params
    ahead = module.modules() if early else [module]
    handles = [getattr(one, "_handle", None) for one in ahead]
    return [handle.flat_param for handle in handles if handle is not None]


def _managed_by_fsdp(root: nn.Module) -> set[int]:
    """The ids of parameters that FSDP exchanges for gathered ones."""
    managed = {id(param) for param in root.parameters() if getattr(param, "_fsdp_flattened", False)}
    for module in root.modules():
        for group in _fsdp2_groups(module):
            managed.update(id(one.sharded_param) for one in group.fsdp_params)
        managed.update(map(id, _fsdp1_flat(module)))
    return managed


def _is_a(module: nn.Module, home: str, name: str) -> bool:
    """Is it of a class that is imported only where somebody uses it?"""
    where = sys.modules.get(home)
    return where is not None and isinstance(module, getattr(where, name))


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or _is_a(
        module, "torch._dynamo.eval_frame", "OptimizedModule"
    )


def _compiled_wrapper(module: nn.Module) -> nn.Module | None:
    """What `torch.compile(module)` has returned, which nothing but the caller knows of."""
    where: Any = sys.modules.get("torch._dynamo.eval_frame")
    if where is None or all(backend is None for backend in where.cached_backends.values()):
        return None  # Nothing was given to torch.compile; to look for what was takes 40 ms.
    # The module is in the wrapper's dict of modules, and that in the wrapper, or in its dict of attributes.
    for one in gc.get_referrers(module):
        if type(one) is dict and one.get("_orig_mod") is module:
            for owner in gc.get_referrers(one):
                for wrapper in (owner, *(gc.get_referrers(owner) if type(owner) is dict else ())):
                    if isinstance(wrapper, where.OptimizedModule):
                        assert isinstance(wrapper, nn.Module)
                        return wrapper
    return None


def anything_was_compiled() -> bool:
    """Has this process compiled something? Hooks that come later are not in it, and torch does not say what
    it was."""
    where: Any = sys.modules.get("torch._dynamo.convert_frame")
    return where is not None and bool(where.FRAME_COUNTER)
