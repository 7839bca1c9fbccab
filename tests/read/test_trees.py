from __future__ import annotations

from typing import Any

import msgspec

from ckptengine.format.tree import leaves
from ckptengine.read.trees import is_value, merge, named, relabel


def t(i: int) -> dict[str, Any]:
    return {"$": "t", "i": i}


def tuple_of(*items: Any) -> dict[str, Any]:
    return {"$": "tuple", "v": list(items)}


def key_text(key: Any) -> str:
    return msgspec.json.encode(key).decode()


TREE = {
    "model": {"$": "object", "v": {"w": t(0), "b": t(1)}},
    "groups": [{"lr": 0.1, "betas": tuple_of(0.9, 0.99)}, {"params": tuple_of(t(2), t(3))}],
    "state": {"$": "dict", "v": [[0, {"exp": t(4)}], [tuple_of(1, 2), None]]},
    "names": {"$": "set", "v": ["a", "b"]},
    "nothing": {},
}


def test_leaves_are_found_everywhere_in_order() -> None:
    assert list(leaves(TREE)) == [0, 1, 2, 3, 4]


def test_nodes_are_named_by_their_keys() -> None:
    names = dict(named(TREE, key_text))
    assert names["model.w"] == t(0)
    assert names["groups.0.betas.1"] == 0.99
    assert names["groups.1.params.1"] == t(3)
    assert names["state.0.exp"] == t(4)
    assert names["names"] == {"$": "set", "v": ["a", "b"]}
    assert "names.0" not in names
    values = [name for name, node in names.items() if is_value(node)]
    assert values == [
        "groups.0.lr",
        "groups.0.betas.0",
        "groups.0.betas.1",
        'state.{"$":"tuple","v":[1,2]}',
        "names",
        "nothing",
    ]


def test_an_empty_key_is_a_key() -> None:
    tree = {"": {"w": 1}, "a": {"": 2}}
    assert [name for name, node in named(tree, key_text) if is_value(node)] == [".w", "a."]


def test_parts_of_one_tensor_take_the_place_of_their_tuple() -> None:
    tree = {"one": tuple_of(t(0), t(1)), "two": tuple_of(t(2), t(3)), "mixed": tuple_of(t(0), 1)}
    copy = relabel(tree, lambda i: i + 10, lambda numbers: numbers == [0, 1])
    assert copy == {"one": t(10), "two": tuple_of(t(12), t(13)), "mixed": tuple_of(t(10), 1)}


def test_a_merge_adds_keys_and_changes_nothing() -> None:
    first = {"both": 1, "deep": {"a": 1}, "list": [{"a": 1}], "longer": [1, 2], "kind": [1]}
    second = {"both": 2, "deep": {"b": 2}, "list": [{"b": 2}], "longer": [1], "kind": {"c": 3}, "new": t(0)}
    assert merge(first, second) == {
        "both": 1,
        "deep": {"a": 1, "b": 2},
        "list": [{"a": 1, "b": 2}],
        "longer": [1, 2],
        "kind": [1],
        "new": t(0),
    }


def test_a_merge_reaches_into_tagged_containers() -> None:
    first = {"$": "object", "v": {"$": "odict", "v": [[1, {"a": 1}], [tuple_of(1), "x"]]}}
    second = {"$": "object", "v": {"$": "odict", "v": [[2, "y"], [1, {"b": 2}], [tuple_of(1), "z"]]}}
    assert merge(first, second) == {
        "$": "object",
        "v": {"$": "odict", "v": [[1, {"a": 1, "b": 2}], [tuple_of(1), "x"], [2, "y"]]},
    }


def test_a_tensor_that_is_on_other_ranks_only_is_taken_from_there() -> None:
    assert merge({"w": tuple_of(), "v": tuple_of()}, {"w": t(5), "v": 3}) == {"w": t(5), "v": tuple_of()}
