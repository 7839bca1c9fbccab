"""How does a stored value take the place of one in a target?

It replaces that, whatever its type, in the dict or list that holds it; a list, set, bytearray or array is
changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptengine.adapters.leaves import leaf_indices
from ckptengine.adapters.values import Decoder, Node, large_value
from ckptengine.adapters.walk import KEEP, Outcome, Walk
from ckptengine.adapters.wanted import Path
from ckptengine.format.tree import TAG

_SCALARS = (type(None), bool, int, float, str)


@dataclass(frozen=True, slots=True, eq=False)
class Large:
    """A large value that is read into a buffer. after: so many tensors come before it in the target."""

    name: str
    buffer: np.ndarray[Any, Any]
    after: int


class Values:
    """Those of one walk."""

    def __init__(self, walk: Walk) -> None:
        self._leaves = walk.leaves
        self._placements = walk.placements
        self._allow_pickle = walk.allow_pickle
        self.large: dict[int, Large] = {}
        """Those to be read, by leaf, in the order of the walk."""

    def match(self, target: Any, node: Node, path: Path) -> Outcome:
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

    def _value(self, node: Node, path: Path) -> Callable[[], Any]:
        """What a node without tensors stands for; a malformed one, or a forbidden pickle, is an error right
        away.
        """
        value = self.decoder(path).decode(node)
        indices = leaf_indices(node)
        if not indices:
            return lambda: value
        for index in indices:
            self.read_large(index)
        return lambda: self.decoder(path, self.large_value).decode(node)

    def read_large(self, index: int) -> None:
        if index not in self.large:
            leaf = self._leaves[index]
            self.large[index] = Large(leaf.name, np.empty(leaf.nbytes, np.uint8), len(self._placements))

    def large_value(self, index: int) -> Any:
        """After the read."""
        leaf = self._leaves[index]
        return large_value(leaf.kind or "", leaf.descr, self.large[index].buffer.data)

    def decoder(self, path: Path, leaf: Callable[[int], Any] = lambda _: None) -> Decoder:
        return Decoder(leaf, path=path, allow_pickle=self._allow_pickle)

    def entries(self, node: Node, path: Path) -> dict[Any, Node]:
        """The nodes of a dict's keys."""
        if TAG not in node:
            return node  # type: ignore[no-any-return]
        keys = self.decoder(path)
        return {keys.decode(key): child for key, child in node["v"]}


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
