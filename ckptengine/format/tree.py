"""Is a tree, the JSON that rebuilds a state, well formed? The adapters, with torch, decode its values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from typing import Any, TypeAlias

from ckptengine.format.digest import is_lower_hex
from ckptengine.format.limits import EXACT_INT_MAX, INT64_MAX, MAX_JSON_DEPTH, MAX_NDIM

TAG = "$"

_INT = re.compile(r"-?0x[0-9a-f]+|-?[0-9a-f]+")
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")


def _is_int(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_hex_int(value: Any) -> bool:
    return type(value) is str and _INT.fullmatch(value) is not None


def _is_hex_float(value: Any) -> bool:
    return type(value) is str and is_lower_hex(value, 16)


def _is_base64(value: Any) -> bool:
    return type(value) is str and _BASE64.fullmatch(value) is not None


def _is_complex(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and all(map(_is_hex_float, value))


def _is_shape(value: Any) -> bool:
    return type(value) is list and len(value) <= MAX_NDIM and all(map(_is_int, value))


def _is_size(value: Any) -> bool:
    """torch.Size is a tuple of any integers that fit 64 bits."""
    return type(value) is list and all(type(v) is int and -INT64_MAX - 1 <= v <= INT64_MAX for v in value)


def _is_list(value: Any) -> bool:
    return type(value) is list


def _is_bound(value: Any) -> bool:
    return value is None or _is_int(value)


def _is_pairs(value: Any) -> bool:
    return type(value) is list and all(type(pair) is list and len(pair) == 2 for pair in value)


def _is_descr(value: Any) -> bool:
    return type(value) in (str, list)


def _is_true(value: Any) -> bool:
    return value is True


def _is_any(value: Any) -> bool:
    return True


# Tag -> the keys it needs and the test of each. Keys in _OPTIONAL may be left out.
_TAGS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "t": {"i": _is_int},
    "dict": {"v": _is_pairs},
    "odict": {"v": _is_pairs},
    "counter": {"v": _is_pairs},
    "deque": {"v": _is_list, "m": _is_bound},
    "tuple": {"v": _is_list},
    "set": {"v": _is_list},
    "frozenset": {"v": _is_list},
    "int": {"v": _is_hex_int},
    "float": {"v": _is_hex_float},
    "complex": {"v": _is_complex},
    "str": {"v": _is_base64},
    "bytes": {"v": _is_base64},
    "bytearray": {"v": _is_base64},
    "ndarray": {"d": _is_descr, "s": _is_shape, "f": _is_true, "v": _is_base64},
    "npscalar": {"d": _is_descr, "v": _is_base64},
    "dtype": {"v": _is_text},
    "device": {"v": _is_text},
    "layout": {"v": _is_text},
    "memory_format": {"v": _is_text},
    "npdtype": {"v": _is_descr},
    "size": {"v": _is_size},
    "enum": {"m": _is_text, "q": _is_text, "n": _is_text},
    "object": {"v": _is_any},
    "pickle": {"v": _is_base64},
}
_OPTIONAL = {("ndarray", "f")}

_Where: TypeAlias = "tuple[_Where, str | int] | None"


def check_tree(tree: Any, n_leaves: int) -> None:
    """Raise `ValueError`, saying where, unless `tree` is a tree over the tensors below `n_leaves`.

    `tree` is decoded JSON. Deeper than `MAX_JSON_DEPTH` levels of JSON is refused. No recursion, so depth
    cannot hurt.
    """
    level: list[tuple[_Where, Any]] = []
    _check_items(None, (("", tree),), n_leaves, level)
    for depth in range(1, MAX_JSON_DEPTH + 1):
        if not level:
            return
        # Below the last level nothing may be, no tensor either.
        allowed = n_leaves if depth < MAX_JSON_DEPTH else 0
        below: list[tuple[_Where, Any]] = []
        for where, value in level:
            if type(value) is list:
                _check_items(where, enumerate(value), allowed, below)
            elif TAG in value:
                _check_tagged(where, value, n_leaves, allowed, below)
            else:
                _check_items(where, value.items(), allowed, below)
        level = below
    if level:
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels, {_at(level[0][0])}")


def _check_items(
    parent: _Where, items: Iterable[tuple[str | int, Any]], n_leaves: int, below: list[tuple[_Where, Any]]
) -> None:
    """Check the scalars and the tensors below `n_leaves` among the items; append the rest to `below`."""
    for key, value in items:
        kind = type(value)
        if kind is dict or kind is list:
            # Most of a tree are tensors: they take the short way, and whatever looks odd the long one.
            if (
                kind is dict
                and value.get(TAG) == "t"
                and len(value) == 2
                and type(i := value.get("i")) is int
                and 0 <= i < n_leaves
            ):
                continue
            below.append(((parent, key), value))
        elif kind is int:
            if not -EXACT_INT_MAX <= value <= EXACT_INT_MAX:
                raise ValueError(f"an integer beyond ±2^53 {_at((parent, key))}")
        elif kind is float:
            if not isfinite(value):
                raise ValueError(f"a float that is not finite {_at((parent, key))}")
        elif kind is not str and kind is not bool and value is not None:
            raise ValueError(f"{kind.__name__}, which is not JSON, {_at((parent, key))}")


def leaf(node: Any) -> int | None:
    """The number of the tensor that a node stands for, or None."""
    return node["i"] if type(node) is dict and node.get(TAG) == "t" else None


def leaves(tree: Any) -> Iterator[int]:
    """The numbers of the tensors in a tree, in its order."""
    number = leaf(tree)
    if number is not None:
        yield number
    elif type(tree) is dict or type(tree) is list:
        for child in tree.values() if type(tree) is dict else tree:
            yield from leaves(child)


def _check_tagged(
    where: _Where, value: dict[str, Any], n_leaves: int, allowed: int, below: list[tuple[_Where, Any]]
) -> None:
    tag = value[TAG]
    keys = _TAGS.get(tag) if type(tag) is str else None
    if keys is None:
        raise ValueError(f"unknown kind of value {tag!r:.80} {_at(where)}")
    for key, test in keys.items():
        if key not in value:
            if (tag, key) not in _OPTIONAL:
                raise ValueError(f"no {key!r} in a value of kind {tag!r} {_at(where)}")
        elif not test(value[key]):
            raise ValueError(f"malformed {key!r} in a value of kind {tag!r} {_at(where)}")
    if not value.keys() <= {TAG, *keys}:
        raise ValueError(f"unknown key in a value of kind {tag!r} {_at(where)}")
    if tag == "t" and value["i"] >= n_leaves:
        raise ValueError(f"tensor {value['i']} of {n_leaves} {_at(where)}")
    if tag == "size":
        return
    # What other tags hold is a tree, or a description that is held to the same bounds. A pair is a list
    # of two trees, so pairs need no case of their own.
    _check_items(where, ((key, value[key]) for key in ("v", "d") if key in value), allowed, below)


def _at(where: _Where) -> str:
    """The path of a place in the tree, for an error: only then is it worth building."""
    parts = []
    while where is not None:
        where, key = where
        parts.append(str(key))
    return f"at {'/'.join(reversed(parts)) or '/'!s:.300}"
