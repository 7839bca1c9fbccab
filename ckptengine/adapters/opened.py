"""Of which tensors is a state made that an object takes as it was stored?

Of those that the object's current state has in their places, if they fit; else of new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptengine.adapters.leaves import Leaf, empty_for, misfits
from ckptengine.adapters.matching_tensors import Tensors
from ckptengine.adapters.matching_values import Values
from ckptengine.adapters.placing import placement_of
from ckptengine.adapters.tensors import Local, dtype_name, extract, is_tensor
from ckptengine.adapters.values import Node
from ckptengine.adapters.walk import Walk
from ckptengine.adapters.wanted import Path

Fresh = Callable[[Path, Leaf], Any]
"""Gives something to fill for a stored tensor at a path in the state; None: a plain tensor will do."""


class Opened:
    """The state at one path. After `open`, `unplaced` has the paths of stored chunks of which nobody knows
    what they would be here."""

    def __init__(
        self, walk: Walk, tensors: Tensors, values: Values, current: Any, path: Path, fresh: Fresh
    ) -> None:
        self._walk = walk
        self._world = walk.world
        self._tensors = tensors
        self._values = values
        self._current = current
        self._path = path
        self._fresh = fresh
        self._filled: dict[int, Any] = {}
        self._has_large = False
        self._decoder = values.decoder(path, self._place)
        self.unplaced: list[Path] = []

    def open(self, node: Node) -> Callable[[], Any]:
        """What returns the state. It may be called before the read too: the tensors and large values are then
        not filled yet."""
        decoded = self._decoder.decode(node)
        if not self._has_large:
            return lambda: decoded
        filled, values = self._filled, self._values
        return lambda: values.decoder(
            self._path, lambda index: filled[index] if index in filled else values.large_value(index)
        ).decode(node)

    def _place(self, index: int) -> Any:
        leaf = self._walk.leaves[index]
        if leaf.kind is not None:
            self._values.read_large(index)
            self._has_large = True
            return None
        path = tuple(self._decoder.path)
        inner = path[len(self._path) :]
        if self._world is not None:
            leaf = self._world.described(leaf)
        value = self._fitting(inner, leaf)
        fits = value is not None
        if value is None:
            value = self._fresh(inner, leaf)
        if value is None:
            value = empty_for(leaf)
            if leaf.chunk is not None:
                self.unplaced.append(path)
                return value
        self._filled[index] = value
        for local in extract(value, in_place=True):
            if self._world is not None:
                self._tensors.place_in_world(self._world, leaf, local, path)
            elif not fits and (problems := misfits(local.tensor, local.chunk, leaf)):
                self._walk.differs(path, "; ".join(problems))
            else:
                self._walk.placements.append(placement_of(leaf, local.tensor))
        return value

    def _fitting(self, path: Path, leaf: Leaf) -> Any:
        """The current state's tensor at a path in it, if it has one that the leaf fits."""
        current = self._current
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


def _tensor_shape(local: Local) -> tuple[int, ...]:
    return tuple(local.tensor.shape) if local.chunk is None else local.chunk.tensor_shape
