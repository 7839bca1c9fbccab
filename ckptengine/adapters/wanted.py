"""Which places of a target does a restore of a part of it fill, and which nodes of the tree are theirs?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ckptengine.adapters import objects
from ckptengine.adapters.keypath import joined
from ckptengine.adapters.kinds import kind_of_target
from ckptengine.adapters.values import Node, decode_value
from ckptengine.adapters.wrappers import known_by_another_name
from ckptengine.format.tree import TAG, leaf
from ckptengine.read import trees
from ckptengine.read.partial import Partial

Path = tuple[Any, ...]


class Wanted:
    """Is asked along a walk through target and tree. is_all: everything is filled from its own name."""

    def __init__(self, partial: Partial) -> None:
        self.partial = partial
        self.is_all = partial.is_all and partial.rename is None
        self._nodes: dict[str, Node] = {}
        self._used: set[str] = set()
        self._found = False

    def begin(self, tree: Node) -> None:
        """tree: what the names are looked up in."""
        if self.partial.rename is not None:
            self._nodes = dict(trees.named(tree, key_text))

    def takes(self, path: Path, *, parameter: bool = False) -> bool:
        """Is what is here to be filled? parameter: it is a module's parameter."""
        if self.is_all:
            return True
        # Asked of each name, as that shows which patterns have one.
        taken = self.partial.selects(joined(path)) and (parameter or not self.partial.parameters_only)
        self._found = self._found or taken
        return taken

    def torn(self, path: Path, node: Node) -> list[str]:
        """The names of what is here, and loaded as a whole, that the patterns would have another way than the
        whole."""
        partial = self.partial
        if partial.include is None and not partial.exclude:
            return []
        name = joined(path)
        whole = partial.selects(name)
        inner = (f"{name}.{below}" for below, child in trees.named(node, key_text) if _is_leaf(child))
        return [one for one in inner if partial.selects(one) != whole]

    def entries(
        self, target: Mapping[Any, Any], path: Path, stored: dict[Any, Node], *, of_module: bool = False
    ) -> dict[Any, Node]:
        """The nodes of a dict's keys. stored: those under the dict's own name. of_module: in a module's, all
        is taken as a whole, also an extra state that is a dict.

        One that is only looked into has none if its own name was not stored: what is in it may have been.
        """
        if self.is_all:
            return stored
        found = dict(stored) if self.partial.rename is None else {}
        for key, value in target.items():
            looked_into = not of_module and is_structure(value)
            if self.partial.rename is not None:
                name = self.partial.stored_name(joined((*path, key)))
                if name in self._nodes:
                    found[key] = self._nodes[name]
                    if not looked_into:
                        self._used.add(name)
            if key not in found and looked_into:
                found[key] = {}
        return found

    def unexpected(self, path: Path, node: Node) -> bool:
        """Should what only the checkpoint has here have had a place?"""
        partial = self.partial
        if self.is_all:
            return True
        if partial.parameters_only or partial.rename is not None:
            return False
        name = joined(path)
        inner = [f"{name}.{below}" for below, child in trees.named(node, key_text) if _is_leaf(child)]
        return any(map(partial.selects, inner or [name]))

    def left_over(self) -> list[str]:
        """With names that are mapped: the stored ones that no name of the target was mapped to."""
        if self.partial.parameters_only:
            return []
        return [
            name
            for name, node in self._nodes.items()
            if _is_leaf(node) and self.partial.selects(name) and not _is_below(name, self._used)
        ]

    def nothing(self) -> str | None:
        """Why it is an error that nothing was taken; None if something was."""
        if self._found or self.partial.is_all:
            return None
        return f"nothing of the target is selected by {self.partial}"

    def renamed_optimizer(self, names: Iterable[str], node: Node, path: Path) -> Node:
        """The state of an optimizer that is keyed by the names of a model's parameters, which lies beside it:
        with the names that these parameters have here."""
        inner = node["v"] if type(node) is dict and node.get(TAG) == "object" else node
        if type(inner) is not dict or TAG in inner or not {"state", "param_groups"} <= inner.keys():
            return node
        state, groups = inner["state"], inner["param_groups"]
        if type(state) is not dict or TAG in state or type(groups) is not list:
            return node
        if self.partial.rename is None:
            renamed = known_by_another_name(names_in(groups), set(names))
            if not renamed:
                return node
        else:
            renamed = self._renamed_parameters(names, path)
        return {
            **inner,
            "state": {renamed.get(name, name): value for name, value in state.items()},
            "param_groups": [_with_names(group, renamed) for group in groups],
        }

    def _renamed_parameters(self, names: Iterable[str], path: Path) -> dict[str, str]:
        """By the names that an optimizer's parameters were stored under: those that they have here."""
        here = f"{joined(path[:-1])}.model." if len(path) > 1 else "model."
        # What is before the model's own names where it was stored: the state they are both of.
        there = self.partial.stored_name(joined(path)).removesuffix(str(path[-1])) + "model."
        stored = {self.partial.stored_name(here + name): name for name in names}
        return {other.removeprefix(there): name for other, name in stored.items() if other.startswith(there)}

    def is_needless(self, path: Path, keys: Iterable[Any]) -> bool:
        """Are names mapped of what was stored under the very names that it has here?"""
        return self.partial.rename is not None and all(joined((*path, key)) in self._nodes for key in keys)


def is_structure(value: Any) -> bool:
    """Is a target's value only looked into, and never taken as a whole?"""
    if isinstance(value, nn.Module | objects.ModuleAdapter):
        return True
    if objects.is_stateful(value):
        return objects.adapter(value).parts() is not None
    return kind_of_target(value) == "dict"


def names_in(groups: Iterable[Any]) -> list[str]:
    """Of the parameters in an optimizer's groups, as stored."""
    params = [
        group["params"] for group in groups if type(group) is dict and type(group.get("params")) is list
    ]
    return [name for names in params for name in names if type(name) is str]


def _with_names(group: Any, renamed: dict[str, str]) -> Any:
    params = group.get("params") if type(group) is dict else None
    if type(params) is not list or not all(type(name) is str for name in params):
        return group
    return {**group, "params": [renamed.get(name, name) for name in params]}


def _is_leaf(node: Node) -> bool:
    return leaf(node) is not None or trees.is_value(node)


def _is_below(name: str, names: set[str]) -> bool:
    return any(one in names for one in _and_above(name))


def _and_above(name: str) -> Iterator[str]:
    yield name
    at = name.rfind(".")
    while at >= 0:
        yield name[:at]
        at = name.rfind(".", 0, at)


def key_text(key: Node) -> str:
    """What a key is called in names."""
    return joined((decode_value(key),))
