"""How does a module's forward wait for what is still being read, and an optimizer's step for all of it?

A hook removes itself when what it waits for is there, so that nothing is left once all is. For what else
waits, see `other_uses`.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ckptengine.adapters.gates import Gate
from ckptengine.adapters.other_uses import ModuleGuard, OptimizerGuard, copied
from ckptengine.adapters.parcels import Memory
from ckptengine.errors import CheckpointError
from ckptengine.read.arrivals import Arrivals

Wait = Callable[[Sequence[int]], object]
"""Returns when the parcels are there, or raises."""

_HINT = "exchange tensors (swap_tensors, .data, a new parameter) before the restore or after result()"


class Hooks:
    """The hooks of one restore. modules, optimizers: of the state; a module with the memory of its own
    tensors, and the parcels that are in it; wait: returns when the parcels are there,
    or raises; finish: what an optimizer's step waits for, and what takes or changes an optimizer's state.

    All methods are called on the training thread.
    """

    def __init__(
        self,
        gates: Iterable[tuple[Gate, Sequence[int]]],
        modules: Iterable[tuple[nn.Module, Sequence[Memory], Sequence[int]]],
        optimizers: Iterable[Optimizer],
        arrivals: Arrivals,
        wait: Wait,
        finish: Callable[[], object],
    ) -> None:
        self._finish = finish
        self._arrivals = arrivals
        guards = {
            module: _Guarded(module, memory, parcels, arrivals, wait, self._settle)
            for module, memory, parcels in modules
        }
        self._held = [_Held(gate, parcels, arrivals, wait, guards) for gate, parcels in gates]
        self._guarded = list(guards.values())
        self._holding: dict[Memory, list[_Held]] | None = None
        self._optimizers = [OptimizerGuard(optimizer, finish) for optimizer in optimizers]
        self._first = self._held[0].gate if self._held else None
        # Its module has it. Through torch's list of hooks, nothing here may keep that alive.
        self._last: weakref.ref[_Held] | None = None
        self._step: Any = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._finish()

    def let_pass(self) -> None:
        """Let go of the modules for which all is there.

        Raises `CheckpointError` where a module's memory was exchanged before.
        """
        held, self._held = self._held, []
        for one in held:
            if not one.try_pass():
                self._held.append(one)
        self._guarded = [one for one in self._guarded if not one.try_pass()]

    def _settle(self, memory: Collection[Memory]) -> None:
        """What is there may be exchanged from now on, also by one of several modules that share it."""
        if self._holding is None:
            self._holding = defaultdict(list)
            for held in self._held:
                for one in held.gate.memory:
                    self._holding[one].append(held)
        sharing = {id(held): held for one in memory for held in self._holding.get(one, ())}
        for held in sharing.values():
            held.settle(memory)

    def leave(self, *, in_step: bool = False) -> None:
        """All is there, or all is over. in_step: from within an optimizer's step; torch goes through the
        hooks of it, so that it is the next forward that removes the last one."""
        for held in self._held:
            held.remove()
        for guarded in self._guarded:
            guarded.remove()
        for optimizer in self._optimizers:
            optimizer.remove()
        self._held, self._guarded, self._optimizers, self._holding = [], [], [], None
        first, self._first = self._first, None
        if not in_step:
            self._leave_steps()
        elif first is not None:
            last = _Held(first, (), self._arrivals, lambda parcels: self._leave_steps(), {})
            self._last = weakref.ref(last)

    def _leave_steps(self) -> None:
        if self._step is not None:
            self._step.remove()
            self._step = None
        last = None if self._last is None else self._last()
        if last is not None:
            last.remove()
        self._last = None


class _Guarded:
    """Holds what takes or changes a module's own tensors until their parcels are there.

    memory: theirs; settle: is told that it is there.
    gate: the module's, which is passed with it where it waits for no more than that.
    """

    def __init__(
        self,
        module: nn.Module,
        memory: Sequence[Memory],
        parcels: Sequence[int],
        arrivals: Arrivals,
        wait: Wait,
        settle: Callable[[Collection[Memory]], object],
    ) -> None:
        self.gate: _Held | None = None
        self._memory = frozenset(memory)
        self._settle = settle
        self._parcels = parcels
        self._arrivals = arrivals
        self._wait = wait
        self._guard = ModuleGuard(module, self._pass)

    def _pass(self) -> None:
        self._wait(self._parcels)
        self._settle(self._memory)
        if self.gate is not None:
            self.gate.try_pass()

    def try_pass(self) -> bool:
        there = self._arrivals.are_there(self._parcels)
        if there:
            self.remove()
        return there

    def remove(self) -> None:
        self._guard.remove()


class _Held:
    """Holds a gate's module until its parcels are there. guards: of modules, those of its own go with it."""

    def __init__(
        self,
        gate: Gate,
        parcels: Sequence[int],
        arrivals: Arrivals,
        wait: Wait,
        guards: Mapping[nn.Module, _Guarded],
    ) -> None:
        self.gate = gate
        inside = gate.module.modules() if gate.whole else (gate.module,)
        self._guards = [guards[module] for module in inside if module in guards]
        for guard in self._guards:
            guard.gate = self
        self._arrivals = arrivals
        self._passed = False
        self._settled: set[Memory] = set()
        self._parcels = parcels
        self._wait = wait
        module: Any = gate.module
        self._compiled = module.__dict__.get("_compiled_call_impl")
        self._hook: Any = None
        # Not to be compiled either once the graph is broken. To import the compiler takes seconds.
        self._in_python = _disabled(self._pass) if "torch._dynamo" in sys.modules else self._pass
        if self._compiled is not None:
            # Hooks are compiled along, or, if they come later, left out.
            module._compiled_call_impl = self._call
        else:
            self._hook = gate.module.register_forward_pre_hook(self, prepend=True)

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._in_python()

    # A compiled function that calls the module breaks its graph here, instead of looking into what is there
    # while it is compiled.
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]
    __call__._torchdynamo_disable_msg = "waits for a restore"  # type: ignore[attr-defined]

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._compiled
        self._pass()
        return compiled(*args, **kwargs)

    def _pass(self) -> None:
        if not self._passed:
            self._wait(self._parcels)
            self._check()
        self.remove()
        for guard in self._guards:
            guard.try_pass()

    def try_pass(self) -> bool:
        if not self._passed and self._arrivals.are_there(self._parcels):
            self._check()
            self.remove()
        return self._passed

    def settle(self, memory: Collection[Memory]) -> None:
        """What is there now is looked at now, and not again."""
        new = {*memory} - self._settled
        if not self._passed and new:
            self._check(new.__contains__)
            self._settled |= new

    def _check(self, asked: Callable[[Memory], bool] | None = None) -> None:
        if self._parcels and not self.gate.is_as_it_was(asked or (lambda one: one not in self._settled)):
            raise CheckpointError(
                f"tensors of a {type(self.gate.module).__name__} were exchanged for others, or given other "
                "memory, while it was being restored: what was read is not in them",
                hint=_HINT,
            )

    def remove(self) -> None:
        self._passed = True
        module: Any = self.gate.module
        if self._hook is not None:
            self._hook.remove()
        elif module.__dict__.get("_compiled_call_impl") == self._call:
            module._compiled_call_impl = self._compiled

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise copied("a module")

    def __reduce__(self) -> NoReturn:
        raise copied("a module")


def _disabled(function: Callable[[], None]) -> Callable[[], None]:
    return torch.compiler.disable(function)  # type: ignore[no-any-return,no-untyped-call]
