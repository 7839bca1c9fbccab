"""How is a state taken apart into what is stored?

`flatten` walks nested containers in order. Values are encoded at once; tensors become leaves, named by their
keys joined with dots; objects with `state_dict` and `load_state_dict` are taken as what `state_dict()`
returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash

from ckptengine.adapters import objects
from ckptengine.adapters.aliases import resolve_aliases
from ckptengine.adapters.collector import gc_paused
from ckptengine.adapters.items import FlatState, StateItem, tensor_item, value_item
from ckptengine.adapters.keypath import STATE_DICT, joined
from ckptengine.adapters.replicas import Ranks, Replication, Unit, assign
from ckptengine.adapters.tensors import LocalChunk, extract, is_ordinary, is_tensor
from ckptengine.adapters.values import Encoder, Node
from ckptengine.errors import UnsupportedStateError
from ckptengine.format.entries import METADATA_KEY, ViewEntry
from ckptengine.format.layout import PAD_PREFIX
from ckptengine.format.tree import TAG

__all__ = ["FlatState", "StateItem", "flatten"]


def flatten(
    state: Any,
    *,
    allow_pickle: bool = False,
    dedup_replicas: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> FlatState:
    """Take a state apart; no tensor is copied, and nothing is communicated.

    state: a dict, list or tuple, nested, of tensors and values, or an object with
    `state_dict`/`load_state_dict`. Values are final when this returns; tensors may change until they are
    copied. dedup_replicas: of what several ranks of `process_group` (default: of the default group) are known
    to hold alike, only one stores the bytes. Raises `UnsupportedStateError` with the key path of what cannot
    be stored.
    """
    if not (isinstance(state, dict | list | tuple) or objects.is_stateful(state)):
        raise UnsupportedStateError(
            f"a state is a dict, list or tuple, or an object with state_dict and load_state_dict, not a "
            f"{type(state).__qualname__}",
            hint='pass {"name": value}',
        )
    with gc_paused():
        replication = Replication(process_group) if dedup_replicas else None
        walk = _Walk(allow_pickle=allow_pickle, replication=replication)
        tree = walk.encode(state)
        items, views, extra = resolve_aliases(walk.tensors, walk.claim)
        replicas = {} if replication is None else _drop_others(walk, replication, items, views, extra)
        return _numbered(walk, tree, items, views, extra, replicas)


class _Walk(Encoder):
    """Collects the leaves, in order, with the nodes that are to have their numbers."""

    def __init__(self, *, allow_pickle: bool, replication: Replication | None) -> None:
        super().__init__(root="state", allow_pickle=allow_pickle)
        self._replication = replication
        self.tensors: list[StateItem] = []
        """Each tensor as it is stored if it shares memory with no other."""
        self.ranks: dict[int, Ranks] = {}
        """By index in `tensors`: the ranks that hold the tensor alike, where they are known."""
        self.nodes: list[Node] = []
        """Each `{"$": "t"}`, in order."""
        self.leaves: list[int | StateItem] = []
        """For each node its index in `tensors`, or the item it is."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self._names: set[str] = {METADATA_KEY}

    def encode(self, value: Any, depth: int = 0) -> Node:
        # Ahead of the table, as nearly everything is such a tensor.
        if type(value) is torch.Tensor and is_ordinary(value):
            return self._leaf(tensor_item(self.name(), value), value)
        return super().encode(value, depth)

    def other(self, value: Any, depth: int) -> Node:
        if is_tensor(value):
            return self._tensor(value, depth)
        if objects.is_stateful(value):
            return self._object(value, depth)
        return super().other(value, depth)

    def large(self, data: bytes, kind: str, descr: Any = None) -> Node:
        item = value_item(self.name(), data, kind, descr)
        node: Node = {TAG: "t", "i": -1}
        self.nodes.append(node)
        self.leaves.append(item)
        return node

    def claim(self, name: str, path: Sequence[Any] = ()) -> str:
        """The name, with a suffix if it is reserved or another leaf's; the same in every process."""
        if name in self._names or name.startswith(PAD_PREFIX):
            typed = msgspec.json.encode([self._key(key, 0) for key in path if key is not STATE_DICT])
            plain = f"#{name}" if name.startswith(PAD_PREFIX) else name
            for salt in range(1 << 16):
                name = f"{plain}#{xxhash.xxh3_64_hexdigest(typed, seed=salt)[:8]}"
                if name not in self._names:
                    break
        self._names.add(name)
        return name

    def name(self, part: str = "") -> str:
        """The name of the leaf at the current path."""
        name = joined(self.path)
        if part:
            name += part
        if not name.isascii():
            name = name.encode("utf-8", "backslashreplace").decode()
        if name in self._names or name.startswith(PAD_PREFIX):
            return self.claim(name, self.path)
        self._names.add(name)
        return name

    def _tensor(self, value: Any, depth: int) -> Node:
        if is_ordinary(value):
            return self._leaf(tensor_item(self.name(), value), value)
        try:
            parts = extract(value)
        except ValueError as error:
            if isinstance(value, LocalChunk):
                self.refuse(str(error))
            return self.pickled(value, f"cannot store {error}")
        nodes = [
            self._leaf(tensor_item(self.name(local.part), local.tensor, local.chunk, local.placement), value)
            for local in parts
        ]
        # A rank may hold none or several shards of a ShardedTensor.
        return nodes[0] if len(nodes) == 1 else {TAG: "tuple", "v": nodes}

    def _leaf(self, item: StateItem, value: Any) -> Node:
        """The node of what is here of a tensor `value`."""
        index = len(self.tensors)
        if self._replication is not None:
            ranks = self._replication.ranks_of(value)
            if ranks is not None:
                self.ranks[index] = ranks
        node: Node = {TAG: "t", "i": -1}
        self.nodes.append(node)
        self.leaves.append(index)
        self.tensors.append(item)
        return node

    def _object(self, value: Any, depth: int) -> Node:
        self.opened(value, depth)
        self.path.append(STATE_DICT)
        try:
            inner = objects.state_dict_of(value)
        except UnsupportedStateError as error:
            self.refuse(error.message, hint=error.hint)
        self.optimizers += objects.optimizers_of(value)
        if self._replication is not None:
            if isinstance(value, torch.nn.Module):
                self._replication.enter(value)
            elif isinstance(value, objects.StatefulAdapter):
                value.announce(self._replication)
        node = {TAG: "object", "v": self.encode(inner, depth + 1)}
        self.path.pop()
        self.closed(value)
        return node


def _drop_others(
    walk: _Walk,
    replication: Replication,
    items: dict[int, StateItem],
    views: dict[int, ViewEntry],
    extra: dict[int, StateItem],
) -> dict[int, int]:
    """Take out what another rank stores. Returns leaf → that rank, among those that checkpoint together.

    What is stored together is dropped together, and only if all of it is held alike by the same ranks.
    """
    together: dict[str, list[int]] = {item.name: [leaf] for leaf, item in items.items()}
    for leaf, view in views.items():
        together.setdefault(view.of, []).append(leaf)
    stored = {item.name: (index, item) for source in (items, extra) for index, item in source.items()}
    shared: list[tuple[str, list[int], Ranks]] = []
    for name, leaves in together.items():
        ranks = {walk.ranks.get(leaf) for leaf in leaves}
        only = ranks.pop()
        if not ranks and only is not None and stored[name][1].nbytes:
            shared.append((name, leaves, only))
    # In the order of the walk, which is the same on all of the ranks.
    shared.sort(key=lambda entry: min(entry[1]))
    owners = assign([Unit(stored[name][1].nbytes, ranks) for name, _, ranks in shared])
    replicas: dict[int, int] = {}
    for (name, leaves, _), owner in zip(shared, owners, strict=True):
        if owner == dist.get_rank():
            continue
        index, item = stored[name]
        if extra.get(index) is item:
            del extra[index]
        for leaf in leaves:
            items.pop(leaf, None)
            views.pop(leaf, None)
            rank = replication.group_rank(owner)
            assert rank is not None
            replicas[leaf] = rank
    return replicas


def _numbered(
    walk: _Walk,
    tree: Node,
    items: dict[int, StateItem],
    views: dict[int, ViewEntry],
    extra: dict[int, StateItem],
    replicas: dict[int, int],
) -> FlatState:
    """Number the leaves in the format's order and write the numbers into the tree."""
    ordered: list[StateItem] = []
    ordered_views: list[ViewEntry] = []
    named_replicas: dict[str, int] = {}
    view_nodes: list[Node] = []
    replica_nodes: list[Node] = []
    for node, leaf in zip(walk.nodes, walk.leaves, strict=True):
        if isinstance(leaf, StateItem):
            node["i"] = len(ordered)
            ordered.append(leaf)
            continue
        if leaf in extra:
            ordered.append(extra[leaf])
        if leaf in items:
            node["i"] = len(ordered)
            ordered.append(items[leaf])
        elif leaf in views:
            view_nodes.append(node)
            ordered_views.append(views[leaf])
        else:
            replica_nodes.append(node)
            named_replicas[walk.tensors[leaf].name] = replicas[leaf]
    for index, node in enumerate((*view_nodes, *replica_nodes), start=len(ordered)):
        node["i"] = index
    return FlatState(tree, ordered, ordered_views, named_replicas, walk.optimizers)
