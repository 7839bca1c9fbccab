"""Which trees are well formed? What is malformed is in the abuse corpus."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from ckptengine.format import strict_json
from ckptengine.format.limits import MAX_JSON_DEPTH
from ckptengine.format.tree import check_tree
from tests.format.strategies import trees, usual


@usual
@given(trees(3))
def test_tree_of_every_container_is_accepted(tree: Any) -> None:
    check_tree(tree, 3)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {"$": "odict", "v": [["a", 1], [{"$": "tuple", "v": [1, "b"]}, {"$": "t", "i": 0}]]},
        {"$": "set", "v": [1, "a"]},
        {"$": "frozenset", "v": []},
        {"$": "int", "v": hex(-(10**40))},
        {"$": "int", "v": hex(10**40)},
        {"$": "float", "v": "7ff8000000000000"},
        {"$": "complex", "v": ["7ff8000000000000", "0" * 16]},
        {"$": "str", "v": "7aCA"},
        {"$": "bytes", "v": ""},
        {"$": "bytearray", "v": "AA=="},
        {"$": "ndarray", "d": "<f4", "s": [2, 0], "f": True, "v": ""},
        {"$": "ndarray", "d": [["a", "<f4", [2]], ["b", "|S3"]], "s": [], "v": "AAA="},
        {"$": "npscalar", "d": "<M8[ns]", "v": "AAAAAAAAAAA="},
        {"$": "dtype", "v": "bfloat16"},
        {"$": "npdtype", "v": "<f4"},
        {"$": "size", "v": [2**62, -1]},
        {"$": "enum", "m": "enum", "q": "X.Y", "n": "Z"},
        {"$": "object", "v": {"$": "object", "v": [{"$": "t", "i": 1}]}},
        {"$": "pickle", "v": "gASVAA=="},
    ],
)
def test_every_kind_of_value_is_accepted(tree: Any) -> None:
    check_tree(tree, 2)


def test_depth_is_counted_in_levels_of_json() -> None:
    tree: Any = 1
    for _ in range(MAX_JSON_DEPTH):
        tree = [tree]
    check_tree(tree, 0)
    with pytest.raises(ValueError, match="deeper"):
        check_tree([tree], 0)


def test_hundred_thousand_levels_do_not_exhaust_the_stack() -> None:
    tree: Any = 1
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(ValueError, match="deeper"):
        check_tree(tree, 0)


def test_error_names_the_place() -> None:
    with pytest.raises(ValueError, match="at /model/layers/3/v/1/1"):
        check_tree({"model": {"layers": [1, 2, 3, {"$": "dict", "v": [[0, 1], [1, {"$": "?"}]]}]}}, 0)


@pytest.mark.parametrize("text", ['{"a":1,"a":1}', '[{"b":{"x":0,"y":1,"x":0}}]', '{"a":1, "\\u0061":2}'])
def test_duplicate_keys_are_refused_anywhere(text: str) -> None:
    for form in (text, text.encode()):
        with pytest.raises(ValueError, match="duplicate"):
            strict_json.loads(form)


@usual
@given(trees(0))
def test_strict_json_reads_what_json_writes(tree: Any) -> None:
    import json

    assert strict_json.loads(json.dumps(tree)) == tree
    assert strict_json.loads(json.dumps(tree, indent=2).encode()) == tree
