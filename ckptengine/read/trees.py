"""What is in a state's tree, by name, and how do the trees of several ranks become one?

A tree is decoded JSON as the format's Tree table has it. It was checked when its header was decoded: its
depth is bounded, its tags are known, and `{"$": "t"}` stands for a tensor wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ckptengine.format.tree import TAG, leaf

Node = Any

_MAPPINGS = ("dict", "odict")


def named(tree: Node, key_text: Callable[[Node], str]) -> Iterator[tuple[str, Node]]:
    """Every node below the root, parents before children, under its keys joined with dots, as tensors are
    named.

    key_text: what a key that is no string is called. The items of a set have no keys: a set is one value.
    """
    stack: list[tuple[tuple[str, ...], Node]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        if path:
            yield ".".join(path), node
        below = [
            ((*path, key if type(key) is str else key_text(key)), child) for key, child in _children(node)
        ]
        stack += reversed(below)


def is_value(node: Node) -> bool:
    """Is it not made of others? An empty container is a value, a tensor is none."""
    return leaf(node) is None and next(_children(node), None) is None


def relabel(tree: Node, label: Callable[[int], int], same: Callable[[list[int]], bool]) -> Node:
    """A copy in which the tensors have other numbers.

    same: are these tensors, all of a tuple, the parts of one? Then that one takes the tuple's place.
    """
    if type(tree) is list:
        return [relabel(child, label, same) for child in tree]
    if type(tree) is not dict:
        return tree
    number = leaf(tree)
    if number is None and tree.get(TAG) == "tuple":
        parts = [leaf(child) for child in tree["v"]]
        numbers = [part for part in parts if part is not None]
        if numbers and len(numbers) == len(parts) and same(numbers):
            number = numbers[0]
    if number is not None:
        return {TAG: "t", "i": label(number)}
    return {key: relabel(child, label, same) for key, child in tree.items()}


def merge(first: Node, second: Node) -> Node:
    """The first tree, with the keys that only the second has added to its dicts, at every depth.

    Where both have a value, the first's is taken. Lists and tuples are merged item by item if they are of one
    length. An empty tuple is what a rank has of a tensor that lies on other ranks only: there the second's
    tensor is taken.
    """
    if type(first) is list and type(second) is list and len(first) == len(second):
        return [merge(one, other) for one, other in zip(first, second, strict=True)]
    if type(first) is not dict or type(second) is not dict:
        return first
    tag = first.get(TAG)
    if tag == "tuple" and not first["v"] and leaf(second) is not None:
        return second
    if tag != second.get(TAG):
        return first
    if tag is None:
        both = {key: merge(one, second[key]) if key in second else one for key, one in first.items()}
        return both | {key: other for key, other in second.items() if key not in first}
    if tag in _MAPPINGS:
        others = {msgspec.json.encode(key): (key, child) for key, child in second["v"]}
        pairs = []
        for key, one in first["v"]:
            _, other = others.pop(msgspec.json.encode(key), (None, one))
            pairs.append([key, merge(one, other)])
        return {TAG: tag, "v": pairs + [list(pair) for pair in others.values()]}
    if tag in ("tuple", "object"):
        return {TAG: tag, "v": merge(first["v"], second["v"])}
    return first


def _children(node: Node) -> Iterator[tuple[Node, Node]]:
    """(key, child) of what a dict, list or tuple, or an object of such a state, is made of."""
    while type(node) is dict and node.get(TAG) == "object":
        node = node["v"]
    if type(node) is dict:
        tag = node.get(TAG)
        if tag is None:
            yield from node.items()
        elif tag in _MAPPINGS:
            yield from node["v"]
        elif tag == "tuple":
            yield from _children(node["v"])
    elif type(node) is list:
        yield from ((str(i), child) for i, child in enumerate(node))
