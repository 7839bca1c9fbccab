"""What, beside a forward and a step, takes or changes all that a module or an optimizer has, and waits?

For a module that is `state_dict`, `load_state_dict`, and whatever exchanges its tensors (`to`, `half`,
`share_memory`); for an optimizer `state_dict` and `load_state_dict`. To copy or pickle either is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ckptengine.errors import CheckpointError

_NOT_THERE = object()


class ModuleGuard:
    """Holds the uses of a module's own tensors. wait: returns when these are there, or raises.

    `remove` when they are there; not from within `wait`.
    """

    def __init__(self, module: nn.Module, wait: Callable[[], object]) -> None:
        self._wait = wait
        self._passed = False
        self._hooks = [
            _first_of(hooks, self._before)
            for hooks in (module._state_dict_pre_hooks, module._load_state_dict_pre_hooks)
        ]
        self._shadows = [
            # Not hooks, as torch has none for these. An exchange of memory that is being filled frees it.
            _Shadow(module, "_apply", self._before),
            _Shadow(module, "__reduce_ex__", self._before_copy),
        ]

    def _before(self, *args: Any, **kwargs: Any) -> None:
        if not self._passed:
            self._wait()
            self._passed = True
        # The hooks stay for now: torch goes through its dict of them, and takes it amiss if one is removed.
        self._shadows[0].remove()

    def _before_copy(self, *args: Any) -> None:
        if not self._passed:
            raise copied("a module")
        self.remove()

    def remove(self) -> None:
        self._passed = True
        for hook in self._hooks:
            hook.remove()
        for shadow in self._shadows:
            shadow.remove()


class OptimizerGuard:
    """Holds the uses of an optimizer's state. wait: returns when it has been loaded, or raises."""

    def __init__(self, optimizer: Optimizer, wait: Callable[[], object]) -> None:
        # Not torch's hooks: with hooks, it would be loaded otherwise.
        self._shadows = [
            _Shadow(optimizer, "state_dict", wait),
            _Shadow(optimizer, "load_state_dict", wait),
            _Shadow(optimizer, "__reduce_ex__", self._refuse),
        ]

    def _refuse(self) -> NoReturn:
        raise copied("an optimizer")

    def remove(self) -> None:
        for shadow in self._shadows:
            shadow.remove()


class _Shadow:
    """Stands before a method of one object: calls `before`, then the method."""

    def __init__(self, owner: Any, name: str, before: Callable[[], object]) -> None:
        self._owner = owner
        self._name = name
        self._before = before
        self._earlier = owner.__dict__.get(name, _NOT_THERE)
        self._method = getattr(owner, name)
        owner.__dict__[name] = self._call = self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        return self._method(*args, **kwargs)

    def remove(self) -> None:
        attributes = self._owner.__dict__
        if attributes.get(self._name) is not self._call:
            return  # Somebody else stands before it now, or nobody.
        if self._earlier is _NOT_THERE:
            del attributes[self._name]
        else:
            attributes[self._name] = self._earlier


def _first_of(hooks: Any, hook: Callable[..., None]) -> RemovableHandle:
    """As torch's own methods for it, which script modules lack, but before hooks that gather parameters."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    hooks.move_to_end(handle.id, last=False)
    return handle


def copied(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} cannot be copied or pickled while it is being restored",
        hint="call handle.wait() before" if what == "a module" else "call handle.result() before",
    )
