"""What does an FSDP1 module hold on this rank, parameter by parameter, without a collective?

FSDP1 keeps the parameters of a wrapped module in one flat parameter, of which each rank has a range. Its own
`state_dict()` is no way to get at it: FULL and SHARDED gather the parameters, and LOCAL, besides storing the
flat parameter under a name of FSDP's, joins an `all_gather_object` for each one to build a ShardedTensor. So
the modules are walked here as `nn.Module.state_dict` does, with FSDP's hooks left out, and each original
parameter is given as the range of it that lies in this rank's flat parameter.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from ckptengine.adapters import wrappers
from ckptengine.adapters.tensors import LocalChunk

_FSDP_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"
_HOOKS_OF_FSDP = "torch.distributed.fsdp._state_dict_utils"
_FLAT_PARAM = "_flat_param"


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """An original parameter's place in a flat parameter.

    flat_param: what the optimizer holds with `use_orig_params=False`. param: what it holds with True; else
    None. start, nelem: the range of this rank's flat parameter, in elements. chunk: that range, as part of
    the original parameter. tied: this is another name of a parameter that has a part already.
    """

    flat_param: torch.Tensor
    param: torch.Tensor | None
    start: int
    nelem: int
    chunk: LocalChunk
    tied: bool = False

    @property
    def in_optimizer(self) -> torch.Tensor:
        return self.flat_param if self.param is None else self.param

    @property
    def is_unflattened(self) -> bool:
        """Does the optimizer hold it in its own shape? With `NO_SHARD`, each rank has all of it."""
        chunk = self.chunk.chunk
        return self.param is not None and chunk.is_whole and tuple(self.param.shape) != chunk.shape


def has_fsdp1(module: nn.Module) -> bool:
    # Not imported for this question: a job without FSDP1 need not pay for it.
    fsdp = sys.modules.get(_FSDP_MODULE)
    return fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in module.modules())


def named_state(module: nn.Module) -> tuple[OrderedDict[str, Any], dict[str, FlatPart]]:
    """`module.state_dict(keep_vars=True)`, with each flattened parameter as a `LocalChunk` under its own
    name.

    Also returns, by the same names, where in which flat parameter each of these lies.

    """
    parts = _flat_parts(module)
    by_chunk = {id(part.chunk): part for owned in parts.values() for _, part in owned}
    state: OrderedDict[str, Any] = OrderedDict()
    _collect(module, state, "", parts)
    named = {name: by_chunk[id(value)] for name, value in state.items() if id(value) in by_chunk}
    return state, named


def set_extra_state(module: nn.Module, values: dict[str, Any]) -> list[str]:
    """Give each module its `_extra_state`, by the names of `named_state`; returns the names that are no
    module's.
    """
    left = dict(values)
    for prefix, _, child in wrappers.prefixes(module):
        key = f"{prefix}_extra_state"
        # A wrapper and what it wraps have the same prefix.
        if key in left and type(child).set_extra_state is not nn.Module.set_extra_state:
            child.set_extra_state(left.pop(key))
    return list(left)


def reshard(module: nn.Module) -> None:
    """Drop gathered parameters, or the next forward pass would use them and not what is written to this
    rank's part.

    A forward pass without a backward leaves those of the root module gathered.

    """
    for child in module.modules():
        handle = getattr(child, "_handle", None) if _is_fsdp1(child) else None
        if (
            handle is None
            or not handle.uses_sharded_strategy
            or not hasattr(handle.flat_param, "_local_shard")
        ):
            continue
        if not handle.needs_unshard():
            handle.reshard(True)
            handle.post_reshard()


def _is_fsdp1(module: nn.Module) -> bool:
    return isinstance(module, sys.modules[_FSDP_MODULE].FullyShardedDataParallel)


def _collect(
    module: nn.Module, state: OrderedDict[str, Any], prefix: str, parts: dict[int, list[tuple[str, FlatPart]]]
) -> None:
    """As `nn.Module.state_dict` goes: pre-hooks, own entries, children, hooks."""
    for pre_hook in module._state_dict_pre_hooks.values():
        if pre_hook.__module__ != _HOOKS_OF_FSDP:
            pre_hook(module, prefix, True)
    own: OrderedDict[str, Any] = OrderedDict()
    module._save_to_state_dict(own, prefix, True)
    own.pop(prefix + _FLAT_PARAM, None)
    for name, part in parts.get(id(module), ()):
        own.pop(prefix + name, None)
        state[prefix + name] = part.chunk
    state.update(own)
    for name, child in module._modules.items():
        if child is not None:
            _collect(child, state, wrappers.child_prefix(module, prefix, name), parts)
    metadata = {"version": module._version}
    for hook in module._state_dict_hooks.values():
        if getattr(hook, "__module__", None) != _HOOKS_OF_FSDP:
            replaced = hook(module, state, prefix, metadata)
            if (
                replaced is not None
                and replaced is not state
                and not getattr(hook, "_from_public_api", False)
            ):
                entries = list(replaced.items())
                state.clear()
                state.update(entries)


def _flat_parts(module: nn.Module) -> dict[int, list[tuple[str, FlatPart]]]:
    """The flattened parameters by the id of the module that owns them, in the order they were registered."""
    owned: dict[int, list[tuple[str, FlatPart]]] = defaultdict(list)
    seen: set[int] = set()
    for child in module.modules():
        handle = getattr(child, "_handle", None) if _is_fsdp1(child) else None
        if handle is None or id(handle) in seen:
            continue
        seen.add(id(handle))
        flat: Any = handle.flat_param
        local = local_flat(flat)
        primary: dict[tuple[int, str], FlatPart] = {}
        for index, info in enumerate(flat._param_infos):
            shape = tuple(flat._shapes[index])
            shard = flat._shard_param_infos[index]
            start, nelem = (shard.offset_in_shard, shard.numel_in_shard) if shard.in_shard else (0, 0)
            # A parameter that is not in C order is flattened in the order of its memory: what the flat
            # elements mean is then FSDP's own matter, and the chunk is given as one of a one-dimensional
            # tensor.
            contiguities = getattr(flat, "_contiguities", None)
            in_c_order = contiguities is None or contiguities[index]
            chunk = LocalChunk(
                local[start : start + nelem],
                (prod(shape),),
                (shard.intra_param_start_idx if shard.in_shard else 0,),
                shape if in_c_order else None,
            )
            param = None if flat._params is None else flat._params[index]
            part = FlatPart(flat, param, start, nelem, chunk)
            primary[id(info.module), info.param_name] = part
            owned[id(info.module)].append((info.param_name, part))
        for shared in flat._shared_param_infos:
            # A name of its own, so that each name has its own chunk; the memory is the same and is stored
            # once.
            part = primary[id(shared.prim_module), shared.prim_param_name]
            chunk = part.chunk
            again = LocalChunk(chunk.tensor, chunk.global_shape, chunk.offsets, chunk.flat_of)
            owned[id(shared.module)].append(
                (shared.param_name, FlatPart(flat, part.param, part.start, part.nelem, again, tied=True))
            )
    return owned


def local_flat(flat_param: Any) -> torch.Tensor:
    """This rank's range of a flat parameter, padding included, even while the parameter is gathered."""
    handle_has_run = hasattr(flat_param, "_local_shard")
    local: torch.Tensor = flat_param._local_shard if handle_has_run else flat_param.data
    return local.detach()
