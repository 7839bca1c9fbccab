"""Which parts of a tensor's name have wrappers put in, so that the model alone would not have them?

A wrapper holds the module that it wraps as an attribute, whose name comes into the names of all that is
below. FSDP1 and activation checkpointing leave it out of a `state_dict()`, DDP and `torch.compile` do not. A
plain name is without any of them: the same however the model is wrapped.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """home: the module that its class is in, which only a job that uses it need import. attribute: where it
    holds what it wraps. hidden: is that left out of the names in a state?"""

    home: str
    name: str
    attribute: str
    hidden: bool


_WRAPPERS = (
    _Wrapper(
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
        hidden=True,
    ),
    _Wrapper(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
        hidden=True,
    ),
    _Wrapper("torch.nn.parallel.distributed", "DistributedDataParallel", "module", hidden=False),
    _Wrapper("torch.nn.parallel.data_parallel", "DataParallel", "module", hidden=False),
    _Wrapper("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod", hidden=False),
)


def prefixes(module: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Each module in a module: what is before its tensors' names in the state, what is before their plain
    names, and itself."""
    known = _imported()
    stack = [("", "", module)]
    while stack:
        in_state, plain, one = stack.pop()
        yield in_state, plain, one
        wrapper = _wrapper_of(one, known)
        for name, child in reversed(one._modules.items()):
            if child is None:
                continue
            is_wrapped = wrapper is not None and name == wrapper.attribute
            stack.append(
                (
                    _below(wrapper, in_state, name),
                    plain if is_wrapped else f"{plain}{name}.",
                    child,
                )
            )


def child_prefix(module: nn.Module, prefix: str, name: str) -> str:
    """What is before the names of a child's tensors in the state. prefix: before those of the module's."""
    return _below(_wrapper_of(module, _imported()), prefix, name)


def plain_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The plain name of each name in a module's state; empty if all are plain already, or if two would become
    one."""
    if not _wraps(module):
        return {}
    plain = {in_state: plain for in_state, plain, _ in prefixes(module)}
    if all(in_state == other for in_state, other in plain.items()):
        return {}
    found = {name: _plain_name(name, plain) for name in names}
    return found if len(set(found.values())) == len(found) else {}


def known_by_another_name(stored: Collection[str], known: Collection[str]) -> dict[str, str]:
    """Of the names that something was stored under with a wrapper's part in them, those that are one of
    `known` without it: that one. What wrapped the model there can only be guessed from the names."""
    found: dict[str, str] = {}
    taken = set(stored)
    for name in stored:
        if name in known:
            continue
        bare = name.replace("_orig_mod.", "")
        for one in (bare, bare.removeprefix("module.")):
            if one in known and one not in taken:
                found[name] = one
                taken.add(one)
                break
    return found


def _imported() -> list[tuple[type, _Wrapper]]:
    """The classes of wrappers that there are in this process."""
    return [
        (getattr(sys.modules[wrapper.home], wrapper.name), wrapper)
        for wrapper in _WRAPPERS
        if wrapper.home in sys.modules
    ]


def _wraps(module: nn.Module) -> bool:
    """Is there any wrapper in it? By the classes, of which there are few: this is asked of every module."""
    kinds: set[type] = set()
    level: list[nn.Module | None] = [module]
    while level:
        kinds.update(map(type, level))
        level = [
            child for one in level if one is not None and one._modules for child in one._modules.values()
        ]
    return any(issubclass(kind, wrapper) for wrapper, _ in _imported() for kind in kinds)


def _wrapper_of(module: nn.Module, known: Iterable[tuple[type, _Wrapper]]) -> _Wrapper | None:
    return next((wrapper for kind, wrapper in known if isinstance(module, kind)), None)


def _below(wrapper: _Wrapper | None, prefix: str, name: str) -> str:
    is_hidden = wrapper is not None and wrapper.hidden and name == wrapper.attribute
    return prefix if is_hidden else f"{prefix}{name}."


def _plain_name(name: str, plain: dict[str, str]) -> str:
    """plain: the plain prefix for each prefix of a module. What a module's own hooks have named may have no
    module of that prefix; then that of the nearest one counts."""
    at = name.rfind(".") + 1
    while name[:at] not in plain:
        at = name.rfind(".", 0, at - 1) + 1
    return plain[name[:at]] + name[at:]
