"""How are a model and its optimizer saved so that each parameter's state is found by the parameter's name?

An optimizer numbers its parameters, and with FSDP1 what it holds may be a flat parameter of many.
`training_state` pairs it with the model: its state is keyed by the parameters' names, and a flat parameter's
state is given in parts, like the flat parameter itself.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ckptengine.adapters import fsdp1, objects, wrappers
from ckptengine.adapters.fsdp1 import FlatPart
from ckptengine.adapters.leaves import Leaf
from ckptengine.adapters.placing import copy_into
from ckptengine.adapters.replicas import Replication
from ckptengine.adapters.tensors import LocalChunk, extract, is_tensor, torch_dtype
from ckptengine.errors import StateMismatchError, UnsupportedStateError


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainingState:
    """The state of a model and its optimizer, as one object to put in a state: `{"train": training_state(m,
    o)}`.

    model: plain, DDP, FSDP1 (with either `use_orig_params`) or FSDP2, compiled or not. Its names are those of
    the model without these wrappers. optimizer: of parameters of the model. It restores into an optimizer
    that has not made a step yet, too.
    """
    return TrainingState(model, optimizer)


class TrainingState(objects.StatefulAdapter):
    """See `training_state`. Its state is `{"model": …, "optimizer": …}`, with the names of
    `model.state_dict()`, without what wrappers put into them.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self._model = model
        self._optimizer = None if optimizer is None else KeyedOptimizer(model, optimizer)

    def parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"model": objects.PlainModule(self._model)}
        if self._optimizer is not None:
            parts["optimizer"] = self._optimizer
        return parts

    def state(self) -> dict[str, Any]:
        state = {"model": objects.PlainModule(self._model).state_dict()}
        if self._optimizer is not None:
            state["optimizer"] = self._optimizer.state()
        return state

    def announce(self, replication: Replication) -> None:
        replication.enter(self._model)
        if self._optimizer is not None:
            self._optimizer.announce(replication)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self._optimizer is None else self._optimizer.optimizers()

    def load(self, loaded: dict[str, Any]) -> None:
        """Take a state that `state_dict` of the same model, sharded in the same way, has returned; it is
        copied.
        """
        _load_module(self._model, loaded["model"])
        if self._optimizer is not None:
            # torch's optimizers take the tensors they are given as their own.
            self._optimizer.load_state_dict(copy.deepcopy(loaded["optimizer"]))


class KeyedOptimizer(objects.StatefulAdapter):
    """An optimizer whose state is keyed by the names its parameters have in the model's state."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._model = model
        self._optimizer = optimizer
        self._fresh_flat: dict[tuple[int, Any], torch.Tensor] = {}
        # To walk the whole model again for each question, or each tensor, would be quadratic.
        self._owners_now: dict[int, list[tuple[str, FlatPart | None]]] | None = None
        self._by_name_now: dict[str, tuple[torch.Tensor, FlatPart | None]] | None = None

    def _look_again(self) -> None:
        self._fresh_flat = {}
        self._owners_now = None
        self._by_name_now = None

    def load_state_dict(self, state: Any) -> None:
        self._look_again()
        self.load(state)

    def state(self) -> dict[str, Any]:
        self._look_again()
        owners = self._owners()
        packed = self._optimizer.state_dict()
        state = dict(packed["state"])
        keyed: dict[Any, Any] = {}
        for key, param in self._keys(packed):
            if key in state:
                values = state.pop(key)
                for name, part in owners[id(param)]:
                    keyed[name] = values if part is None else _parts_of(values, part)
        keyed.update(state)
        groups = [
            # Without the names that torch may keep there too, which are those of one layout.
            {**{key: value for key, value in group.items() if key != "param_names"}, "params": names}
            for group, names in zip(packed["param_groups"], self._names(), strict=True)
        ]
        return {**packed, "state": keyed, "param_groups": groups}

    def announce(self, replication: Replication) -> None:
        replication.enter_optimizer(self._optimizer)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._optimizer]

    def problems(self, loaded: Any) -> list[str]:
        try:
            stored = [list(group["params"]) for group in loaded["param_groups"]]
            keys = list(loaded["state"])
        except (TypeError, KeyError):
            return ["what was stored is no optimizer's state"]
        own = self._names()
        problems = []
        if len(stored) != len(own):
            problems.append(f"{len(own)} parameter groups, in the checkpoint {len(stored)}")
        for index, (mine, theirs) in enumerate(zip(own, stored, strict=False)):
            # In any order: what is flattened together comes before what is not, and each has its name.
            here, there = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
            if here or there:
                what = f"only here {here[:5]}, only in the checkpoint {there[:5]}"
                problems.append(f"parameter group {index} holds other parameters: {what}")
        known = {name for names in own for name in names}
        stray = [key for key in keys if isinstance(key, str) and key not in known]
        if stray and not problems:
            problems.append(f"in the checkpoint there is state of parameters it does not hold: {stray[:5]}")
        if problems:
            return problems
        return objects.other_optimizer(
            self._optimizer,
            loaded,
            [
                (name, name, param if part is None else None)
                for name, (param, part) in self._by_name().items()
            ],
        )

    def fresh(self, path: tuple[Any, ...], leaf: Leaf) -> Any:
        if len(path) < 3 or path[0] != "state":
            return None
        param, part = self._by_name().get(path[1], (None, None))
        if param is None:
            return None
        if part is None:
            return objects.state_like(param, leaf, path[-1])
        if part.is_unflattened:
            return objects.state_like(part.in_optimizer, leaf, path[-1])
        flat = fsdp1.local_flat(part.flat_param)
        chunk = part.chunk.chunk
        if leaf.whole.tensor_shape != chunk.tensor_shape or (leaf.chunk is None and path[-1] == "step"):
            return None if leaf.chunk is not None else objects.state_like(flat, leaf, path[-1])
        if part.param is not None:
            tensor = torch.empty(chunk.shape, dtype=torch_dtype(leaf.dtype), device=flat.device)
        else:
            # One tensor for the flat parameter, filled in parts; its padding is zero, as padding's gradients
            # are.
            key = (id(part.flat_param), path[2:])
            if key not in self._fresh_flat:
                self._fresh_flat[key] = torch.zeros_like(flat, dtype=torch_dtype(leaf.dtype))
            tensor = self._fresh_flat[key][part.start : part.start + part.nelem]
        return _like(part.chunk, tensor)

    def load(self, loaded: Any) -> None:
        owners = self._owners()
        packed = self._optimizer.state_dict()
        stored = dict(loaded["state"])
        state: dict[Any, Any] = {}
        for key, param in self._keys(packed):
            named = [(stored.pop(name, None), part) for name, part in owners[id(param)]]
            if param not in self._optimizer.state and all(_is_empty(part) for _, part in named):
                # Another layout had elements of it here. An optimizer makes no step for a parameter of none,
                # so that what it counts would fall behind.
                continue
            present = [(values, part) for values, part in named if values is not None]
            if present:
                state[key] = _joined(present, self._optimizer.state.get(param, {}))
        state.update(stored)
        groups = [
            {
                **{key: value for key, value in group.items() if key != "param_names"},
                **{key: own[key] for key in ("params", "param_names") if key in own},
            }
            for group, own in zip(loaded["param_groups"], packed["param_groups"], strict=True)
        ]
        self._look_again()
        objects.load_exactly(self._optimizer, {**loaded, "state": state, "param_groups": groups})

    def _keys(self, packed: Any) -> Iterator[tuple[Any, torch.Tensor]]:
        """The optimizer's own key of each parameter."""
        for numbered, group in zip(packed["param_groups"], self._optimizer.param_groups, strict=True):
            yield from zip(numbered["params"], group["params"], strict=True)

    def parameter_names(self) -> list[str]:
        return [name for names in self._names() for name in names]

    def _names(self) -> list[list[str]]:
        owners = self._owners()
        return [
            [name for param in group["params"] for name, _ in owners[id(param)]]
            for group in self._optimizer.param_groups
        ]

    def _by_name(self) -> dict[str, tuple[torch.Tensor, FlatPart | None]]:
        if self._by_name_now is None:
            owners = self._owners()
            self._by_name_now = {
                name: (param, part)
                for group in self._optimizer.param_groups
                for param in group["params"]
                for name, part in owners[id(param)]
            }
        return self._by_name_now

    def _owners(self) -> dict[int, list[tuple[str, FlatPart | None]]]:
        """By the id of each parameter the optimizer holds: the names, several for a flat parameter, with
        their parts.
        """
        if self._owners_now is None:
            self._owners_now = self._find_owners()
        return self._owners_now

    def _find_owners(self) -> dict[int, list[tuple[str, FlatPart | None]]]:
        named: dict[int, list[tuple[str, FlatPart | None]]] = defaultdict(list)
        parts: dict[str, FlatPart] = {}
        if fsdp1.has_fsdp1(self._model):
            state, parts = fsdp1.named_state(self._model)
        else:
            state = OrderedDict(self._model.state_dict(keep_vars=True))
        for name, value in state.items():
            part = parts.get(name)
            if part is not None:
                if not part.tied:
                    named[id(part.in_optimizer)].append((name, part))
            elif isinstance(value, torch.Tensor) and id(value) not in named:
                named[id(value)].append((name, None))
        held = [param for group in self._optimizer.param_groups for param in group["params"]]
        strangers = sum(id(param) not in named for param in held)
        if strangers:
            raise UnsupportedStateError(
                f"{strangers} of the optimizer's {len(held)} parameters are not in the model's state",
                hint="make the optimizer after the model is wrapped or sharded, from that model's parameters",
            )
        plain = wrappers.plain_names(self._model, state)
        if plain:
            return {key: [(plain[name], part) for name, part in owned] for key, owned in named.items()}
        return named


def _is_empty(part: FlatPart | None) -> bool:
    """Is it a parameter in its own right of which this rank has no elements?"""
    return part is not None and part.param is not None and not part.nelem


def _like(chunk: LocalChunk, tensor: torch.Tensor) -> LocalChunk:
    return LocalChunk(tensor, chunk.global_shape, chunk.offsets, chunk.flat_of)


def _parts_of(values: Any, part: FlatPart) -> dict[Any, Any]:
    """One parameter's share of the state an optimizer keeps for what it holds; what is not sharded goes to
    each.
    """
    held = fsdp1.local_flat(part.flat_param).shape if part.param is None else torch.Size([part.nelem])
    share: dict[Any, Any] = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.shape == held:
            if part.param is None:
                value = value[part.start : part.start + part.nelem]
            value = _like(part.chunk, value)
        share[key] = value
    return share


def _joined(present: list[tuple[dict[Any, Any], FlatPart | None]], current: Any) -> dict[Any, Any]:
    """The state an optimizer keeps for what it holds, from that of the parameters in it."""
    first, part = present[0]
    if part is None or part.param is not None:
        return {key: value.tensor if isinstance(value, LocalChunk) else value for key, value in first.items()}
    joined: dict[Any, Any] = {}
    for key, value in first.items():
        if isinstance(value, LocalChunk):
            pieces = [(values[key].tensor, piece) for values, piece in present if piece is not None]
            value = _flat_of(pieces, part.flat_param, current.get(key))
        joined[key] = value
    return joined


def _flat_of(
    pieces: list[tuple[torch.Tensor, FlatPart]], flat_param: torch.Tensor, current: Any
) -> torch.Tensor:
    """The flat tensor of which these are parts already, if there is one, else a new one."""
    flat = fsdp1.local_flat(flat_param)
    for whole in (current, pieces[0][0]._base):
        if (
            isinstance(whole, torch.Tensor)
            and whole.shape == flat.shape
            and whole.is_contiguous()
            and all(
                whole.dtype == tensor.dtype
                and (
                    not part.nelem
                    or tensor.data_ptr() == whole.data_ptr() + part.start * whole.element_size()
                )
                for tensor, part in pieces
            )
        ):
            return whole
    whole = torch.zeros_like(flat, dtype=pieces[0][0].dtype)
    with torch.no_grad():
        for tensor, part in pieces:
            whole[part.start : part.start + part.nelem] = tensor
    return whole


def _load_module(model: nn.Module, loaded: dict[str, Any]) -> None:
    adapter = objects.PlainModule(model)
    state = adapter.state()
    missing = tuple(name for name in state if name not in loaded)
    unexpected = tuple(name for name in loaded if name not in state)
    if missing or unexpected:
        raise StateMismatchError(
            f"the state is not this model's: {len(missing)} keys are missing, {len(unexpected)} unexpected",
            missing=missing,
            unexpected=unexpected,
        )
    given = {}
    for name, value in state.items():
        if is_tensor(value) and adapter.owns(value):
            for source, target in zip(extract(loaded[name]), extract(value, in_place=True), strict=True):
                copy_into(target.tensor, source.tensor)
        else:
            given[name] = loaded[name]
    adapter.load(given)
