"""Does INDEX name the values that ranks do not hold alike, all of them and no others?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.format.columns import IndexBuilder, columns_of
from ckptengine.format.digest import DIGEST_NBYTES
from ckptengine.format.entries import ShardHeader, TensorEntry, ViewEntry
from ckptengine.format.geometry import Chunk
from ckptengine.format.index import Index, build_index, decode_index, index_from_headers
from ckptengine.format.limits import round_up
from ckptengine.format.per_rank import OWN_DIGITS, PerRank, PerRankFinder, ShardValues
from ckptengine.format.scan import HeaderScanner
from ckptengine.format.shard import decode_header, encode_header, seal_header
from tests.format import examples
from tests.format.strategies import few, usual

PATH = "step-0000001000/INDEX"
EMPTY: frozenset[str] = frozenset()


def numbered(tree: Any, leaves: list[tuple[str, Any]], path: str = "") -> Any:
    """A state as a tree with its leaves numbered: of ("tensor", n) and ("large", n) the bytes are those of n,
    ("part",) is a part of a global tensor."""
    if isinstance(tree, dict):
        return {key: numbered(child, leaves, f"{path}.{key}" if path else key) for key, child in tree.items()}
    if isinstance(tree, list):
        return [numbered(child, leaves, f"{path}.{i}" if path else str(i)) for i, child in enumerate(tree)]
    if isinstance(tree, tuple):
        leaves.append((path, tree))
        return {"$": "t", "i": len(leaves) - 1}
    return tree


def shard(state: Any, rank: int = 0, world_size: int = 4) -> ShardHeader:
    """A header of a state, as it is after a save."""
    leaves: list[tuple[str, Any]] = []
    tree = numbered(state, leaves)
    entries, own = [], []
    for i, (name, (kind, *content)) in enumerate(leaves):
        chunk = Chunk((8 * world_size,), (8 * rank,), (8,)) if kind == "part" else None
        entries.append(
            TensorEntry(
                name, "uint8", (8,), 8 * i, 8 * i + 8, chunk, kind="bytes" if kind == "large" else None
            )
        )
        if kind != "part":
            own.append(f"{content[0]:0{OWN_DIGITS}x}")
    return replace(
        examples.shard_header(rank=rank),
        world_size=world_size,
        tensors=tuple(entries),
        views=(),
        replicas={},
        data_nbytes=round_up(8 * len(entries), 4096),
        tree=tree,
        own="".join(own).encode(),
    )


def found(*states: Any) -> PerRank:
    headers = [shard(state, rank, len(states)) for rank, state in enumerate(states)]
    index = decode_index(build_index(headers), path=PATH)
    assert index.per_rank is not None
    assert index.per_rank == index_from_headers(headers).per_rank
    return index.per_rank


def test_ranks_that_hold_the_same_have_nothing_of_their_own() -> None:
    state = {"a": [1, 2], "w": ("tensor", 7), "p": ("part",), "blob": ("large", 3), "d": {}}
    assert found(state, state, state) == PerRank()
    assert found(state) == PerRank()


def test_values_that_differ_are_named_whole_by_their_keys() -> None:
    def state(rank: int) -> Any:
        return {
            "step": 5,
            "rng": {"python": [3, [rank, 4], None], "torch": ("tensor", rank)},
            "loader": {"$": "object", "v": {"position": rank, "seed": 1}},
            "numpy": {"$": "tuple", "v": ["MT19937", ("large", rank), 3]},
            "keyed": {"$": "dict", "v": [[1, rank], [{"$": "tuple", "v": [2]}, rank], [None, 0]]},
        }

    assert found(state(0), state(0), state(1)).differing == {
        "rng.python",
        "rng.torch",
        "loader.position",
        "numpy",
        "keyed.1",
        'keyed.{"$":"tuple","v":[2]}',
    }


def test_types_are_told_apart_as_their_bytes_are() -> None:
    for one, other in (
        (1, 1.0),
        (0, False),
        (0.0, -0.0),
        ("1", 1),
        ([], {"$": "tuple", "v": []}),
        ({}, None),
    ):
        assert found({"x": one}, {"x": other}).differing == {"x"}


def test_items_of_a_list_with_tensors_count_by_themselves() -> None:
    def state(rank: int) -> Any:
        return {"l": [("tensor", 1), rank, 4], "m": [("large", 1), rank, 4]}

    assert found(state(0), state(1)).differing == {"l.1", "m"}
    assert found([1, 2], [1, 3]).differing == {"1"}


def test_numbers_of_leaves_do_not_matter() -> None:
    one = {"a": ("part",), "b": [("tensor", 1), 2], "c": {"$": "tuple", "v": [("large", 5)]}}
    other = {"more": ("tensor", 9), **one}
    assert found(one, other) == PerRank()


def test_what_only_some_ranks_hold_is_named_by_its_values() -> None:
    inner = {"epoch": 1, "seed": [1, 2], "w": ("tensor", 1), "none": {}}
    result = found({"same": 1, "first": 2}, {"same": 1, "loader": inner}, {"same": 1, "loader": inner})
    assert result == PerRank(EMPTY, frozenset({"first", "loader.epoch", "loader.seed", "loader.none"}))


def test_a_tensor_that_some_ranks_hold_alike_is_no_value() -> None:
    assert found({"w": ("tensor", 1)}, {"other": ("tensor", 2)}, {"w": ("tensor", 1)}) == PerRank()
    assert found({"w": ("tensor", 1)}, {"other": ("tensor", 2)}, {"w": ("tensor", 3)}).differing == {"w"}


def test_a_rank_without_any_part_of_a_tensor_differs_from_none() -> None:
    assert found({"w": ("part",)}, {"w": {"$": "tuple", "v": []}}) == PerRank()


def test_a_view_of_a_tensor_that_differs_differs() -> None:
    headers = [
        replace(
            header,
            views=(ViewEntry("tied", "w", 0, "uint8", (8,)), ViewEntry("other", "v", 0, "uint8", (8,))),
        )
        for header in (shard({"w": ("tensor", rank), "v": ("tensor", 0)}, rank, 2) for rank in (0, 1))
    ]
    assert index_from_headers(headers).per_rank == PerRank(frozenset({"w", "tied"}))


def test_without_digests_what_several_ranks_hold_may_differ() -> None:
    states = ({"w": ("tensor", 1), "p": ("part",)}, {"w": ("tensor", 1), "p": ("part",), "x": ("tensor", 1)})
    headers = [replace(shard(state, rank, 2), own=None) for rank, state in enumerate(states)]
    assert index_from_headers(headers).per_rank == PerRank(frozenset({"w"}))
    mixed = [shard(states[0], 0, 2), headers[1]]
    assert index_from_headers(mixed).per_rank == PerRank(frozenset({"w"}))


def test_an_index_without_the_lists_says_that_it_cannot_tell() -> None:
    builder = IndexBuilder()
    builder.add(columns_of(examples.shard_header()))
    content = builder.content()
    content.per_rank = content.some_ranks = None
    assert Index(content).per_rank is None


leaf = st.one_of(
    st.integers(0, 2),
    st.just("x"),
    st.tuples(st.just("tensor"), st.integers(0, 1)),
    st.tuples(st.just("large"), st.integers(2, 3)),
    st.just(("part",)),
)
keys = st.sampled_from("abc")
states = st.recursive(
    leaf, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)


def values_of(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a state, and its own tensors, by name: what they are compared by."""
    if isinstance(state, dict):
        if not state and path:
            yield path, {}
        for key, child in state.items():
            yield from values_of(child, f"{path}.{key}" if path else key)
    elif isinstance(state, tuple):
        if state != ("part",):
            yield path, state
    elif isinstance(state, list) and has_tensor(state):
        for i, child in enumerate(state):
            yield from values_of(child, f"{path}.{i}")
    else:
        yield path, state


def has_tensor(state: Any) -> bool:
    if isinstance(state, tuple):
        return state[0] != "large"
    return isinstance(state, list | dict) and any(
        map(has_tensor, state.values() if isinstance(state, dict) else state)
    )


def alike(one: Any, other: Any) -> bool:
    return type(one) is type(other) and json.dumps(one) == json.dumps(other)


@usual
@given(st.lists(st.dictionaries(keys, states, max_size=3), min_size=1, max_size=4))
def test_every_value_that_differs_is_found(ranks: list[dict[str, Any]]) -> None:
    result = found(*ranks)
    all_values = [dict(values_of(state)) for state in ranks]
    for name in {name for values in all_values for name in values}:
        here = [values[name] for values in all_values if name in values]
        if {} in here:
            continue  # what other ranks have in that dict, or instead of it, counts by itself
        if all(alike(one, here[0]) for one in here):
            if len(here) < len(ranks) and not (isinstance(here[0], tuple) and here[0][0] == "tensor"):
                # Unless what holds it is of another kind on another rank, which is then what differs.
                assert name in result.some_ranks or any(
                    name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
                    for other in result.names
                )
            else:
                assert name not in result.some_ranks
            assert name not in result.differing or len(here) < len(ranks)
        else:
            tensors = [isinstance(one, tuple) and one[0] == "tensor" for one in here]
            known = result.differing if all(tensors) or not any(tensors) else result.names
            assert any(name == other or name.startswith(f"{other}.") for other in known)
    if all(alike(state, ranks[0]) for state in ranks):
        assert result == PerRank()


@few
@given(st.dictionaries(keys, states, max_size=3), st.integers(0, 3))
def test_a_scanned_header_says_what_a_decoded_one_does(state: dict[str, Any], rank: int) -> None:
    header = shard(state, rank)
    template = encode_header(header)
    assert header.own is not None
    sealed = seal_header(template, [bytes(DIGEST_NBYTES)] * template.n_blocks, own=header.own.decode())
    decoded = decode_header(sealed, path=PATH)
    assert decoded.own == header.own
    scanned = HeaderScanner().scan(sealed).values
    assert scanned == columns_of(decoded).values
    assert msgspec.json.decode(scanned.tree if scanned else b"") == header.tree


def test_thousands_of_ranks_that_are_alike_are_compared_by_their_bytes() -> None:
    finder = PerRankFinder()
    tree = b'{"step":1,"rank":0}'
    for rank in range(5000):
        finder.add(ShardValues(tree.replace(b"0", str(rank).encode()), ["w"], b"0" * OWN_DIGITS))
    assert finder.found() == PerRank(frozenset({"rank"}))
