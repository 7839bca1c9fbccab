"""What is the state of all ranks together: one tree, and where each of its tensors is described?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ckptengine.format.shard import ShardHeader
from ckptengine.read import trees, world

HeaderOf = Callable[[int], ShardHeader]


class MergedLeaf(NamedTuple):
    """A tensor of a merged tree: the rank whose tree it is from, the number it has there, and its FQN."""

    rank: int
    number: int
    fqn: str


class MergedTree:
    """One rank's tree, with the keys that only other ranks' trees have.

    leaves: what the tree's numbers stand for. header: gives any rank's header, for the names that replicas
    have where they are stored.
    """

    def __init__(self, first: ShardHeader, header: HeaderOf) -> None:
        self.leaves: list[MergedLeaf] = []
        self._header = header
        self._fqns: dict[int, dict[str, str]] = {}
        self.tree: Any = self._labelled(first)

    def add(self, header: ShardHeader) -> None:
        self.tree = trees.merge(self.tree, self._labelled(header))

    def _labelled(self, header: ShardHeader) -> Any:
        names = header.leaf_names
        fqns = [*self._stored(header).values()]
        fqns += (self._of_replica(name, owner) for name, owner in header.replicas.items())

        def label(number: int) -> int:
            self.leaves.append(MergedLeaf(header.rank, number, fqns[number]))
            return len(self.leaves) - 1

        def same(numbers: list[int]) -> bool:
            return len({fqns[i] for i in numbers}) == 1 and all(names[i] != fqns[i] for i in numbers)

        return trees.relabel(header.tree, label, same)

    def _stored(self, header: ShardHeader) -> dict[str, str]:
        """For each entry of a shard, in leaf order, the name of the tensor that it is, or is a part of."""
        fqns = self._fqns.get(header.rank)
        if fqns is None:
            fqns = {entry.name: world.tensor_name(entry.name, entry.chunk) for entry in header.tensors}
            fqns |= {view.name: world.tensor_name(view.name, view.chunk) for view in header.views}
            self._fqns[header.rank] = fqns
        return fqns

    def _of_replica(self, name: str, owner: int) -> str:
        # Only a part's name says more than the FQN.
        return self._stored(self._header(owner)).get(name, name) if "@" in name else name
