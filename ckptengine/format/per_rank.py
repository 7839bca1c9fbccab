"""Which values do the ranks not hold alike? Found in the shards' trees and digests, for INDEX to keep.

A **value** here is what a dict holds that is no dict, no object of such, and no tensor: also a whole list or
tuple, unless there are tensors in it. Trees are compared as the bytes they are, and only where these differ
any deeper: thousands of ranks have nearly the same tree. A whole tensor of a rank's own has a digest in the
header; parts of global tensors, and replicas, are no rank's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from ckptengine.format.digest import digest
from ckptengine.format.tree import TAG

OWN_DIGITS = 16
"""Hexadecimal digits of a digest that are kept of each tensor of a rank's own: enough to tell them apart."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """Names, as tensors have them, of what another number of ranks cannot have back without being asked.

    differing: values, and whole tensors, of which those that hold them do not all hold the same. some_ranks:
    values that some ranks hold, alike or not, and others do not.
    """

    differing: frozenset[str] = frozenset()
    some_ranks: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return self.differing | self.some_ranks


@dataclass(frozen=True, slots=True)
class ShardValues:
    """What one shard holds beside the parts of global tensors.

    tree: its JSON, compact. own: the whole tensors and the large values, in offset order. digests:
    `OWN_DIGITS` of each, joined; None in a shard that does not have them. large: leaf number → name of each
    large value. views: name → the tensor whose bytes it is made of.
    """

    tree: bytes
    own: list[str]
    digests: bytes | None
    large: dict[int, str] = field(default_factory=dict)
    views: dict[str, str] = field(default_factory=dict)


class PerRankFinder:
    """Is shown the values of one shard after the other, and knows in the end which are not alike."""

    def __init__(self) -> None:
        self._first: ShardValues | None = None
        self._last: ShardValues | None = None
        self._differing: set[str] = set()
        self._some_ranks: set[str] = set()
        # What has been looked at that the first shard does not have; and of each value in it what it is.
        self._seen: set[tuple[str, bytes]] = set()
        self._others: dict[str, bytes] = {}
        # Of each tensor and large value of a rank's own, the digest it was first met with.
        self._digests: dict[str, bytes] = {}
        self._own_differing: set[str] = set()
        # Large values are known by their leaves, and told by the values they are in: a tree that tells which.
        self._tree_of_large: dict[str, ShardValues] = {}
        self._views: dict[str, str] = {}

    def add(self, values: ShardValues) -> None:
        if self._first is None:
            self._first = values
        else:
            self._compare(self._first, self._first.tree, values, values.tree, "")
        self._add_own(values)
        self._views.update(values.views)
        self._last = values

    def found(self) -> PerRank:
        differing = set(self._differing)
        units: dict[int, dict[str, str]] = {}
        for name in self._own_differing:
            values = self._tree_of_large.get(name)
            if values is None:
                differing.add(name)
                continue
            if id(values) not in units:
                units[id(values)] = _units_of_large(values)
            differing.add(units[id(values)].get(name, name))
        differing.update(view for view, base in self._views.items() if base in self._own_differing)
        return PerRank(frozenset(differing), frozenset(self._some_ranks))

    def _add_own(self, values: ShardValues) -> None:
        last = self._last
        if last is not None and last.own == values.own and last.digests and values.digests:
            if last.digests != values.digests:
                self._own_differing.update(_where(last.digests, values.digests, values.own))
            return
        for name in values.large.values():
            self._tree_of_large.setdefault(name, values)
        known = self._digests
        for i, name in enumerate(values.own):
            found = b"" if values.digests is None else values.digests[i * OWN_DIGITS : (i + 1) * OWN_DIGITS]
            # Without a digest nobody can tell, so that they may differ.
            if name in known and (known[name] != found or not found):
                self._own_differing.add(name)
            known.setdefault(name, found)

    def _compare(self, first: ShardValues, a: bytes, second: ShardValues, b: bytes, path: str) -> None:
        # The same text is not the same where a leaf is a tensor on one rank and a large value on the other.
        if path in self._differing or (a == b and (first.large == second.large or not _LEAF.search(a))):
            return
        mine, theirs = _entries(a), _entries(b)
        if mine is not None and theirs is not None:
            for key, child in theirs.items():
                if key in mine:
                    self._compare(first, mine[key], second, child, _below(path, key))
                else:
                    self._only(second, child, _below(path, key))
            for key in mine.keys() - theirs.keys():
                self._only(first, mine[key], _below(path, key))
            return
        if _unnumbered(first, a) == _unnumbered(second, b):
            return
        ours, others = _items(first, a, path), _items(second, b, path)
        if ours is not None and others is not None and len(ours) == len(others):
            for i, (one, other) in enumerate(zip(ours, others, strict=True)):
                self._compare(first, one, second, other, _below(path, str(i)))
            return
        self._differing.add(path)

    def _only(self, values: ShardValues, node: bytes, path: str) -> None:
        """A node that other ranks do not have."""
        key = (path, digest(_unnumbered(values, node)))
        if key not in self._seen:
            self._seen.add(key)
            for name, value in _units(values, node, path):
                self._some_ranks.add(name)
                found = digest(_unnumbered(values, value))
                if self._others.setdefault(name, found) != found:
                    self._differing.add(name)


def values_in(node: bytes, path: str, large: dict[int, str]) -> list[str]:
    """The names of the values at or below a node. path: its name. large: leaf number → name of each large
    value."""
    return [name for name, _ in _units(ShardValues(node, [], None, large), node, path)]


_raw_dict = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_raw_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_raw_pairs = msgspec.json.Decoder(list[tuple[msgspec.Raw, msgspec.Raw]]).decode

# Inside a string quotes are escaped, so these are found nowhere but where a leaf is.
_LEAF = re.compile(rb'\{"\$":"t","i":([0-9]+)\}')
_TENSOR = re.compile(rb'\{"\$":"t","i":[0-9]+\}|\{"\$":"tuple","v":\[(?:\{"\$":"t","i":[0-9]+\},?)*\]\}')
_A_TENSOR, _A_LARGE = b'{"$":"t"}', b'{"$":"large"}'
_TUPLE = b'{"$":"tuple",'
_OBJECT = b'{"$":"object",'
_MAPPINGS = (b'{"$":"dict",', b'{"$":"odict",')
_TAGGED = b'{"$":'


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _entries(node: bytes) -> dict[str, bytes] | None:
    """What a dict, or an object of one, is made of; None for any other node."""
    while node.startswith(_OBJECT):
        node = bytes(_raw_dict(node)["v"])
    if not node.startswith(b"{"):
        return None
    if not node.startswith(_TAGGED):
        entries = _raw_dict(node)
        if TAG not in entries:
            return {key: bytes(child) for key, child in entries.items()}
        return None
    if node.startswith(_MAPPINGS):
        pairs = _raw_pairs(_raw_dict(node)["v"])
        return {_key_text(bytes(key)): bytes(child) for key, child in pairs}
    return None


def _key_text(key: bytes) -> str:
    """A key as it is in a name: a string as it is, any other as its JSON."""
    return msgspec.json.decode(key, type=str) if key.startswith(b'"') else key.decode()


def _is_tensor(node: bytes) -> bool:
    """Is it a tensor, or what a rank has of one of which it holds no or several parts?"""
    return _TENSOR.fullmatch(node) is not None


def _unnumbered(values: ShardValues, node: bytes) -> bytes:
    """The node, whatever the numbers of its leaves, which depend on what else its rank stores."""
    if _is_tensor_of(values, node):
        return _A_TENSOR
    if not values.large:
        return _LEAF.sub(_A_TENSOR, node)
    return _LEAF.sub(lambda found: _A_LARGE if int(found[1]) in values.large else _A_TENSOR, node)


def _items(values: ShardValues, node: bytes, path: str) -> list[bytes] | None:
    """The items of a list or tuple that is structure: one with tensors, or the state itself."""
    if not node.startswith((b"[", _TUPLE)):
        return None
    if path and all(int(number) in values.large for number in _LEAF.findall(node)):
        return None
    return [bytes(item) for item in _raw_list(node if node.startswith(b"[") else _raw_dict(node)["v"])]


def _units(values: ShardValues, node: bytes, path: str) -> Iterator[tuple[str, bytes]]:
    """The values at or below a node, by name."""
    entries = _entries(node)
    if entries is None:
        items = None if _is_tensor_of(values, node) else _items(values, node, path)
        if items is None:
            if not _is_tensor_of(values, node):
                yield path, node
            return
        entries = {str(i): item for i, item in enumerate(items)}
    elif not entries and path:
        yield path, node
    for key, child in entries.items():
        yield from _units(values, child, _below(path, key))


def _is_tensor_of(values: ShardValues, node: bytes) -> bool:
    return _is_tensor(node) and not any(int(number) in values.large for number in _LEAF.findall(node))


def _units_of_large(values: ShardValues) -> dict[str, str]:
    """For each large value of a shard, the value it is, or is in."""
    return {
        values.large[int(number)]: name
        for name, node in _units(values, values.tree, "")
        for number in _LEAF.findall(node)
        if int(number) in values.large
    }


def _where(one: bytes, other: bytes, names: list[str]) -> list[str]:
    import numpy as np

    differs = (np.frombuffer(one, f"S{OWN_DIGITS}") != np.frombuffer(other, f"S{OWN_DIGITS}")).nonzero()[0]
    return [names[i] for i in differs.tolist()]
