"""Does a stored tree fit a target, and what goes where?

Target and tree are walked together, by key, not by name. Dicts are structure: their keys must agree. Lists
and tuples that hold tensors are structure too; without tensors they are values, and may have changed their
length. A value is replaced by what was stored, whatever its type, in the dict or list that holds it; a list,
set, bytearray or array is changed in place. `None` stands for any value without tensors. Nothing is changed
here: all that is to be done after the read is collected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ckptengine.adapters import objects
from ckptengine.adapters.keypath import joined
from ckptengine.adapters.kinds import STRUCTURES, article, kind_of, kind_of_target, type_name
from ckptengine.adapters.leaves import Leaf, empty_for, leaf_indices, misfits
from ckptengine.adapters.loads import Load
from ckptengine.adapters.origin import Origin
from ckptengine.adapters.own_values import OwnValues
from ckptengine.adapters.placing import Placement, Plan, place, placement_of
from ckptengine.adapters.tensors import Local, LocalChunk, dtype_name, extract, is_tensor
from ckptengine.adapters.values import Decoder, Node, large_value
from ckptengine.adapters.wanted import Path, Wanted, names_in
from ckptengine.adapters.world import World
from ckptengine.format.tree import TAG
from ckptengine.read.partial import ALL, Partial, other_prefix
from ckptengine.read.per_rank import PerRankChoices


class _Keep:
    """The target's value stays, filled in place if need be."""


KEEP = _Keep()
Outcome = _Keep | Callable[[], Any]
"""What becomes of a target's value: it stays, or its holder gets what the function returns, after the read.
"""


@dataclass(slots=True)
class Differences:
    """All that does not fit, by name."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Values that each rank had its own of, each with the reason."""
    rename: dict[str, str] = field(default_factory=dict)
    """What would have others fit: the beginnings of names here, and those they were stored under."""
    needless: bool = False
    """Are names mapped that should not be?"""


class Matcher:
    """Walks one target and one tree. After `match`: `differences`, `placements` and, for after the read,
    `actions`.

    world: where tensors come from, if not each from its leaf alone; `leaves` are then the world's. per_rank:
    is asked for every value that each of the ranks that saved may have had its own of. partial: which part of
    the target is filled, and from which names. origin: for errors after the read.
    """

    def __init__(
        self,
        leaves: list[Leaf],
        *,
        allow_pickle: bool,
        world: World | None = None,
        per_rank: PerRankChoices | None = None,
        partial: Partial = ALL,
        origin: Origin | None = None,
    ) -> None:
        self._leaves = leaves
        self._world = world
        self._allow_pickle = allow_pickle
        self._origin = origin or Origin()
        self.asked = per_rank
        is_sharded = (lambda leaf: False) if world is None else world.is_sharded
        self._own = OwnValues(leaves, per_rank, partial.stored_name, is_sharded)
        self._wanted = Wanted(partial)
        self._is_choosy = per_rank is not None or not self._wanted.is_all
        self.differences = Differences()
        self.placements: list[Placement] = []
        self.large: dict[int, np.ndarray[Any, Any]] = {}
        """Buffers of the large values to be read, by leaf."""
        self.actions: list[Callable[[], object]] = []
        """Values into their holders, then whole states into objects; in the order of the walk."""

    def match(self, target: Any, tree: Node) -> Outcome:
        self._wanted.begin(tree)
        outcome = self._match(target, tree, ())
        for name in self._wanted.left_over():
            self.differences.unexpected.append(name)
        nothing = self._wanted.nothing()
        if nothing is not None:
            self.differences.mismatched.append(nothing)
        return outcome

    def place_large(self, plan: Plan) -> None:
        for index, buffer in self.large.items():
            plan.read_into(self._leaves[index], buffer.ctypes.data)

    def named_large(self) -> dict[int, tuple[str, np.ndarray[Any, Any]]]:
        """The buffers of the large values, with what these are called."""
        return {index: (self._leaves[index].name, buffer) for index, buffer in self.large.items()}

    def _differs(self, path: tuple[Any, ...], what: str) -> _Keep:
        self.differences.mismatched.append(f"{_name(path)}: {what}")
        return KEEP

    def _match(self, target: Any, node: Node, path: tuple[Any, ...]) -> Outcome:
        if is_tensor(target):
            return self._match_tensor(target, node, path)
        if objects.is_stateful(target):
            return self._match_object(target, node, path)
        if type(node) is dict and node.get(TAG) == "object":
            # The object's state itself, as in {"model": model.state_dict()}.
            node = node["v"]
        kind = kind_of(node, self._leaves)
        own = kind_of_target(target)
        if own == kind == "dict":
            return self._match_dict(target, node, path)
        if self._is_choosy and path and self._leaves_alone(node, path, alike=own == kind):
            return KEEP
        if own == kind and kind in ("list", "tuple"):
            return self._match_sequence(target, node, path)
        if kind == "pickle":
            # It may be of any type, also a container's subclass.
            return self._match_value(target, node, path)
        if (own in STRUCTURES or kind in STRUCTURES) and not (target is None or node is None):
            return self._differs(path, f"{article(own)}, in the checkpoint {article(kind)}")
        if self._has_tensors(node):
            return self._differs(path, f"{article(own)}, in the checkpoint {article(kind)} with tensors")
        if _target_has_tensors(target):
            return self._differs(path, f"{article(own)} with tensors, in the checkpoint {article(kind)}")
        return self._match_value(target, node, path)

    # What stays as it is

    def _leaves_alone(self, node: Node, path: tuple[Any, ...], *, alike: bool) -> bool:
        """Is what is here, which is no dict, not to be filled? alike: target and node are of one kind, so
        that it is looked into first if there are tensors in it."""
        if self._has_tensors(node):
            return not alike and not self._wanted.takes(path)
        return not self._wanted.takes(path) or self._own.stay(node, path)

    # Keys of one side

    def _missing(self, path: tuple[Any, ...], *, parameter: bool = False) -> None:
        """A key of the target only."""
        if self._wanted.takes(path, parameter=parameter) and not self._own.absent(path):
            self.differences.missing.append(_name(path))

    def _unexpected(self, path: tuple[Any, ...], node: Node) -> None:
        """A key of the checkpoint only."""
        if self._wanted.unexpected(path, node) and not self._own.superfluous(path):
            self.differences.unexpected.append(_name(path))

    # Tensors

    def _match_tensor(
        self, target: Any, node: Node, path: tuple[Any, ...], *, parameter: bool = False
    ) -> Outcome:
        if not (self._wanted.is_all or self._takes_tensor(target, path, parameter)):
            return KEEP
        if self._placed(target, node):
            return KEEP
        try:
            parts = extract(target, in_place=True)
        except ValueError as error:
            return self._differs(path, f"cannot be filled: {error}")
        if self._world is not None:
            return self._match_in_world(self._world, parts, node, path)
        nodes = [node] if len(parts) == 1 else node["v"] if _tag(node) == "tuple" else None
        leaves = None if nodes is None else [self._tensor_leaf(child) for child in nodes]
        if leaves is None or None in leaves:
            kind = kind_of(node, self._leaves)
            return self._differs(path, f"a tensor, in the checkpoint {article(kind)}")
        if len(leaves) != len(parts):
            return self._differs(path, f"{len(parts)} shards, in the checkpoint {len(leaves)}")
        for local, leaf in zip(parts, leaves, strict=True):
            assert leaf is not None
            cast = self._wanted.partial.cast
            problems = misfits(local.tensor, local.chunk, leaf, cast=cast)
            if problems:
                self._differs(path, "; ".join(problems))
            else:
                self.placements.append(placement_of(leaf, local.tensor, cast=cast))
        return KEEP

    def _takes_tensor(self, target: Any, path: tuple[Any, ...], parameter: bool) -> bool:
        return self._wanted.takes(path, parameter=parameter or isinstance(target, torch.nn.Parameter))

    def _match_in_world(self, world: World, parts: list[Local], node: Node, path: tuple[Any, ...]) -> Outcome:
        leaf = self._tensor_leaf(node)
        if leaf is None:
            if _tag(node) == "tuple" and not node["v"]:
                return self._differs(path, "no rank stored any of it")
            return self._differs(path, f"a tensor, in the checkpoint {article(kind_of(node, self._leaves))}")
        if self._own.tensor_stays(leaf):
            return KEEP
        for local in parts:
            self._place_in_world(world, leaf, local, path, cast=self._wanted.partial.cast)
        return KEEP

    def _place_in_world(
        self, world: World, leaf: Leaf, local: Local, path: tuple[Any, ...], *, cast: bool = False
    ) -> None:
        placed = world.place(leaf, local.tensor, local.chunk, cast=cast)
        if isinstance(placed, list):
            self._differs(path, "; ".join(placed))
        else:
            self.placements.append(placed)

    def _placed(self, target: Any, node: Node) -> bool:
        """Place a tensor if nothing about it is out of the ordinary."""
        if self._world is not None:
            return False
        leaf = self._tensor_leaf(node)
        placement = None if leaf is None else place(leaf, target)
        if placement is None:
            return False
        self.placements.append(placement)
        return True

    def _tensor_leaf(self, node: Node) -> Leaf | None:
        if type(node) is not dict or node.get(TAG) != "t":
            return None
        leaf = self._leaves[node["i"]]
        return leaf if leaf.kind is None else None

    def _has_tensors(self, node: Node) -> bool:
        return any(self._leaves[i].kind is None for i in leaf_indices(node))

    # Containers

    def _match_dict(self, target: dict[Any, Any], node: Node, path: tuple[Any, ...]) -> Outcome:
        stored = self._entries(node, path)
        found = self._wanted.entries(target, path, stored)
        self._look_for_prefix(target, path, found, stored)
        for key, value in target.items():
            if key not in found:
                self._missing((*path, key), parameter=isinstance(value, torch.nn.Parameter))
                continue
            child = found[key]
            # Ahead of all else, as nearly everything is such a tensor.
            if type(value) is torch.Tensor and self._wanted.is_all and self._placed(value, child):
                continue
            outcome = self._match(value, child, (*path, key))
            if not isinstance(outcome, _Keep):
                self.actions.append(_set_item(target, key, outcome))
        for key, child in stored.items():
            if key not in target:
                self._unexpected((*path, key), child)
        return KEEP

    def _entries(self, node: Node, path: tuple[Any, ...]) -> dict[Any, Node]:
        if TAG not in node:
            return node  # type: ignore[no-any-return]
        keys = self._decoder(path)
        return {keys.decode(key): child for key, child in node["v"]}

    def _match_sequence(self, target: Any, node: Node, path: tuple[Any, ...]) -> Outcome:
        stored = node if type(node) is list else node["v"]
        if len(target) != len(stored):
            if not self._has_tensors(node) and not _target_has_tensors(target):
                return self._match_value(target, node, path)
            self.differences.missing.extend(_name((*path, i)) for i in range(len(stored), len(target)))
            self.differences.unexpected.extend(_name((*path, i)) for i in range(len(target), len(stored)))
        outcomes = [
            self._match(value, child, (*path, index))
            for index, (value, child) in enumerate(zip(target, stored, strict=False))
        ]
        replaced = {i: outcome for i, outcome in enumerate(outcomes) if not isinstance(outcome, _Keep)}
        if isinstance(target, list):
            self.actions.extend(_set_item(target, i, outcome) for i, outcome in replaced.items())
            return KEEP
        if not replaced:
            return KEEP
        return lambda: tuple(replaced[i]() if i in replaced else value for i, value in enumerate(target))

    # Values

    def _match_value(self, target: Any, node: Node, path: tuple[Any, ...]) -> Outcome:
        # By their text too, which tells 0.0 from -0.0.
        if (
            type(target) in _SCALARS
            and type(node) is type(target)
            and node == target
            and repr(node) == repr(target)
        ):
            return KEEP
        get = self._value(node, path)
        if type(target) in (list, set, bytearray, np.ndarray):
            # Others may hold it too, and changing it in place reaches them. If it cannot be, it is replaced.
            return _InPlace(target, get)
        return get

    def _value(self, node: Node, path: tuple[Any, ...]) -> Callable[[], Any]:
        """What a node without tensors stands for; a malformed one, or a forbidden pickle, is an error right
        away.
        """
        value = self._decoder(path).decode(node)
        indices = leaf_indices(node)
        if not indices:
            return lambda: value
        for index in indices:
            self._read_large(index)
        return lambda: self._decoder(path, self._large_value).decode(node)

    def _read_large(self, index: int) -> None:
        self.large.setdefault(index, np.empty(self._leaves[index].nbytes, np.uint8))

    def _large_value(self, index: int) -> Any:
        leaf = self._leaves[index]
        return large_value(leaf.kind or "", leaf.descr, self.large[index].data)

    def _decoder(self, path: tuple[Any, ...], leaf: Callable[[int], Any] = lambda _: None) -> Decoder:
        return Decoder(leaf, path=path, allow_pickle=self._allow_pickle)

    # Objects

    def _match_object(self, target: Any, node: Node, path: tuple[Any, ...]) -> Outcome:
        if _tag(node) == "object":
            node = node["v"]
        adapter = objects.adapter(target)
        parts = adapter.parts()
        if parts is not None or isinstance(adapter, objects.ModuleAdapter):
            kind = kind_of(node, self._leaves)
            if kind != "dict":
                return self._differs(path, f"{type_name(target)}, in the checkpoint {article(kind)}")
            if parts is not None:
                return self._match_dict(parts, node, path)
            return self._match_module(adapter, node, path)
        return self._match_open(adapter, node, path)

    def _match_module(self, adapter: Any, node: Node, path: tuple[Any, ...]) -> Outcome:
        state = adapter.state()
        entries = self._entries(node, path)
        stored_as: dict[Any, Any] = {}
        if self._wanted.partial.rename is None and not state.keys() <= entries.keys():
            renamed = adapter.otherwise_named(state, entries)
            stored_as = {here: stored for stored, here in renamed.items()}
            entries = {renamed.get(key, key): child for key, child in entries.items()}
        stored = self._wanted.entries(state, path, entries, of_module=True)
        self._look_for_prefix(state, path, stored, entries)
        buffers = adapter.buffers() if self._wanted.partial.parameters_only else ()
        given: dict[Any, Callable[[], Any]] = {}
        needed: list[Placement] = []
        large = set(self.large)
        for key, value in state.items():
            inner = (*path, key)
            first = len(self.placements)
            is_own = is_tensor(value) and not objects.is_extra_state(key)
            parameter = is_own and key not in buffers
            if key not in stored:
                self._missing(inner, parameter=parameter)
            elif not self._wanted.is_all and not self._wanted.takes(inner, parameter=parameter):
                continue
            elif is_own:
                self._match_tensor(value, stored[key], inner, parameter=parameter)
                if not adapter.owns(value):
                    given[key] = _constant(value)
            elif not self._own.stay(stored[key], (*path, stored_as.get(key, key))):
                unplaced: list[Path] = []
                given[key] = self._opened(value, stored[key], inner, lambda path, leaf: None, unplaced)
                self._differ_as_unplaced(unplaced)
            if key in given:
                needed += self.placements[first:]
        for key, child in entries.items():
            if key not in state:
                self._unexpected((*path, key), child)
        if given:
            self.actions.append(
                Load(
                    adapter,
                    lambda: {key: get() for key, get in given.items()},
                    _name(path),
                    tuple(needed),
                    tuple(self.large.keys() - large),
                    self._origin,
                    of_module=True,
                )
            )
        return KEEP

    def _match_open(self, adapter: objects.Adapter, node: Node, path: tuple[Any, ...]) -> Outcome:
        torn = self._wanted.torn(path, node)
        if torn:
            few = ", ".join(torn[:3])
            return self._differs(path, f"is restored as a whole or not at all; the patterns divide it: {few}")
        if not self._wanted.takes(path) or self._own.stay(node, path):
            return KEEP
        names = adapter.parameter_names()
        node = self._wanted.renamed_optimizer(names, node, path)
        first, large = len(self.placements), set(self.large)
        unplaced: list[Path] = []
        get = self._opened(adapter.state(), node, path, adapter.fresh, unplaced)
        loaded = get()
        problems = adapter.problems(loaded)
        for problem in problems:
            self._differs(path, problem)
        if problems and names:
            self._look_for_prefix_of_parameters(names, path, loaded)
            # Of parameters that it does not hold: the problems tell of these.
            known = set(names)
            unplaced = [inner for inner in unplaced if inner[len(path) + 1] in known]
        self._differ_as_unplaced(unplaced)
        needed, values = tuple(self.placements[first:]), tuple(self.large.keys() - large)
        self.actions.append(Load(adapter, get, _name(path), needed, values, self._origin))
        return KEEP

    def _differ_as_unplaced(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._differs(
                path,
                "a chunk of a sharded tensor is stored; the object has no such tensor yet, and cannot be "
                "told how to make one; let it build its state first, or use training_state",
            )

    # Names that differ by their beginning

    def _look_for_prefix(
        self, target: Collection[Any], path: Path, found: Collection[Any], stored: Collection[Any]
    ) -> None:
        """If nothing of a dict's keys was found: was it stored under another beginning?"""
        if not target or any(key in found for key in target):
            return
        if self._wanted.is_needless(path, target):
            self.differences.needless = True
        elif all(type(key) is str for key in (*target, *stored)):
            self._note_prefix(path, other_prefix(target, stored))

    def _look_for_prefix_of_parameters(self, names: Collection[str], path: Path, loaded: Any) -> None:
        """The same for an optimizer's, which follow those of the model beside it."""
        groups = loaded.get("param_groups") if isinstance(loaded, dict) else None
        if self._wanted.partial.rename is None and type(groups) is list:
            self._note_prefix((*path[:-1], "model"), other_prefix(names, names_in(groups)))

    def _note_prefix(self, path: Path, found: tuple[str, str] | None) -> None:
        if found is not None:
            here, there = (_name((*path, prefix) if prefix else path) for prefix in found)
            self.differences.rename[here] = there

    def _opened(
        self,
        current: Any,
        node: Node,
        path: tuple[Any, ...],
        fresh: Callable[[tuple[Any, ...], Leaf], Any],
        unplaced: list[Path],
    ) -> Callable[[], Any]:
        """A state that is taken as it was stored.

        Its tensors are the current state's where that has one that fits, else new ones; `unplaced` gets those
        that are chunks and of which nobody knows what they would be here. The function may be called before
        the read too: the tensors and large values are then not filled yet.
        """
        filled: dict[int, Any] = {}
        large: list[int] = []

        def place(index: int) -> Any:
            leaf = self._leaves[index]
            if leaf.kind is not None:
                self._read_large(index)
                large.append(index)
                return None
            inner = tuple(decoder.path[len(path) :])
            if self._world is not None:
                leaf = self._world.described(leaf)
            value = self._fitting(current, inner, leaf)
            fits = value is not None
            if value is None:
                value = fresh(inner, leaf)
            if value is None:
                value = empty_for(leaf)
                if leaf.chunk is not None:
                    unplaced.append(tuple(decoder.path))
                    return value
            filled[index] = value
            for local in extract(value, in_place=True):
                if self._world is not None:
                    self._place_in_world(self._world, leaf, local, tuple(decoder.path))
                elif not fits and (problems := misfits(local.tensor, local.chunk, leaf)):
                    self._differs(tuple(decoder.path), "; ".join(problems))
                else:
                    self.placements.append(placement_of(leaf, local.tensor))
            return value

        decoder = self._decoder(path, place)
        decoded = decoder.decode(node)
        if not large:
            return lambda: decoded
        return lambda: self._decoder(
            path, lambda index: filled[index] if index in filled else self._large_value(index)
        ).decode(node)

    def _fitting(self, current: Any, path: tuple[Any, ...], leaf: Leaf) -> Any:
        """The current state's tensor at a path, if it has one that the leaf fits."""
        for key in path:
            try:
                current = current[key]
            except (KeyError, IndexError, TypeError):
                return None
        if not is_tensor(current):
            return None
        try:
            parts = extract(current, in_place=True)
        except ValueError:
            return None
        if self._world is not None:
            # Any chunk will do, if it is one of that tensor.
            shapes = {_tensor_shape(local) for local in parts}
            alike = all(dtype_name(local.tensor.dtype) == leaf.dtype for local in parts)
            return current if alike and shapes == {leaf.whole.tensor_shape} else None
        return current if len(parts) == 1 and not misfits(parts[0].tensor, parts[0].chunk, leaf) else None


@dataclass(frozen=True, slots=True, eq=False)
class _InPlace:
    """Puts a value into a mutable one of the same kind and returns that; if it cannot, the value."""

    target: Any
    get: Callable[[], Any]

    def __call__(self) -> Any:
        target, value = self.target, self.get()
        if type(value) is not type(target):
            return value
        if isinstance(target, np.ndarray):
            if value.dtype != target.dtype or value.shape != target.shape or not target.flags.writeable:
                return value
            target[...] = value
        elif isinstance(target, set):
            target.clear()
            target.update(value)
        else:
            target[:] = value
        return target


_SCALARS = (type(None), bool, int, float, str)


def _tensor_shape(local: Local) -> tuple[int, ...]:
    return tuple(local.tensor.shape) if local.chunk is None else local.chunk.tensor_shape


def _tag(node: Node) -> Any:
    return node.get(TAG) if type(node) is dict else None


def _target_has_tensors(target: Any) -> bool:
    if is_tensor(target) or objects.is_stateful(target):
        return True
    if isinstance(target, dict):
        return any(map(_target_has_tensors, target.values()))
    return type(target) in (list, tuple) and any(map(_target_has_tensors, target))


def _name(path: tuple[Any, ...]) -> str:
    return joined(path)


def _set_item(holder: Any, key: Any, get: Callable[[], Any]) -> Callable[[], None]:
    def action() -> None:
        holder[key] = get()

    return action


def _constant(value: Any) -> Callable[[], Any]:
    if isinstance(value, LocalChunk):
        return lambda: value.tensor
    return lambda: value
