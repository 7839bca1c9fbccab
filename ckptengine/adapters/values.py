"""How does a value that is not a tensor become JSON, and come back with its type?

The nodes are those of the Tree table in `docs/format/v1.md`. Types are taken strictly (`type(x) is ...`), so
that a subclass is never stored as its base. Nothing is unpickled, and no module imported but
torch's and the standard library's, on the word of a checkpoint.
"""

from __future__ import annotations

import base64
import math
import pickle
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch

from ckptengine.adapters import enums, numpy_values
from ckptengine.adapters.keypath import path_text
from ckptengine.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError
from ckptengine.format.limits import EXACT_INT_MAX, MAX_JSON_DEPTH
from ckptengine.format.tree import TAG

Node = Any
"""Decoded JSON of a tree."""

LARGE_NBYTES = 1024
"""Bytes and arrays above this go to the data section, where they are not inflated by base64 and parsed on
every read.
"""

# A container's node is at most three levels of JSON deep ({"$", "v": [[key, value]]}), a leaf's at most this.
_LEAF_DEPTH = 6
_SURROGATES = "surrogatepass"


class Encoder:
    """Encodes one value; containers are copied, so later changes to them do not reach the result.

    `other` and `large` are for subclasses: what to do with a value that is none of the table's, and with many
    bytes.
    """

    def __init__(self, *, root: str = "value", allow_pickle: bool = False) -> None:
        self.root = root
        self.allow_pickle = allow_pickle
        self.path: list[Any] = []
        self._open: set[int] = set()

    def encode(self, value: Any, depth: int = 0) -> Node:
        encode = _ENCODERS.get(type(value))
        if encode is not None:
            return encode(self, value, depth)
        if isinstance(value, Enum):
            return self._enum(value)
        if isinstance(value, np.generic):
            return self._np_scalar(value, depth)
        if isinstance(value, np.dtype):
            return self._np_dtype(value, depth)
        return self.other(value, depth)

    def other(self, value: Any, depth: int) -> Node:
        """Encode a value of no known type: with pickle where that is allowed."""
        return self.pickled(value)

    def large(self, data: bytes, kind: str, descr: Any = None) -> Node | None:
        """Keep many bytes elsewhere and return their node; None: they are to be encoded in place."""
        return None

    def pickled(self, value: Any, reason: str | None = None) -> Node:
        if not self.allow_pickle:
            self.refuse(reason or f"cannot store {_type_name(value)}", pickle_helps=True)
        try:
            data = pickle.dumps(value, protocol=4)
        except Exception as error:
            self.refuse(f"cannot store {_type_name(value)}, nor pickle it ({error})")
        return {TAG: "pickle", "v": _b64(data)}

    def refuse(self, reason: str, *, pickle_helps: bool = False, hint: str | None = None) -> NoReturn:
        where = path_text(self.root, self.path)
        if pickle_helps:
            hint = "convert it to plain values, leave it out, or pass allow_pickle=True"
        raise UnsupportedStateError(f"{where}: {reason}", fqn=where, hint=hint)

    def items(self, children: Any, depth: int) -> list[Node]:
        """Encode a sequence's items, each under its index."""
        path = self.path
        nodes = []
        for index, child in enumerate(children):
            path.append(index)
            nodes.append(self.encode(child, depth))
            path.pop()
        return nodes

    def opened(self, value: Any, depth: int) -> None:
        """Enter a container; `closed` leaves it."""
        if id(value) in self._open:
            self.refuse("the value contains itself", hint="break the cycle")
        self._check_depth(depth)
        self._open.add(id(value))

    def _check_depth(self, depth: int) -> None:
        if depth + _LEAF_DEPTH > MAX_JSON_DEPTH:
            self.refuse(f"nested too deep: the format allows {MAX_JSON_DEPTH} levels of JSON")

    def closed(self, value: Any) -> None:
        self._open.discard(id(value))

    def _dict(self, value: dict[Any, Any], depth: int) -> Node:
        self.opened(value, depth)
        node: Node
        if TAG not in value and all(type(key) is str and _is_text(key) for key in value):
            node = {}
            path = self.path
            for key, child in value.items():
                path.append(key)
                node[key] = self.encode(child, depth + 1)
                path.pop()
        else:
            node = {TAG: "dict", "v": self._pairs(value, depth)}
        self.closed(value)
        return node

    def _odict(self, value: OrderedDict[Any, Any], depth: int) -> Node:
        return self._tagged_pairs("odict", value, depth)

    def _counter(self, value: Counter[Any], depth: int) -> Node:
        return self._tagged_pairs("counter", value, depth)

    def _tagged_pairs(self, tag: str, value: dict[Any, Any], depth: int) -> Node:
        self.opened(value, depth)
        node = {TAG: tag, "v": self._pairs(value, depth)}
        self.closed(value)
        return node

    def _pairs(self, value: dict[Any, Any], depth: int) -> list[Node]:
        pairs = []
        for key, child in value.items():
            self.path.append(key)
            pairs.append([self._key(key, depth + 3), self.encode(child, depth + 3)])
            self.path.pop()
        return pairs

    def _key(self, key: Any, depth: int) -> Node:
        if type(key) is str and _is_text(key):
            return key
        # A key has no place in the data section, and none of the subclass's cases may be one.
        plain = Encoder(root=self.root, allow_pickle=self.allow_pickle)
        plain.path = self.path
        return plain.encode(key, depth)

    def _list(self, value: list[Any], depth: int) -> Node:
        self.opened(value, depth)
        node = self.items(value, depth + 1)
        self.closed(value)
        return node

    def _deque(self, value: deque[Any], depth: int) -> Node:
        self.opened(value, depth)
        node = {TAG: "deque", "v": self.items(value, depth + 2), "m": value.maxlen}
        self.closed(value)
        return node

    def _tuple(self, value: tuple[Any, ...], depth: int) -> Node:
        self.opened(value, depth)
        node = {TAG: "tuple", "v": self.items(value, depth + 2)}
        self.closed(value)
        return node

    def _set(self, value: set[Any] | frozenset[Any], depth: int) -> Node:
        self.opened(value, depth)
        # Sorted by their JSON: a set of strings has another order in each process.
        nodes = sorted((self._key(item, depth + 2) for item in value), key=msgspec.json.encode)
        self.closed(value)
        return {TAG: type(value).__name__, "v": nodes}

    def _bytes(self, value: bytes | bytearray, depth: int) -> Node:
        kind = type(value).__name__
        node = self.large(bytes(value), kind) if len(value) > LARGE_NBYTES else None
        return {TAG: kind, "v": _b64(value)} if node is None else node

    def _ndarray(self, value: np.ndarray[Any, Any], depth: int) -> Node:
        try:
            descr, fortran, data = numpy_values.pack_array(value)
        except ValueError as error:
            return self.pickled(value, f"cannot store a numpy array of {error}")
        self._check_depth(depth + _nesting(descr))
        shape = list(value.shape)
        if len(data) > LARGE_NBYTES:
            node = self.large(data, "ndarray", [descr, shape, fortran])
            if node is not None:
                return node
        node = {TAG: "ndarray", "d": descr, "s": shape}
        if fortran:
            node["f"] = True
        node["v"] = _b64(data)
        return node

    def _np_scalar(self, value: np.generic, depth: int) -> Node:
        try:
            descr, data = numpy_values.pack_scalar(value)
        except ValueError as error:
            return self.pickled(value, f"cannot store a numpy scalar of {error}")
        self._check_depth(depth + _nesting(descr))
        return {TAG: "npscalar", "d": descr, "v": _b64(data)}

    def _np_dtype(self, value: np.dtype[Any], depth: int) -> Node:
        try:
            descr = numpy_values.pack_dtype(value)
        except ValueError as error:
            return self.pickled(value, f"cannot store numpy's {error}")
        self._check_depth(depth + _nesting(descr))
        return {TAG: "npdtype", "v": descr}

    def _enum(self, value: Enum) -> Node:
        try:
            module, qualname, name = enums.locate(value)
        except ValueError as error:
            return self.pickled(value, f"cannot store {_type_name(value)}: {error}")
        return {TAG: "enum", "m": module, "q": qualname, "n": name}


def _is_text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _nesting(descr: Any) -> int:
    return 1 + max(map(_nesting, descr), default=0) if isinstance(descr, list) else 0


def _b64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _type_name(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    what = "the class " if isinstance(value, type) else "a value of type "
    return what + (
        kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    )


def _encode_int(_: Encoder, value: int, depth: int) -> Node:
    return value if -EXACT_INT_MAX <= value <= EXACT_INT_MAX else {TAG: "int", "v": hex(value)}


def _encode_float(_: Encoder, value: float, depth: int) -> Node:
    return value if math.isfinite(value) else {TAG: "float", "v": struct.pack(">d", value).hex()}


def _encode_complex(_: Encoder, value: complex, depth: int) -> Node:
    return {TAG: "complex", "v": [struct.pack(">d", part).hex() for part in (value.real, value.imag)]}


def _encode_str(_: Encoder, value: str, depth: int) -> Node:
    return value if _is_text(value) else {TAG: "str", "v": _b64(value.encode("utf-8", _SURROGATES))}


def _encode_text_of(tag: str) -> Callable[[Encoder, Any, int], Node]:
    return lambda _, value, depth: {TAG: tag, "v": str(value).removeprefix("torch.")}


def _as_it_is(_: Encoder, value: Any, depth: int) -> Node:
    return value


_ENCODERS: dict[type, Callable[[Encoder, Any, int], Node]] = {
    type(None): _as_it_is,
    bool: _as_it_is,
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    str: _encode_str,
    bytes: Encoder._bytes,
    bytearray: Encoder._bytes,
    list: Encoder._list,
    tuple: Encoder._tuple,
    dict: Encoder._dict,
    OrderedDict: Encoder._odict,
    Counter: Encoder._counter,
    deque: Encoder._deque,
    set: Encoder._set,
    frozenset: Encoder._set,
    np.ndarray: Encoder._ndarray,
    torch.Size: lambda _, value, depth: {TAG: "size", "v": list(value)},
    torch.dtype: _encode_text_of("dtype"),
    torch.device: _encode_text_of("device"),
    torch.layout: _encode_text_of("layout"),
    torch.memory_format: _encode_text_of("memory_format"),
}


_MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "dict": lambda entries: entries,
    "odict": OrderedDict,
    "counter": Counter,
}


class Decoder:
    """Decodes one tree.

    `leaf(i)` gives what the i-th tensor or large value is to become. Objects come back as their
    `state_dict()`.
    """

    def __init__(
        self,
        leaf: Callable[[int], Any] | None = None,
        *,
        root: str = "state",
        path: Sequence[Any] = (),
        allow_pickle: bool = False,
    ) -> None:
        self._leaf = leaf
        self.root = root
        self.path = list(path)
        self.allow_pickle = allow_pickle

    def decode(self, node: Node) -> Any:
        kind = type(node)
        if kind is dict:
            if TAG in node:
                return self._tagged(node)
            return self._children(node.items())
        if kind is list:
            return list(self._children(enumerate(node)).values())
        return node

    def _children(self, items: Iterable[tuple[Any, Node]]) -> dict[Any, Any]:
        path = self.path
        decoded = {}
        for key, child in items:
            path.append(key)
            decoded[key] = self.decode(child)
            path.pop()
        return decoded

    def _tagged(self, node: Node) -> Any:
        try:
            tag = node[TAG]
            if tag == "t":
                if self._leaf is None:
                    raise ValueError("a tensor where none may be")
                return self._leaf(node["i"])
            if tag == "object":
                return self.decode(node["v"])
            if tag == "tuple":
                return tuple(self.decode(node["v"]))
            if tag in ("set", "frozenset"):
                items = self.decode(node["v"])
                return set(items) if tag == "set" else frozenset(items)
            if tag == "deque":
                return deque(self.decode(node["v"]), maxlen=node["m"])
            if tag in _MAPPINGS:
                pairs = [(self.decode(key), child) for key, child in node["v"]]
                return _MAPPINGS[tag](self._children(pairs))
            if tag == "pickle":
                return self._unpickled(node["v"])
            return _DECODERS[tag](node)
        except CheckpointError:
            raise
        except Exception as error:
            # Whatever a constructor or an unpickler makes of bytes that are not what a save wrote.
            where = path_text(self.root, self.path)
            raise CorruptCheckpointError(
                f"{where}: the stored value cannot be decoded ({type(error).__name__}: {error})", fqn=where
            ) from error

    def _unpickled(self, text: str) -> Any:
        if not self.allow_pickle:
            where = path_text(self.root, self.path)
            raise UnsupportedStateError(
                f"{where}: a pickled value is stored here, and unpickling runs code from the checkpoint",
                fqn=where,
                hint="pass allow_pickle=True if you trust where it comes from",
            )
        # Only on request, by name (promise 6).
        return pickle.loads(_unb64(text))


def large_value(kind: str, descr: Any, data: bytes | bytearray | memoryview) -> Any:
    """The value that `Encoder.large` was given, from its bytes; owns its memory."""
    if kind == "bytes":
        return bytes(data)
    if kind == "bytearray":
        return bytearray(data)
    if kind == "ndarray":
        described, shape, fortran = descr
        return numpy_values.unpack_array(described, shape, fortran, data)
    raise ValueError(f"unknown kind of value {kind!r}")


def _unb64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _float(text: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return value


def _torch_constant(kind: type) -> Callable[[Node], Any]:
    def decode(node: Node) -> Any:
        value = getattr(torch, node["v"])
        if not isinstance(value, kind):
            raise ValueError(f"torch.{node['v']} is no {kind.__name__}")
        return value

    return decode


_DECODERS: dict[str, Callable[[Node], Any]] = {
    "int": lambda node: int(node["v"], 16),
    "float": lambda node: _float(node["v"]),
    "complex": lambda node: complex(_float(node["v"][0]), _float(node["v"][1])),
    "str": lambda node: _unb64(node["v"]).decode("utf-8", _SURROGATES),
    "bytes": lambda node: _unb64(node["v"]),
    "bytearray": lambda node: bytearray(_unb64(node["v"])),
    "ndarray": lambda node: numpy_values.unpack_array(
        node["d"], node["s"], bool(node.get("f")), _unb64(node["v"])
    ),
    "npscalar": lambda node: numpy_values.unpack_scalar(node["d"], _unb64(node["v"])),
    "npdtype": lambda node: numpy_values.unpack_dtype(node["v"]),
    "dtype": _torch_constant(torch.dtype),
    "device": lambda node: torch.device(node["v"]),
    "layout": _torch_constant(torch.layout),
    "memory_format": _torch_constant(torch.memory_format),
    "size": lambda node: torch.Size(node["v"]),
    "enum": lambda node: enums.look_up(node["m"], node["q"], node["n"]),
}


class _PlainEncoder(Encoder):
    """For values beside the state, where a tensor has no place."""

    def other(self, value: Any, depth: int) -> Node:
        if isinstance(value, torch.Tensor):
            self.refuse(
                f"cannot store {_type_name(value)} here",
                hint="pass value.item() or value.tolist(), or put the tensor into the state",
            )
        if not self.allow_pickle:
            self.refuse(
                f"cannot store {_type_name(value)}", hint="convert it to plain values, or leave it out"
            )
        return super().other(value, depth)


def encode_value(value: Any, *, path: str = "value", allow_pickle: bool = False) -> Node:
    """The tree of a value without tensors. Raises `UnsupportedStateError`, naming the key path."""
    return _PlainEncoder(root=path, allow_pickle=allow_pickle).encode(value)


def decode_value(node: Node, *, path: str = "value", allow_pickle: bool = False) -> Any:
    """What `encode_value` was given."""
    return Decoder(root=path, allow_pickle=allow_pickle).decode(node)
