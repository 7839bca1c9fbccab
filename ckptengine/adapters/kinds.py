"""What is a part of a state, in a word? For comparing, and for the errors that tell the difference."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ckptengine.adapters.leaves import Leaf
from ckptengine.adapters.values import Node
from ckptengine.format.tree import TAG

STRUCTURES = ("dict", "list", "tuple", "tensor", "object")


def kind_of(node: Node, leaves: list[Leaf]) -> str:
    """What a node stands for, in a word: one of `STRUCTURES`, or the kind of a value."""
    if type(node) is dict:
        tag = node.get(TAG, "dict")
        if tag == "t":
            return leaves[node["i"]].kind or "tensor"
        return "dict" if tag == "odict" else str(tag)
    return "None" if node is None else type(node).__name__


def kind_of_target(target: Any) -> str:
    if isinstance(target, dict) and type(target) is not Counter:  # whose keys are what it is about
        return "dict"
    name = "None" if target is None else type(target).__name__
    return f"other {name}" if name in STRUCTURES and type(target) not in (list, tuple) else name


def article(kind: str) -> str:
    return kind if kind == "None" else f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def type_name(target: Any) -> str:
    return article(type(target).__name__)
