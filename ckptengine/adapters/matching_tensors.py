"""Does a stored tensor fit one of a target, whole or in parts, and which bytes go where?"""

from __future__ import annotations

from typing import Any

import torch

from ckptengine.adapters.kinds import article, kind_of
from ckptengine.adapters.leaves import Leaf, misfits
from ckptengine.adapters.placing import place, placement_of
from ckptengine.adapters.tensors import Local, extract
from ckptengine.adapters.values import Node
from ckptengine.adapters.walk import Walk, tag_of
from ckptengine.adapters.wanted import Path
from ckptengine.adapters.world import World


class Tensors:
    """Those of one walk. What is found are its `placements`."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._world = walk.world
        self._wanted = walk.wanted
        self._placements = walk.placements

    def place_ordinary(self, target: Any, node: Node) -> bool:
        """Place a tensor if nothing about it is out of the ordinary."""
        if self._world is not None:
            return False
        leaf = self._walk.tensor_leaf(node)
        placement = None if leaf is None else place(leaf, target)
        if placement is None:
            return False
        self._placements.append(placement)
        return True

    def match(self, target: Any, node: Node, path: Path, *, parameter: bool = False) -> None:
        """parameter: it is a module's, also if it is not an `nn.Parameter` here."""
        walk = self._walk
        if not (self._wanted.is_all or self._takes(target, path, parameter)):
            return
        if self.place_ordinary(target, node):
            return
        try:
            parts = extract(target, in_place=True)
        except ValueError as error:
            walk.differs(path, f"cannot be filled: {error}")
            return
        if self._world is not None:
            self._match_in_world(self._world, parts, node, path)
            return
        nodes = [node] if len(parts) == 1 else node["v"] if tag_of(node) == "tuple" else None
        leaves = None if nodes is None else [walk.tensor_leaf(child) for child in nodes]
        if leaves is None or None in leaves:
            kind = kind_of(node, walk.leaves)
            walk.differs(path, f"a tensor, in the checkpoint {article(kind)}")
            return
        if len(leaves) != len(parts):
            walk.differs(path, f"{len(parts)} shards, in the checkpoint {len(leaves)}")
            return
        for local, leaf in zip(parts, leaves, strict=True):
            assert leaf is not None
            cast = self._wanted.partial.cast
            problems = misfits(local.tensor, local.chunk, leaf, cast=cast)
            if problems:
                walk.differs(path, "; ".join(problems))
            else:
                self._placements.append(placement_of(leaf, local.tensor, cast=cast))

    def _takes(self, target: Any, path: Path, parameter: bool) -> bool:
        return self._wanted.takes(path, parameter=parameter or isinstance(target, torch.nn.Parameter))

    def _match_in_world(self, world: World, parts: list[Local], node: Node, path: Path) -> None:
        walk = self._walk
        leaf = walk.tensor_leaf(node)
        if leaf is None:
            if tag_of(node) == "tuple" and not node["v"]:
                walk.differs(path, "no rank stored any of it")
            else:
                walk.differs(path, f"a tensor, in the checkpoint {article(kind_of(node, walk.leaves))}")
            return
        if walk.own.tensor_stays(leaf):
            return
        for local in parts:
            self.place_in_world(world, leaf, local, path, cast=self._wanted.partial.cast)

    def place_in_world(
        self, world: World, leaf: Leaf, local: Local, path: Path, *, cast: bool = False
    ) -> None:
        """Have a tensor, or the chunk it is, put together from what all ranks stored."""
        placed = world.place(leaf, local.tensor, local.chunk, cast=cast)
        if isinstance(placed, list):
            self._walk.differs(path, "; ".join(placed))
        else:
            self._placements.append(placed)
