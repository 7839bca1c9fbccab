"""Does a stored tree fit a target, and what goes where?

Target and tree are walked together, by key, not by name. Dicts are structure: their keys must agree. Lists
and tuples that hold tensors are structure too; without tensors they are values, and may have changed their
length. `None` stands for any value without tensors. What is met on the way is for `matching_tensors`,
`matching_values` and `matching_objects`. Nothing is changed here: all that is to be done after the read is
collected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckptengine.adapters import objects
from ckptengine.adapters.keypath import joined
from ckptengine.adapters.kinds import STRUCTURES, article, kind_of, kind_of_target
from ckptengine.adapters.leaves import Leaf
from ckptengine.adapters.matching_objects import Objects
from ckptengine.adapters.matching_tensors import Tensors
from ckptengine.adapters.matching_values import Values
from ckptengine.adapters.origin import Origin
from ckptengine.adapters.placing import Plan
from ckptengine.adapters.tensors import is_tensor
from ckptengine.adapters.values import Node
from ckptengine.adapters.walk import KEEP, Keep, Outcome, Walk
from ckptengine.adapters.wanted import Path
from ckptengine.adapters.world import World
from ckptengine.format.tree import TAG
from ckptengine.read.partial import ALL, Partial
from ckptengine.read.per_rank import PerRankChoices


class Matcher:
    """Walks one target and one tree. After `match`: `differences`, `placements`, the `large` values to be
    read and, for after the read, `actions`.

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
        walk = Walk(
            leaves,
            allow_pickle=allow_pickle,
            world=world,
            per_rank=per_rank,
            partial=partial,
            origin=origin or Origin(),
        )
        self._walk = walk
        self._leaves = leaves
        self._wanted = walk.wanted
        self._own = walk.own
        self._is_choosy = per_rank is not None or not walk.wanted.is_all
        self._tensors = Tensors(walk)
        self._values = Values(walk)
        self._objects = Objects(walk, self._tensors, self._values)
        self.asked = per_rank
        self.differences = walk.differences
        self.placements = walk.placements
        self.large = self._values.large
        self.actions = walk.actions

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
        for index, one in self.large.items():
            plan.read_into(self._leaves[index], one.buffer.ctypes.data)

    def _match(self, target: Any, node: Node, path: Path) -> Outcome:
        if is_tensor(target):
            self._tensors.match(target, node, path)
            return KEEP
        if objects.is_stateful(target):
            self._objects.match(target, node, path, self._match_dict)
            return KEEP
        if type(node) is dict and node.get(TAG) == "object":
            # The object's state itself, as in {"model": model.state_dict()}.
            node = node["v"]
        walk = self._walk
        kind = kind_of(node, self._leaves)
        own = kind_of_target(target)
        if own == kind == "dict":
            self._match_dict(target, node, path)
            return KEEP
        if self._is_choosy and path and self._leaves_alone(node, path, alike=own == kind):
            return KEEP
        if own == kind and kind in ("list", "tuple"):
            return self._match_sequence(target, node, path)
        if kind == "pickle":
            # It may be of any type, also a container's subclass.
            return self._values.match(target, node, path)
        if (own in STRUCTURES or kind in STRUCTURES) and not (target is None or node is None):
            return walk.differs(path, f"{article(own)}, in the checkpoint {article(kind)}")
        if walk.has_tensors(node):
            return walk.differs(path, f"{article(own)}, in the checkpoint {article(kind)} with tensors")
        if _target_has_tensors(target):
            return walk.differs(path, f"{article(own)} with tensors, in the checkpoint {article(kind)}")
        return self._values.match(target, node, path)

    def _leaves_alone(self, node: Node, path: Path, *, alike: bool) -> bool:
        """Is what is here, which is no dict, not to be filled? alike: target and node are of one kind, so
        that it is looked into first if there are tensors in it."""
        if self._walk.has_tensors(node):
            return not alike and not self._wanted.takes(path)
        return not self._wanted.takes(path) or self._own.stay(node, path)

    def _match_dict(self, target: dict[Any, Any], node: Node, path: Path) -> None:
        walk = self._walk
        stored = self._values.entries(node, path)
        found = self._wanted.entries(target, path, stored)
        walk.look_for_prefix(target, path, found, stored)
        for key, value in target.items():
            if key not in found:
                walk.missing((*path, key), parameter=isinstance(value, torch.nn.Parameter))
                continue
            child = found[key]
            # Ahead of all else, as nearly everything is such a tensor.
            if (
                type(value) is torch.Tensor
                and self._wanted.is_all
                and self._tensors.place_ordinary(value, child)
            ):
                continue
            outcome = self._match(value, child, (*path, key))
            if not isinstance(outcome, Keep):
                self.actions.append(_set_item(target, key, outcome))
        for key, child in stored.items():
            if key not in target:
                walk.unexpected((*path, key), child)

    def _match_sequence(self, target: Any, node: Node, path: Path) -> Outcome:
        stored = node if type(node) is list else node["v"]
        if len(target) != len(stored):
            if not self._walk.has_tensors(node) and not _target_has_tensors(target):
                return self._values.match(target, node, path)
            self.differences.missing.extend(joined((*path, i)) for i in range(len(stored), len(target)))
            self.differences.unexpected.extend(joined((*path, i)) for i in range(len(target), len(stored)))
        outcomes = [
            self._match(value, child, (*path, index))
            for index, (value, child) in enumerate(zip(target, stored, strict=False))
        ]
        replaced = {i: outcome for i, outcome in enumerate(outcomes) if not isinstance(outcome, Keep)}
        if isinstance(target, list):
            self.actions.extend(_set_item(target, i, outcome) for i, outcome in replaced.items())
            return KEEP
        if not replaced:
            return KEEP
        return lambda: tuple(replaced[i]() if i in replaced else value for i, value in enumerate(target))


def _target_has_tensors(target: Any) -> bool:
    if is_tensor(target) or objects.is_stateful(target):
        return True
    if isinstance(target, dict):
        return any(map(_target_has_tensors, target.values()))
    return type(target) in (list, tuple) and any(map(_target_has_tensors, target))


def _set_item(holder: Any, key: Any, get: Callable[[], Any]) -> Callable[[], None]:
    def action() -> None:
        holder[key] = get()

    return action
