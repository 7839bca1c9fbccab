"""What does one walk through a target and a tree go by, and what has it found so far?"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ckptengine.adapters.differences import Differences
from ckptengine.adapters.keypath import joined
from ckptengine.adapters.leaves import Leaf, leaf_indices
from ckptengine.adapters.origin import Origin
from ckptengine.adapters.own_values import OwnValues
from ckptengine.adapters.placing import Placement
from ckptengine.adapters.values import Node
from ckptengine.adapters.wanted import Path, Wanted
from ckptengine.adapters.world import World
from ckptengine.format.tree import TAG
from ckptengine.read.partial import Partial, other_prefix
from ckptengine.read.per_rank import PerRankChoices


class Keep:
    """The target's value stays, filled in place if need be."""


KEEP = Keep()
Outcome = Keep | Callable[[], Any]
"""What becomes of a target's value: it stays, or its holder gets what the function returns, after the read.
"""


class Walk:
    """What all who match a part of a target have in common; see `Matcher` for what it is made from."""

    def __init__(
        self,
        leaves: list[Leaf],
        *,
        allow_pickle: bool,
        world: World | None,
        per_rank: PerRankChoices | None,
        partial: Partial,
        origin: Origin,
    ) -> None:
        self.leaves = leaves
        self.world = world
        self.allow_pickle = allow_pickle
        self.origin = origin
        is_sharded = (lambda leaf: False) if world is None else world.is_sharded
        self.own = OwnValues(leaves, per_rank, partial.stored_name, is_sharded)
        self.wanted = Wanted(partial)
        self.differences = Differences()
        self.placements: list[Placement] = []
        self.actions: list[Callable[[], object]] = []
        """Values into their holders, then whole states into objects; in the order of the walk."""

    def differs(self, path: Path, what: str) -> Keep:
        self.differences.mismatched.append(f"{joined(path)}: {what}")
        return KEEP

    def missing(self, path: Path, *, parameter: bool = False) -> None:
        """A key of the target only."""
        if self.wanted.takes(path, parameter=parameter) and not self.own.absent(path):
            self.differences.missing.append(joined(path))

    def unexpected(self, path: Path, node: Node) -> None:
        """A key of the checkpoint only."""
        if self.wanted.unexpected(path, node) and not self.own.superfluous(path):
            self.differences.unexpected.append(joined(path))

    def tensor_leaf(self, node: Node) -> Leaf | None:
        """What a node stands for, if it is a tensor."""
        if type(node) is not dict or node.get(TAG) != "t":
            return None
        leaf = self.leaves[node["i"]]
        return leaf if leaf.kind is None else None

    def has_tensors(self, node: Node) -> bool:
        return any(self.leaves[i].kind is None for i in leaf_indices(node))

    # Names that differ by their beginning

    def look_for_prefix(
        self, target: Collection[Any], path: Path, found: Collection[Any], stored: Collection[Any]
    ) -> None:
        """If nothing of a dict's keys was found: was it stored under another beginning?"""
        if not target or any(key in found for key in target):
            return
        if self.wanted.is_needless(path, target):
            self.differences.needless = True
        elif all(type(key) is str for key in (*target, *stored)):
            self.note_prefix(path, other_prefix(target, stored))

    def note_prefix(self, path: Path, found: tuple[str, str] | None) -> None:
        """found: the beginning here and the one that was stored, of names below `path`."""
        if found is not None:
            here, there = (joined((*path, prefix) if prefix else path) for prefix in found)
            self.differences.rename[here] = there


def tag_of(node: Node) -> Any:
    return node.get(TAG) if type(node) is dict else None
