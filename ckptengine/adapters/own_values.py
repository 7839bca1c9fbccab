"""Which of the target's values stay as they are, as each of the ranks that saved may have had its own?"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec

from ckptengine.adapters.leaves import Leaf, leaf_indices
from ckptengine.adapters.values import Encoder, Node
from ckptengine.format.per_rank import values_in
from ckptengine.read.per_rank import PerRankChoices


class OwnValues:
    """Asks for the values of a walk through target and tree. asked: None if the tree is that of the rank that
    restores; then none stays. is_sharded: is what one rank stored as a whole tensor all of a sharded one, of
    which the others have nothing?"""

    def __init__(
        self,
        leaves: list[Leaf],
        asked: PerRankChoices | None,
        stored_name: Callable[[str], str],
        is_sharded: Callable[[Leaf], bool],
    ) -> None:
        self._leaves = leaves
        self._asked = asked
        self._stored_name = stored_name
        self._is_sharded = is_sharded

    def stay(self, node: Node, path: tuple[Any, ...]) -> bool:
        """All that is taken from the node together."""
        if self._asked is None:
            return False
        name = self._name(path)
        names = values_in(msgspec.json.encode(node), name, self._large)
        names += [self._leaves[i].name for i in leaf_indices(node) if self._is_own(self._leaves[i])]
        return self._asked.drop(name) if names == [name] else self._asked.drop_together(name, names)

    def tensor_stays(self, leaf: Leaf) -> bool:
        return self._asked is not None and self._is_own(leaf) and self._asked.drop(leaf.name)

    def absent(self, path: tuple[Any, ...]) -> bool:
        """What the tree does not have and the target does: has the policy had its say?"""
        return self._asked is not None and self._asked.absent(self._name(path))

    def superfluous(self, path: tuple[Any, ...]) -> bool:
        """What the tree has and the target does not."""
        return self._asked is not None and self._asked.superfluous(self._name(path))

    def _is_own(self, leaf: Leaf) -> bool:
        """Is it a whole tensor, no part of one?"""
        return leaf.kind is None and leaf.chunk is None and not self._is_sharded(leaf)

    def _name(self, path: tuple[Any, ...]) -> str:
        """The name, as the format has it, that a value of the target was stored under."""
        return self._stored_name(_name(path))

    @cached_property
    def _large(self) -> dict[int, str]:
        return {i: leaf.name for i, leaf in enumerate(self._leaves) if leaf.kind is not None}


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(key if type(key) is str else _key_text(key) for key in path)


def _key_text(key: Any) -> str:
    node = Encoder(allow_pickle=True).encode(key)
    return node if type(node) is str else msgspec.json.encode(node).decode()
