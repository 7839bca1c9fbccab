"""Which modules of a state hold the tensors that are restored, and are they still in it at the end?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ckptengine.adapters.parcels import Memory, Parcels, memory_of
from ckptengine.errors import CheckpointError

_SHOWN = 5


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """A module as it is in the call. name: within the module of the state that it is in, which is ""; memory:
    of its own parameters and buffers; children: those of its modules that are there, by their names."""

    name: str
    module: nn.Module
    memory: tuple[Memory, ...]
    children: dict[str, nn.Module]


def holders_in(roots: Iterable[nn.Module]) -> list[Holder]:
    """All modules, each once."""
    seen: set[nn.Module] = set()
    return [
        Holder(
            name,
            module,
            tuple(_memory((*module._parameters.values(), *module._buffers.values()))),
            _children(module),
        )
        for root in roots
        for name, module in root.named_modules(seen)
    ]


def check_in_place(holders: Iterable[Holder], parcels: Parcels) -> None:
    """Raises `CheckpointError` where there now is another module than in the call, with tensors to which
    nothing is restored.

    One that was wrapped is still there, and one that was taken away leaves nothing unrestored.
    """
    names = [
        f"{holder.name}.{name}" if holder.name else name
        for holder in holders
        for name, module in holder.children.items()
        if (now := _children(holder.module).get(name, module)) is not module
        and module not in now.modules()
        and any(parcels.within(memory) for memory in _all_memory(module))
        and not all(parcels.within(memory) for memory in _all_memory(now))
    ]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise CheckpointError(
            "modules of the state were replaced while it was being restored: "
            f"{', '.join(names[:_SHOWN])}{more}; what was read is not in those that are there now",
            hint="replace modules before the restore or after result()",
        )


def _children(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in module._modules.items() if child is not None}


def _all_memory(module: nn.Module) -> Iterator[Memory]:
    return _memory((*module.parameters(), *module.buffers()))


def _memory(tensors: Iterable[torch.Tensor | None]) -> Iterator[Memory]:
    for tensor in tensors:
        if tensor is not None:
            yield from memory_of(tensor)
