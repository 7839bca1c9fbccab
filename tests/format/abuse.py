"""Every kind of malformed header, manifest and index, as edits of sound ones.

Each edit works on the bytes of any sound file of its kind that is not trivial (a header needs a tensor with a
byte, an index a chunk with a dimension), so that the readers, `verify` and the command line can be held to
the same list. Digests inside the edited file are made right again, unless the digest is what is wrong: a
hostile writer would do that too.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import zstandard

from ckptengine.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptengine.format.digest import digest, hexdigest

Mutation = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Abuse:
    """`mutate` turns the bytes of a sound file into ones that must be refused with `error`."""

    name: str
    target: Literal["header", "manifest", "index"]
    mutate: Mutation
    error: type[Exception] = CorruptCheckpointError

    def __str__(self) -> str:
        return f"{self.target}: {self.name}"


# --- Headers


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The magic, if any, and the JSON text."""
    at = 8 if data.startswith(b"CKPTZ") else 0
    return data[:at], data[at + 8 :]


def _join(magic: bytes, text: bytes, at_least: int = 0) -> bytes:
    """A header of this text, padded and with its length; as long as it was, if it fits."""
    nbytes = max(-(-(len(magic) + 8 + len(text)) // 4096) * 4096, at_least)
    return (magic + struct.pack("<Q", nbytes - len(magic) - 8) + text).ljust(nbytes, b" ")


def _text(edit: Callable[[bytes], bytes]) -> Mutation:
    """An edit of the JSON text."""

    def mutate(data: bytes) -> bytes:
        magic, text = _split(data)
        return _join(magic, edit(text.rstrip(b" ")), len(data))

    return mutate


class _Parts:
    """A header taken apart: `tensors` as safetensors has them, `meta` with the nested JSON decoded."""

    def __init__(self, text: bytes) -> None:
        self.tensors: dict[str, Any] = json.loads(text)
        self.meta: dict[str, Any] = self.tensors.pop("__metadata__")
        for key in ("shard", "tensors", "views", "replicas", "tree"):
            self.meta[f"ckptengine.{key}"] = json.loads(self.meta[f"ckptengine.{key}"])

    def __getattr__(self, name: str) -> Any:
        return self.meta[f"ckptengine.{name}"]

    @property
    def first(self) -> str:
        """A tensor with bytes that is stored under its own dtype."""
        extras = self.meta["ckptengine.tensors"]
        names = [n for n, t in self.tensors.items() if t["data_offsets"][0] != t["data_offsets"][1]]
        return next(n for n in names if "dtype" not in extras.get(n, {}) and not n.startswith("__pad__"))

    def extra(self, name: str) -> dict[str, Any]:
        extra: dict[str, Any] = self.meta["ckptengine.tensors"].setdefault(name, {})
        return extra

    @property
    def extras(self) -> dict[str, Any]:
        extras: dict[str, Any] = self.meta["ckptengine.tensors"]
        return extras

    def dump(self) -> bytes:
        meta = {k: v if isinstance(v, str) else _dumps(v) for k, v in self.meta.items()}
        return _dumps({"__metadata__": meta, **self.tensors}).encode()


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _edit(edit: Callable[[_Parts], Any]) -> Mutation:
    """An edit of the parts of a header."""

    def change(text: bytes) -> bytes:
        parts = _Parts(text)
        edit(parts)
        return parts.dump()

    return _text(change)


def _set(key: str, name: str, value: Any) -> Mutation:
    """Set a member of one of the metadata's objects."""
    return _edit(lambda p: getattr(p, key).__setitem__(name, value))


def _meta(key: str, value: str) -> Mutation:
    return _edit(lambda p: p.meta.__setitem__(f"ckptengine.{key}", value))


def _own(edit: Callable[[str], str]) -> Mutation:
    """As many digests as there are whole tensors and large values, edited."""

    def change(parts: _Parts) -> None:
        names = [name for name in parts.tensors if not name.startswith("__pad__.")]
        whole = [name for name in names if "global_shape" not in parts.extras.get(name, {})]
        parts.meta["ckptengine.own"] = edit("0" * 16 * len(whole))

    return _edit(change)


def _tensor(edit: Callable[[dict[str, Any]], Any]) -> Mutation:
    """An edit of the first tensor's safetensors entry."""
    return _edit(lambda p: edit(p.tensors[p.first]))


def _shape(shape: Any) -> Mutation:
    return _tensor(lambda t: t.__setitem__("shape", shape))


def _offsets(edit: Callable[[int, int], list[Any]]) -> Mutation:
    return _tensor(lambda t: t.__setitem__("data_offsets", edit(*t["data_offsets"])))


def _extra(**changes: Any) -> Mutation:
    """Members for the first tensor's entry in `ckptengine.tensors`, in place of all it had."""

    def edit(parts: _Parts) -> None:
        first = parts.first
        shape = parts.tensors[first]["shape"]
        values = {k: v(shape) if callable(v) else v for k, v in changes.items()}
        parts.extra(first).clear()
        parts.extra(first).update(values)

    return _edit(edit)


def _view(**changes: Any) -> Mutation:
    """A view of one byte of the first tensor, with changes."""

    def edit(parts: _Parts) -> None:
        first = parts.first
        view = {"of": first, "byte_offset": 0, "dtype": "uint8", "shape": [1]} | changes
        if callable(view["byte_offset"]):
            start, stop = parts.tensors[first]["data_offsets"]
            view["byte_offset"] = view["byte_offset"](stop - start)
        parts.views["a view"] = {k: v for k, v in view.items() if v is not ...}

    return _edit(edit)


_ITEMSIZE = {"U8": 1, "I8": 1, "F64": 8}


def _more(*entries: tuple[str, str, list[int], dict[str, Any]]) -> Mutation:
    """More tensors at the end of the data section: `(name, code, shape, description)`. All else is sound."""

    def edit(parts: _Parts) -> None:
        at = parts.shard["data_nbytes"]
        for name, code, shape, extra in entries:
            name = name.replace("#", str(sum(n.startswith("__pad__.") for n in parts.tensors)))
            stop = at + math.prod(shape) * _ITEMSIZE[code]
            parts.tensors[name] = {"dtype": code, "shape": shape, "data_offsets": [at, stop]}
            if extra:
                parts.extras[name] = extra
            at = stop
        parts.shard["data_nbytes"] = at
        blocks = -(-at // parts.shard["block_nbytes"])
        parts.meta["ckptengine.digests"] = "0" * 32 * blocks
        if parts.shard["codec"] == "zstd":
            parts.meta["ckptengine.stored"] = "00000001" * blocks
            parts.meta["ckptengine.methods"] = "1" * blocks

    return _edit(edit)


def _tree(tree: Any) -> Mutation:
    return _edit(
        lambda p: p.meta.__setitem__("ckptengine.tree", tree if isinstance(tree, str) else _dumps(tree))
    )


def _nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def _last_first(parts: _Parts) -> None:
    """One tensor more, whose bytes are the last, named before all others."""
    at = parts.shard["data_nbytes"]
    last = {"dtype": "U8", "shape": [4096], "data_offsets": [at, at + 4096]}
    parts.shard["data_nbytes"] += 4096
    parts.tensors = {"last": last, **parts.tensors}


def _duplicate_member(text: bytes) -> bytes:
    """The first member `"dtype":…` of a tensor, twice."""
    at = text.index(b'{"dtype":"')
    end = text.index(b",", at)
    return text[: at + 1] + text[at + 1 : end] + b"," + text[at + 1 :]


def _n(n: int) -> Mutation:
    """The length field alone."""

    def mutate(data: bytes) -> bytes:
        magic, _ = _split(data)
        return magic + struct.pack("<Q", n) + data[len(magic) + 8 :]

    return mutate


_HEADER: list[tuple[str, Mutation]] = [
    ("empty", lambda d: b""),
    ("cut in the length", lambda d: d[:7]),
    ("cut after the length", lambda d: d[:8]),
    ("cut after 15 bytes", lambda d: d[:15]),
    ("cut after 16 bytes", lambda d: d[:16]),
    ("cut in the middle", lambda d: d[: len(d) // 2]),
    ("cut by one byte", lambda d: d[:-1]),
    ("cut by a page", lambda d: d[:-4096]),
    ("a byte too long", lambda d: d + b" "),
    ("a page too long", lambda d: d + b" " * 4096),
    ("all zeros, as preallocated", lambda d: bytes(len(d))),
    ("length 0", _n(0)),
    ("length 1", _n(1)),
    ("length not to a page", lambda d: _n(len(d) - 7)(d)),
    ("length 2^63", _n(2**63)),
    ("length 2^64 - 8", _n(2**64 - 8)),
    ("length above the limit", _n(100_003_840 - 8)),
    ("length of another page", lambda d: _n(len(d) + 4096 - 8)(d)),
    ("text all spaces", _text(lambda t: b"")),
    ("invalid UTF-8 in a name", _text(lambda t: t.replace(b'","', b'","\xff\xfe":"', 1))),
    ("a lone surrogate, escaped", _text(lambda t: t.replace(b"ckptengine.format", b"\\ud800", 1))),
    ("text cut", _text(lambda t: t[:-1])),
    ("text with something after it", _text(lambda t: t + b"x")),
    ("text with a second value after it", _text(lambda t: t + b"{}")),
    ("text ended by NUL", _text(lambda t: t + b"\0")),
    ("byte order mark", _text(lambda t: b"\xef\xbb\xbf" + t)),
    ("an array", _text(lambda t: b"[" + t + b"]")),
    ("null", _text(lambda t: b"null")),
    ("an object with nothing", _text(lambda t: b"{}")),
    ("nested 100,000 deep", _text(lambda t: b'{"a":' * 100_000)),
    (
        "nested 100,000 deep beside the tensors",
        _text(lambda t: t[:-1] + b',"x":' + _nested(100_000).encode() + b"}"),
    ),
    (
        "a name twice",
        _text(lambda t: t[:-1] + b',"dup":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' * 2 + b"}"),
    ),
    ("metadata twice", _text(lambda t: t[:-1] + b',"__metadata__":{}}')),
    (
        "metadata twice, the same",
        _text(lambda t: b'{"__metadata__":' + _dumps(json.loads(t)["__metadata__"]).encode() + b"," + t[1:]),
    ),
    ("a tensor's member twice", _text(_duplicate_member)),
    ("no metadata", _text(lambda t: b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}')),
    ("metadata not an object", _text(lambda t: b'{"__metadata__":"x"}')),
    (
        "metadata of a number",
        _text(lambda t: t.replace(b'"ckptengine.format":"1"', b'"ckptengine.format":1', 1)),
    ),
    (
        "metadata of null",
        _text(lambda t: t.replace(b'"ckptengine.format":"1"', b'"ckptengine.format":null', 1)),
    ),
    *(
        (f"no {key}", _edit(lambda p, key=key: p.meta.pop(f"ckptengine.{key}")))
        for key in ("format", "shard", "digests", "tensors", "views", "replicas", "tree")
    ),
    ("unknown metadata of ours", _meta("colour", "red")),
    ("own digests empty", _meta("own", "")),
    ("own digests too few", _own(lambda s: s[16:])),
    ("own digests too many", _own(lambda s: s + "0" * 16)),
    ("a digit of own digests too few", _own(lambda s: s[1:])),
    ("own digests in upper case", _own(lambda s: "A" + s[1:])),
    ("own digests not hexadecimal", _own(lambda s: "g" + s[1:])),
    *(
        (f"format {text!r}", _meta("format", text))
        for text in ("0", "", "-1", "1.0", " 1", "01", "one", "9" * 5000)
    ),
    *(
        (f"{key} not JSON: {text!r}", _meta(key, text))
        for key in ("shard", "tensors", "views", "replicas", "tree")
        for text in ("", "{", "nul", "NaN", '{"a":1}x', "\0")
    ),
    *((f"{key} an array", _meta(key, "[]")) for key in ("shard", "tensors", "views", "replicas")),
    *((f"{key} null", _meta(key, "null")) for key in ("shard", "tensors", "views", "replicas")),
    *(
        (f"{key} nested 100,000 deep", _meta(key, '{"a":' * 100_000))
        for key in ("shard", "tensors", "views", "tree")
    ),
    # The shard's facts.
    *(
        (f"no {key} in shard", _edit(lambda p, key=key: p.shard.pop(key)))
        for key in ("run", "attempt", "step", "rank", "world_size", "codec", "block_nbytes", "data_nbytes")
    ),
    ("unknown key in shard", _set("shard", "colour", "red")),
    *(
        (f"{key} {value!r}", _set("shard", key, value))
        for key in ("step", "rank", "world_size", "block_nbytes", "data_nbytes")
        for value in (-1, 1.0, True, "1", None, 2**63, 2**64, 10**400, [], float("nan"), float("inf"))
    ),
    (
        "step twice",
        _edit(lambda p: p.meta.__setitem__("ckptengine.shard", '{"step":1,' + _dumps(p.shard)[1:])),
    ),
    (
        "step 1e999",
        _edit(
            lambda p: p.meta.__setitem__(
                "ckptengine.shard", _dumps(p.shard | {"step": 0}).replace('"step":0', '"step":1e999')
            )
        ),
    ),
    ("rank not below world_size", _edit(lambda p: p.shard.update(rank=p.shard["world_size"]))),
    ("world_size 0", _set("shard", "world_size", 0)),
    ("block_nbytes 0", _set("shard", "block_nbytes", 0)),
    ("block_nbytes not a page", _set("shard", "block_nbytes", 4097)),
    (
        "blocks half as large",
        _edit(
            lambda p: p.shard.update(
                block_nbytes=max(p.shard["block_nbytes"] // 2 // 4096, 1) * 4096,
                data_nbytes=p.shard["data_nbytes"] * 2,
            )
        ),
    ),
    ("data_nbytes not a page", _edit(lambda p: p.shard.update(data_nbytes=p.shard["data_nbytes"] - 1))),
    ("data_nbytes a page more", _edit(lambda p: p.shard.update(data_nbytes=p.shard["data_nbytes"] + 4096))),
    ("data_nbytes enormous", _set("shard", "data_nbytes", 2**62)),
    ("codec unknown", _set("shard", "codec", "lzma")),
    (
        "codec of the other container",
        _edit(lambda p: p.shard.update(codec={"raw": "zstd", "zstd": "raw"}[p.shard["codec"]])),
    ),
    *(
        (f"attempt {text!r:.40}", _set("shard", "attempt", text))
        for text in (
            "",
            "..",
            "a000001",
            "a000001-000000000000-00000000-000001",
            "a1-000000000000-00000000-000001.0",
            "a000001-000000000000-00000000-000001.00",
            "a000001-000000000000-0000000G-000001.0",
            "a٠٠٠٠٠١-000000000000-00000000-000001.0",
            "a" + "9" * 100_000,
        )
    ),
    (
        "attempt of another run",
        _edit(lambda p: p.shard.update(attempt="a999999-000000000000-00000000-000001.0")),
    ),
    ("run not its attempt's", _set("shard", "run", "a999999-000000000000-00000000")),
    # Digests.
    ("digests too few", _edit(lambda p: p.meta.update({"ckptengine.digests": p.digests[32:]}))),
    ("digests too many", _edit(lambda p: p.meta.update({"ckptengine.digests": p.digests + "0" * 32}))),
    ("a digit too few", _edit(lambda p: p.meta.update({"ckptengine.digests": p.digests[1:]}))),
    ("digest not hexadecimal", _edit(lambda p: p.meta.update({"ckptengine.digests": "g" + p.digests[1:]}))),
    ("digest in upper case", _edit(lambda p: p.meta.update({"ckptengine.digests": "A" + p.digests[1:]}))),
    ("digest in other digits", _edit(lambda p: p.meta.update({"ckptengine.digests": "٠" + p.digests[1:]}))),
    ("digest with a blank", _edit(lambda p: p.meta.update({"ckptengine.digests": " " + p.digests[1:]}))),
    # Tensors.
    *(
        (f"no {key} of a tensor", _tensor(lambda t, key=key: t.pop(key)))
        for key in ("dtype", "shape", "data_offsets")
    ),
    ("unknown key of a tensor", _tensor(lambda t: t.update(colour="red"))),
    ("a tensor null", _edit(lambda p: p.tensors.__setitem__(p.first, None))),
    ("a tensor an array", _edit(lambda p: p.tensors.__setitem__(p.first, []))),
    ("no tensors at all", _edit(lambda p: p.tensors.clear())),
    *(
        (f"dtype {value!r}", _tensor(lambda t, value=value: t.update(dtype=value)))
        for value in ("F128", "", "f32", "float32", "torch.float32", "U8\0", 1, None, True)
    ),
    *(
        (f"shape {value!r:.40} of {len(repr(value))}", _shape(value))
        for value in (
            None,
            1,
            "4",
            {},
            [-1],
            [1.0],
            [True],
            ["1"],
            [None],
            [[1]],
            [2**63],
            [2**64],
            [-(2**63)],
            [2**62, 2**62],
            [0, 2**62, 2**62],
            [10**400],
            [2**32] * 64,
            [1] * 65,
            [1] * 100_000,
            [float("nan")],
            [float("inf")],
        )
    ),
    ("shape 1e999", _text(lambda t: t.replace(b'"shape":[', b'"shape":[1e999,', 1))),
    (
        "shape with a number of 5,000 digits",
        _text(lambda t: t.replace(b'"shape":[', b'"shape":[' + b"1" * 5000 + b",", 1)),
    ),
    ("shape one larger", _tensor(lambda t: t.update(shape=[*t["shape"], 2]))),
    ("shape empty of something", _tensor(lambda t: t.update(shape=[*t["shape"], 0]))),
    *(
        (f"offsets {value!r}", _tensor(lambda t, value=value: t.update(data_offsets=value)))
        for value in (
            None,
            [],
            [0],
            [0, 1, 2],
            "0",
            [0.0, 1.0],
            [False, True],
            [None, None],
            [-4, 0],
            [2**63, 2**64],
            [0, float("nan")],
            [0, float("inf")],
            [0, 10**400],
            {"a": 1},
        )
    ),
    ("offsets reversed", _offsets(lambda a, b: [b, a])),
    ("offsets one further", _offsets(lambda a, b: [a + 1, b + 1])),
    ("offsets a page further", _offsets(lambda a, b: [a + 4096, b + 4096])),
    ("offsets one shorter", _offsets(lambda a, b: [a, b - 1])),
    ("offsets one longer", _offsets(lambda a, b: [a, b + 1])),
    ("offsets before the section", _offsets(lambda a, b: [-1, b])),
    ("offsets beyond the section", _offsets(lambda a, b: [a, b + 2**40])),
    ("offsets beyond 64 bits", _offsets(lambda a, b: [a, 2**64 + b])),
    ("tensors not in offset order", _edit(_last_first)),
    (
        "two tensors over the same bytes",
        _edit(lambda p: p.tensors.__setitem__("twin", dict(p.tensors[p.first]))),
    ),
    ("a tensor missing, which leaves a hole", _edit(lambda p: p.tensors.pop(p.first))),
    (
        "a tensor not on its alignment",
        _more(("__pad__.#", "U8", [1], {}), ("odd", "F64", [511], {}), ("__pad__.#", "U8", [7], {})),
    ),
    (
        "metadata's name for a view",
        _edit(
            lambda p: p.views.__setitem__(
                "__metadata__", {"of": p.first, "byte_offset": 0, "dtype": "uint8", "shape": [1]}
            )
        ),
    ),
    # Pads.
    ("pad of another dtype", _more(("a", "U8", [4000], {}), ("__pad__.#", "I8", [96], {}))),
    ("pad of a whole page", _more(("__pad__.#", "U8", [4096], {}))),
    ("pad of many pages", _more(("__pad__.#", "U8", [1 << 16], {}))),
    ("pad of another number", _more(("a", "U8", [4000], {}), ("__pad__.77", "U8", [96], {}))),
    ("pad of a number not plain", _more(("a", "U8", [4000], {}), ("__pad__.0#", "U8", [96], {}))),
    ("pad without a number", _more(("a", "U8", [4000], {}), ("__pad__.", "U8", [96], {}))),
    ("pad of two dimensions", _more(("a", "U8", [4000], {}), ("__pad__.#", "U8", [2, 48], {}))),
    ("pad of nothing", _more(("__pad__.#", "U8", [0], {}))),
    ("pads of a page together", _more(*([("__pad__.#", "U8", [2048], {})] * 2))),
    ("pad described", _edit(lambda p: p.extras.__setitem__("__pad__.0", {"placement": "x"}))),
    # What safetensors cannot say.
    ("a tensor described but not stored", _edit(lambda p: p.extras.update(nowhere={"placement": "x"}))),
    ("unknown key in a description", _extra(colour="red")),
    ("true dtype without shape", _extra(dtype="complex128")),
    ("true shape without dtype", _extra(shape=lambda s: s)),
    ("true dtype unknown", _more(("x", "U8", [4096], {"dtype": "complex1024", "shape": [32]}))),
    (
        "true dtype over a shape of its own",
        _more(("x", "U8", [4096], {"dtype": "complex128", "shape": [257]})),
    ),
    ("stride not dense", _extra(stride=lambda s: [2**40] * len(s) or [1])),
    ("stride all zero", _more(("zero", "U8", [2, 2048], {"stride": [0, 0]}))),
    ("stride that overlaps", _more(("overlap", "U8", [2, 2048], {"stride": [1, 1]}))),
    ("stride with gaps", _more(("gaps", "U8", [2, 2048], {"stride": [4096, 1]}))),
    ("stride too long", _extra(stride=lambda s: [*(1 for _ in s), 1])),
    ("stride negative", _extra(stride=lambda s: [-1 for _ in s] or [-1])),
    ("stride of booleans", _extra(stride=lambda s: [True for _ in s] or [True])),
    ("stride beyond 64 bits", _extra(stride=lambda s: [2**63 for _ in s] or [2**63])),
    ("placement a number", _extra(placement=1)),
    ("kind unknown", _extra(kind="zip")),
    ("kind a number", _extra(kind=1)),
    ("kind of an array without descr", _more(("x", "U8", [4096], {"kind": "ndarray"}))),
    (
        "kind of an array over numbers",
        _more(("x", "F64", [512], {"kind": "ndarray", "descr": ["<f8", [512], False]})),
    ),
    ("kind of bytes over two dimensions", _more(("x", "U8", [64, 64], {"kind": "bytes"}))),
    (
        "kind of bytes with descr",
        _more(("x", "U8", [4096], {"kind": "bytes", "descr": ["<f8", [512], False]})),
    ),
    (
        "kind of bytes in chunks",
        _more(("x", "U8", [4096], {"kind": "bytes", "global_shape": [8192], "offsets": [0]})),
    ),
    (
        "kind of an array with a descr of too little",
        _more(("x", "U8", [4096], {"kind": "ndarray", "descr": ["<f4", [1]]})),
    ),
    (
        "kind of an array with a malformed descr",
        _more(("x", "U8", [4096], {"kind": "ndarray", "descr": [4, [1], False]})),
    ),
    (
        "kind of an array with a malformed shape",
        _more(("x", "U8", [4096], {"kind": "ndarray", "descr": ["<f4", ["1"], False]})),
    ),
    (
        "kind of an array with a descr nested 500 deep",
        _more(("x", "U8", [4096], {"kind": "ndarray", "descr": [json.loads(_nested(500)), [1], False]})),
    ),
    ("descr without kind", _extra(descr=["<f4", [1], False])),
    ("chunk offsets without global_shape", _extra(offsets=lambda s: [0 for _ in s])),
    ("chunk global_shape without offsets", _extra(global_shape=lambda s: s)),
    ("chunk flat_of alone", _extra(flat_of=lambda s: s)),
    (
        "chunk beyond its tensor",
        _extra(
            global_shape=lambda s: [*s[:-1], *(n + 1 for n in s[-1:])] or [0],
            offsets=lambda s: [*(0 for _ in s[:-1]), *(2 for _ in s[-1:])] or [1],
        ),
    ),
    (
        "chunk larger than its tensor",
        _extra(global_shape=lambda s: [n - 1 for n in s] or [1], offsets=lambda s: [0 for _ in s] or [0]),
    ),
    ("chunk at 2^63 - 1", _extra(global_shape=lambda s: s, offsets=lambda s: [2**63 - 1 for _ in s] or [0])),
    (
        "chunk at a negative offset",
        _extra(global_shape=lambda s: s, offsets=lambda s: [-1 for _ in s] or [-1]),
    ),
    (
        "chunk of other dimensions",
        _extra(global_shape=lambda s: [*s, 1, 1], offsets=lambda s: [*(0 for _ in s), 0, 0]),
    ),
    (
        "chunk of a tensor beyond 64 bits",
        _extra(
            global_shape=lambda s: [2**62 for _ in range(len(s) + 2)],
            offsets=lambda s: [0 for _ in range(len(s) + 2)],
        ),
    ),
    (
        "flat chunk of another number of elements",
        _extra(global_shape=lambda s: s, offsets=lambda s: [0 for _ in s], flat_of=lambda s: [*s, 3]),
    ),
    # Views.
    ("view of an unknown tensor", _view(of="nowhere")),
    ("view of itself", _view(of="a view")),
    ("view of a pad", _view(of="__pad__.0")),
    ("view just beyond its tensor", _view(byte_offset=lambda nbytes: nbytes)),
    ("view far beyond its tensor", _view(byte_offset=2**62)),
    (
        "view of a dtype too wide for the rest",
        _view(byte_offset=lambda nbytes: nbytes - 1, dtype="complex128"),
    ),
    ("view before its tensor", _view(byte_offset=-1)),
    ("view at a fraction", _view(byte_offset=0.0)),
    ("view at a boolean", _view(byte_offset=False)),
    ("view of an enormous shape", _view(shape=[2**40, 2**20])),
    ("view with an enormous stride", _view(shape=[2], stride=[2**62])),
    ("view with a negative stride", _view(shape=[2], byte_offset=1, stride=[-1])),
    ("view with a short stride", _view(shape=[1, 1], stride=[1])),
    ("view of an unknown dtype", _view(dtype="float128")),
    ("view with a chunk of another shape", _view(global_shape=[4, 4], offsets=[0, 0])),
    ("view with a chunk beyond its tensor", _view(global_shape=[4], offsets=[4])),
    ("view with an unknown key", _view(colour="red")),
    *((f"view without {key}", _view(**{key: ...})) for key in ("of", "byte_offset", "dtype", "shape")),
    (
        "view named as a tensor",
        _edit(
            lambda p: p.views.__setitem__(
                p.first, {"of": p.first, "byte_offset": 0, "dtype": "uint8", "shape": [1]}
            )
        ),
    ),
    (
        "view named as a pad",
        _edit(
            lambda p: p.views.__setitem__(
                "__pad__.9", {"of": p.first, "byte_offset": 0, "dtype": "uint8", "shape": [1]}
            )
        ),
    ),
    # Replicas.
    *(
        (f"replica at rank {value!r}", _set("replicas", "a replica", value))
        for value in (-1, 2**40, 2**64, 1.0, True, "1", None)
    ),
    ("replica in its own shard", _edit(lambda p: p.replicas.update({"a replica": p.shard["rank"]}))),
    ("replica named as a tensor", _edit(lambda p: p.replicas.update({p.first: (p.shard["rank"] + 1) % 2}))),
    # Tree.
    *(
        (f"tree {value!r:.60} of {len(repr(value))}", _tree(value))
        for value in (
            {"$": "t"},
            {"$": "t", "i": 2**40},
            {"$": "t", "i": -1},
            {"$": "t", "i": True},
            {"$": "t", "i": 0.0},
            {"$": "t", "i": "0"},
            {"$": "t", "i": 0, "j": 0},
            {"$": "no such"},
            {"$": None},
            {"$": 1},
            {"$": ["t"]},
            {"a": [{"$": "no such"}]},
            {"$": "tuple"},
            {"$": "tuple", "v": {}},
            {"$": "tuple", "v": [{"$": "x"}]},
            {"$": "dict", "v": [["a"]]},
            {"$": "dict", "v": [["a", 1, 2]]},
            {"$": "dict", "v": {"a": 1}},
            {"$": "odict", "v": [1]},
            {"$": "int", "v": 1},
            {"$": "int", "v": "xyz"},
            {"$": "int", "v": ""},
            {"$": "float", "v": "7ff0"},
            {"$": "float", "v": float("inf")},
            {"$": "complex", "v": ["0" * 16]},
            {"$": "str", "v": "***"},
            {"$": "bytes", "v": "AAA"},
            {"$": "bytes", "v": "AAAA\n"},
            {"$": "bytearray", "v": 1},
            {"$": "ndarray", "d": "<f4", "s": [-1], "v": ""},
            {"$": "ndarray", "d": "<f4", "s": [1]},
            {"$": "ndarray", "d": 4, "s": [1], "v": ""},
            {"$": "ndarray", "d": "<f4", "s": [0] * 65, "v": ""},
            {"$": "ndarray", "d": "<f4", "s": [0], "f": False, "v": ""},
            {"$": "npscalar", "d": None, "v": ""},
            {"$": "dtype", "v": 1},
            {"$": "npdtype", "v": {}},
            {"$": "size", "v": [1.5]},
            {"$": "size", "v": "1"},
            {"$": "enum", "m": "x", "q": "y"},
            {"$": "enum", "m": 1, "q": "y", "n": "z"},
            {"$": "object"},
            {"$": "object", "v": {"$": "t", "i": 2**40}},
            {"$": "pickle", "v": None},
            {"$": "pickle", "v": "!"},
            2**53 + 1,
            -(2**53) - 1,
            [2**64],
            10**400,
            float("nan"),
            float("inf"),
            '{"a":1,"a":2}',
            "1e999",
            _nested(65),
            _nested(500),
            '{"$":"object","v":' * 65 + "1" + "}" * 65,
            "1" * 5000,
            '"\\ud800"',
        )
    ),
]

_HEADER_NEWER: list[tuple[str, Mutation]] = [
    ("format 2", _meta("format", "2")),
    ("format 10", _meta("format", "10")),
    (
        "format 2, and all else different",
        _text(lambda t: b'{"__metadata__":{"ckptengine.format":"2"},"a":{"dtype":"F3","data_offsets":[5]}}'),
    ),
]


def _stored(edit: Callable[[str], str]) -> Mutation:
    return _edit(lambda p: p.meta.update({"ckptengine.stored": edit(p.stored)}))


def _methods(edit: Callable[[str], str]) -> Mutation:
    return _edit(lambda p: p.meta.update({"ckptengine.methods": edit(p.methods)}))


def _whole(parts: _Parts) -> None:
    """Its first block stored as it is, under a method that compresses."""
    nbytes = min(parts.shard["block_nbytes"], parts.shard["data_nbytes"])
    parts.meta["ckptengine.stored"] = f"{nbytes:08x}" + parts.stored[8:]
    parts.meta["ckptengine.methods"] = "2" + parts.methods[1:]


_COMPRESSED: list[tuple[str, Mutation]] = [
    ("container version 0", lambda d: d[:7] + b"\0" + d[8:]),
    ("container without magic", lambda d: d[8:]),
    ("magic damaged", lambda d: b"X" + d[1:]),
    ("no stored lengths", _edit(lambda p: p.meta.pop("ckptengine.stored"))),
    ("stored lengths too few", _stored(lambda s: s[8:])),
    ("stored lengths too many", _stored(lambda s: s + "00000001")),
    ("a digit too few", _stored(lambda s: s[1:])),
    ("a length of 0", _stored(lambda s: "0" * 8 + s[8:])),
    ("a length above its block's", _stored(lambda s: "ffffffff" + s[8:])),
    ("a length in upper case", _stored(lambda s: "0000000A" + s[8:])),
    ("a length not hexadecimal", _stored(lambda s: "0000000g" + s[8:])),
    ("a length with a sign", _stored(lambda s: "+0000001" + s[8:])),
    ("methods empty", _methods(lambda s: "")),
    ("methods too few", _methods(lambda s: s[1:])),
    ("methods too many", _methods(lambda s: s + "1")),
    *(
        (f"a method {method!r}", _methods(lambda s, method=method: method + s[1:]))
        for method in ("3", "5", "9", "a", "f", " ", "-", "\0", "１")
    ),
    ("a short block said to be as it is", _methods(lambda s: "0" + s[1:])),
    ("a whole block said to be compressed", _edit(_whole)),
]

# --- Manifests


def _seal(body: bytes) -> bytes:
    """A manifest's text with the digest it should have."""
    return body + b',\n  "digest": "' + hexdigest(body).encode() + b'"\n}\n'


def _manifest_text(edit: Callable[[bytes], bytes]) -> Mutation:
    """An edit of the text before the digest."""

    def mutate(data: bytes) -> bytes:
        return _seal(edit(data[: data.rindex(b',\n  "digest": "')]))

    return mutate


def _manifest(edit: Callable[[dict[str, Any]], Any]) -> Mutation:
    """An edit of the object."""

    def mutate(data: bytes) -> bytes:
        value = json.loads(data)
        del value["digest"]
        edit(value)
        return _seal(json.dumps(value, indent=2, ensure_ascii=False).encode().removesuffix(b"\n}"))

    return mutate


def _field(key: str, value: Any) -> Mutation:
    return _manifest(lambda m: m.__setitem__(key, value))


def _shard(key: str, value: Any) -> Mutation:
    """A change to the first shard; a function gets the old value."""
    return _manifest(
        lambda m: m["shards"][0].__setitem__(key, value(m["shards"][0][key]) if callable(value) else value)
    )


def _insert(key: str, raw: bytes) -> Mutation:
    """Raw text in place of a top-level scalar."""

    def edit(text: bytes) -> bytes:
        start = text.index(f'\n  "{key}": '.encode()) + len(key) + 7
        return text[:start] + raw + text[text.index(b",\n", start) :]

    return _manifest_text(edit)


def _twin(manifest: dict[str, Any]) -> None:
    """A world of one more rank, whose shard is rank 0's."""
    manifest["shards"].append(manifest["shards"][0] | {"rank": manifest["world_size"]})
    manifest["world_size"] += 1
    manifest["nbytes"] += manifest["shards"][0]["size"]


def _unsorted(manifest: dict[str, Any]) -> None:
    _twin(manifest)
    manifest["shards"][-1]["path"] += ".safetensors"
    manifest["shards"].reverse()


_MANIFEST_KEYS = (
    "format",
    "version",
    "features",
    "step",
    "attempt",
    "run",
    "world_size",
    "created",
    "codec",
    "block_nbytes",
    "nbytes",
    "tensors",
    "metadata",
    "index",
    "shards",
)

_MANIFEST: list[tuple[str, Mutation]] = [
    ("empty", lambda d: b""),
    ("one byte", lambda d: d[:1]),
    ("cut in the middle", lambda d: d[: len(d) // 2]),
    ("cut by one byte", lambda d: d[:-1]),
    ("cut before the digest", lambda d: d[: d.rindex(b',\n  "digest"')]),
    ("without the digest", lambda d: d[: d.rindex(b',\n  "digest"')] + b"\n}\n"),
    ("a newline more", lambda d: d + b"\n"),
    ("carriage returns", lambda d: d.replace(b"\n", b"\r\n")),
    ("all zeros", lambda d: bytes(len(d))),
    ("digest of something else", lambda d: d[:-36] + b"0" * 32 + d[-4:]),
    ("digest in upper case", lambda d: d[:-36] + d[-36:-4].upper().replace(b"0", b"A") + d[-4:]),
    ("text changed under its digest", lambda d: d.replace(b'"tensors": ', b'"tensors": 1', 1)),
    ("space changed under its digest", lambda d: d.replace(b'"tensors": ', b'"tensors":  ', 1)),
    ("invalid UTF-8", _insert("run", b'"\xff\xfe"')),
    ("a lone surrogate, escaped", _insert("run", b'"\\ud800"')),
    ("byte order mark", _manifest_text(lambda t: b"\xef\xbb\xbf" + t)),
    ("an array", lambda d: b"[]"),
    ("null", lambda d: b"null"),
    ("an object with nothing", lambda d: b"{}"),
    ("nested 100,000 deep", lambda d: b'{"a":' * 100_000),
    ("metadata nested 100,000 deep", _manifest_text(lambda t: t + b',\n  "x": ' + _nested(100_000).encode())),
    ("metadata nested 65 deep", _field("metadata", json.loads(_nested(65)))),
    ("a key twice", _manifest_text(lambda t: t + b',\n  "step": 1')),
    (
        "a shard's key twice",
        _manifest_text(lambda t: t.replace(b'{"rank": 0,', b'{"rank": 0, "rank": 0,', 1)),
    ),
    (
        "a key of the metadata twice",
        _manifest_text(
            lambda t: t.replace(b'"metadata": ', b'"metadata": {"a": 1, "a": ', 1).replace(
                b',\n  "index"', b'},\n  "index"', 1
            )
        ),
    ),
    *((f"no {key}", _manifest(lambda m, key=key: m.pop(key))) for key in _MANIFEST_KEYS),
    *((f"{key} null", _field(key, None)) for key in _MANIFEST_KEYS if key not in ("metadata", "index")),
    *(
        (f"{key} {value!r}", _field(key, value))
        for key in ("step", "world_size", "block_nbytes", "nbytes", "tensors", "version")
        for value in (-1, 1.0, True, "1", [], 2**63, 2**64, 10**400)
        if not (key == "version" and value in (2**63, 2**64, 10**400))
    ),
    *(
        (f"{key} {raw.decode()}", _insert(key, raw))
        for key in ("step", "created", "nbytes", "version", "tensors")
        for raw in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"01", b"0x10", b"1" * 5000)
    ),
    ("unknown key", _field("colour", "red")),
    ("unknown key of a shard", _manifest(lambda m: m["shards"][0].update(colour="red"))),
    ("format of another tool", _field("format", "orbax")),
    ("version 0", _field("version", 0)),
    ("features an object", _field("features", {})),
    ("features of numbers", _field("features", [1])),
    *((f"created {value!r}", _field("created", value)) for value in (True, "1", 10**400)),
    ("metadata with a tensor", _field("metadata", {"a": {"$": "t", "i": 0}})),
    ("metadata with an unknown kind", _field("metadata", {"a": {"$": "lambda", "v": ""}})),
    ("metadata with an integer beyond 2^53", _field("metadata", 2**53 + 1)),
    *((f"codec {value!r}", _field("codec", value)) for value in ("lzma", "", 1)),
    ("codec of other files", _manifest(lambda m: m.update(codec={"raw": "zstd", "zstd": "raw"}[m["codec"]]))),
    ("block_nbytes 0", _field("block_nbytes", 0)),
    ("block_nbytes not a page", _field("block_nbytes", 4095)),
    ("nbytes not the sum", _manifest(lambda m: m.update(nbytes=m["nbytes"] + 1))),
    *(
        (f"attempt {text!r}", _field("attempt", text))
        for text in ("", "..", "a/../b", "a000001-000000000000-00000000")
    ),
    ("attempt of another run", _field("attempt", "a999999-000000000000-00000000-000001.0")),
    ("run of another attempt", _field("run", "a999999-000000000000-00000000")),
    ("shards empty", _field("shards", [])),
    ("shards an object", _field("shards", {})),
    ("a shard null", _manifest(lambda m: m["shards"].__setitem__(0, None))),
    ("a shard missing", _manifest(lambda m: m["shards"].pop())),
    ("a rank more than shards", _manifest(lambda m: m.update(world_size=m["world_size"] + 1))),
    ("a world of 2^40", _field("world_size", 2**40)),
    ("a world of none", _manifest(lambda m: m.update(world_size=0, shards=[], nbytes=0))),
    ("two ranks of one shard", _manifest(_twin)),
    ("shards out of order", _manifest(_unsorted)),
    ("a rank twice", _manifest(lambda m: (_twin(m), m["shards"][-1].update(rank=0)))),
    *(
        (f"no {key} of a shard", _manifest(lambda m, key=key: m["shards"][0].pop(key)))
        for key in ("rank", "path", "size", "header_nbytes", "header_digest")
    ),
    *(
        (f"{key} of a shard {value!r}", _shard(key, value))
        for key in ("rank", "size", "header_nbytes")
        for value in (-1, 1.0, False, "0", None, 2**63, 2**64)
    ),
    ("path empty", _shard("path", "")),
    ("path a number", _shard("path", 1)),
    ("path absolute", _shard("path", lambda p: "/" + p)),
    ("path to /etc/passwd", _shard("path", "/etc/passwd")),
    ("path out of the step", _shard("path", lambda p: "../" + p)),
    ("path out of the attempt", _shard("path", lambda p: p.split("/")[0] + "/../" + p)),
    ("path out, at the end", _shard("path", lambda p: p + "/..")),
    ("path with a dot", _shard("path", lambda p: p.replace("/", "/./"))),
    ("path with an empty component", _shard("path", lambda p: p.replace("/", "//"))),
    ("path ending in a slash", _shard("path", lambda p: p + "/")),
    ("path with a backslash", _shard("path", lambda p: p.replace("/", "/..\\"))),
    ("path with NUL", _shard("path", lambda p: p + "\0.safetensors")),
    (
        "path of another attempt",
        _shard("path", lambda p: "a000000-000000000000-00000000-000000.0/" + p.split("/")[1]),
    ),
    ("path of an attempt that starts the same", _shard("path", lambda p: p.replace("/", "0/"))),
    ("path of another kind of file", _shard("path", lambda p: p + ".json")),
    ("path of the manifest", _shard("path", "MANIFEST.json")),
    (
        "size smaller than the header",
        _manifest(
            lambda m: (m.update(nbytes=m["nbytes"] - m["shards"][0]["size"]), m["shards"][0].update(size=0))
        ),
    ),
    (
        "size not to a page",
        _manifest(
            lambda m: (
                m.update(nbytes=m["nbytes"] + 1),
                m["shards"][0].update(size=m["shards"][0]["size"] + 1),
            )
        ),
    ),
    ("header_nbytes 0", _shard("header_nbytes", 0)),
    ("header_nbytes not a page", _shard("header_nbytes", lambda n: n - 1)),
    ("header_nbytes above the size", _shard("header_nbytes", lambda n: n + 2**40)),
    (
        "header_nbytes enormous",
        _manifest(
            lambda m: (
                m["shards"][0].update(size=2**50, header_nbytes=2**40),
                m.update(nbytes=sum(s["size"] for s in m["shards"])),
            )
        ),
    ),
    *(
        (f"header_digest of a shard {text!r}", _shard("header_digest", text))
        for text in ("", "0" * 31, "0" * 33, "g" * 32, "A" * 32, "٠" * 32, 0, None)
    ),
    ("index a number", _field("index", 1)),
    ("index an empty object", _field("index", {})),
    *(
        (f"index of size {value!r}", _field("index", {"size": value, "digest": "0" * 32}))
        for value in (0, -1, 1.0, True, None, 2**62, 2**64)
    ),
    *(
        (f"index of digest {value!r:.20}", _field("index", {"size": 99, "digest": value}))
        for value in ("", "0" * 31, "G" * 32, 0, None)
    ),
    ("index with an unknown key", _field("index", {"size": 99, "digest": "0" * 32, "colour": "red"})),
]

_MANIFEST_NEWER: list[tuple[str, Mutation]] = [
    ("version 2", _field("version", 2)),
    ("version 2^64", _field("version", 2**64)),
    (
        "version 2, and all else different",
        lambda d: b'{"format": "ckptengine", "version": 2, "parts": [1, 2]}',
    ),
    ("an unknown feature", _field("features", ["parity"])),
    ("unknown features", _field("features", ["parity", "deltas"])),
]

# --- Indexes


def _index_frame(edit: Callable[[bytes], bytes]) -> Mutation:
    """An edit of the zstd frame."""

    def mutate(data: bytes) -> bytes:
        frame = edit(data[16:-16])
        body = data[:8] + struct.pack("<Q", len(frame)) + frame
        return body + digest(body)

    return mutate


def _packed(edit: Callable[[bytes], bytes]) -> Mutation:
    """An edit of the msgpack."""
    return _index_frame(lambda f: zstandard.compress(edit(zstandard.decompress(f))))


def _index(edit: Callable[[dict[str, Any]], Any]) -> Mutation:
    """An edit of the object."""

    def change(packed: bytes) -> bytes:
        content = msgspec.msgpack.decode(packed)
        edit(content)
        return msgspec.msgpack.encode(content)

    return _packed(change)


def _column(name: str, form: str, value: int, row: int = -1) -> Mutation:
    """One value of a column; the last by default."""

    def edit(content: dict[str, Any]) -> None:
        size = struct.calcsize(form)
        column = bytearray(content[name])
        at = len(column) + row * size if row < 0 else row * size
        struct.pack_into(form, column, at, value)
        content[name] = bytes(column)

    return _index(edit)


def _every(key: str, value: Any) -> Mutation:
    return _index(lambda c: c.__setitem__(key, [value] * len(c["names"])))


def _one_name_more(name: Callable[[list[str]], str]) -> Mutation:
    """A tensor without chunks after all others."""

    def edit(content: dict[str, Any]) -> None:
        content["names"].append(name(content["names"]))
        for key in ("dtype", "global_shape", "flat_of"):
            content[key].append(content[key][-1])

    return _index(edit)


_INDEX_KEYS = (
    "attempt",
    "names",
    "dtype",
    "global_shape",
    "flat_of",
    "name",
    "rank",
    "ndim",
    "offsets",
    "shape",
    "start",
    "stop",
)


def _claimed(size: int) -> bytes:
    """A frame that claims a size and then holds almost nothing."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + b"\x01\x00\x00"


_INDEX: list[tuple[str, Mutation]] = [
    *((f"cut after {n} bytes", lambda d, n=n: d[:n]) for n in (0, 1, 7, 8, 15, 16, 31, 32)),
    ("cut in the middle", lambda d: d[: len(d) // 2]),
    ("cut by one byte", lambda d: d[:-1]),
    ("cut before the digest", lambda d: d[:-16]),
    ("a byte too long", lambda d: d + b"\0"),
    ("all zeros", lambda d: bytes(len(d))),
    ("magic damaged", lambda d: b"X" + d[1:]),
    ("version 0", lambda d: d[:7] + b"\0" + d[8:]),
    ("length 0", lambda d: d[:8] + bytes(8) + d[16:]),
    ("length 2^64 - 1", lambda d: d[:8] + b"\xff" * 8 + d[16:]),
    ("digest damaged", lambda d: d[:-1] + bytes([d[-1] ^ 1])),
    ("frame damaged under its digest", lambda d: d[:20] + bytes([d[20] ^ 1]) + d[21:]),
    ("frame empty", _index_frame(lambda f: b"")),
    ("frame of zeros", _index_frame(lambda f: bytes(len(f)))),
    ("frame cut", _index_frame(lambda f: f[:-1])),
    ("frame with a byte after it", _index_frame(lambda f: f + b"\0")),
    ("two frames", _index_frame(lambda f: f + f)),
    (
        "frame without its size",
        _index_frame(
            lambda f: zstandard.ZstdCompressor(write_content_size=False).compress(zstandard.decompress(f))
        ),
    ),
    *(
        (f"frame that claims {size} bytes", _index_frame(lambda f, size=size: _claimed(size)))
        for size in (1 << 29, 1 << 30, 1 << 40, 2**63, 2**64 - 1, 2**64 - 2)
    ),
    ("frame of nothing", _packed(lambda p: b"")),
    ("msgpack cut", _packed(lambda p: p[:-1])),
    ("msgpack with a byte after it", _packed(lambda p: p + b"\xc0")),
    ("msgpack null", _packed(lambda p: b"\xc0")),
    ("msgpack array of 2^32 - 1", _packed(lambda p: b"\xdd\xff\xff\xff\xff")),
    ("msgpack map of 2^32 - 1", _packed(lambda p: b"\xdf\xff\xff\xff\xff")),
    ("msgpack bytes of 2^32 - 1", _packed(lambda p: b"\xc6\xff\xff\xff\xff")),
    ("names an array of 2^32 - 1", _packed(lambda p: b"\x81\xa5names\xdd\xff\xff\xff\xff")),
    ("msgpack nested 100,000 deep", _packed(lambda p: b"\x91" * 100_000)),
    ("names nested 100,000 deep", _packed(lambda p: b"\x81\xa1x" + b"\x91" * 100_000)),
    *((f"no {key}", _index(lambda c, key=key: c.pop(key))) for key in _INDEX_KEYS),
    *((f"{key} null", _index(lambda c, key=key: c.__setitem__(key, None))) for key in _INDEX_KEYS),
    *((f"{key} cut", _index(lambda c, key=key: c.__setitem__(key, c[key][:-1]))) for key in _INDEX_KEYS),
    *(
        (f"{key} longer", _index(lambda c, key=key: c.__setitem__(key, c[key] + c[key][-1:])))
        for key in _INDEX_KEYS
        if key != "attempt"
    ),
    *((f"{key} empty", _index(lambda c, key=key: c.__setitem__(key, c[key][:0]))) for key in _INDEX_KEYS),
    ("unknown key", _index(lambda c: c.__setitem__("colour", "red"))),
    ("attempt malformed", _index(lambda c: c.__setitem__("attempt", "../.."))),
    *(
        (f"{key} {value!r}", _index(lambda c, key=key, value=value: c.__setitem__(key, value)))
        for key in ("per_rank", "some_ranks")
        for value in (None, "a", {"a": 1}, [1], [None], ["b", "a"], ["a", "a"])
    ),
    ("a name twice", _one_name_more(lambda names: names[-1])),
    ("names not sorted", _one_name_more(lambda names: "")),
    ("a name a number", _index(lambda c: c["names"].__setitem__(0, 1))),
    *((f"dtype {value!r}", _every("dtype", value)) for value in ("float128", "", 1, None)),
    *(
        (f"global_shape {value!r:.40}", _every("global_shape", value))
        for value in (
            None,
            [-1],
            [1.0],
            [True],
            [2**63],
            [2**62, 2**62],
            [0, 2**62, 2**62],
            [2**62],
            [1] * 65,
            "12",
        )
    ),
    *((f"flat_of {value!r}", _every("flat_of", value)) for value in ([2**62, 2**62], [7, 7, 7, 7], [-1], 1)),
    ("a chunk of an unknown name", _column("name", "<I", 2**32 - 1)),
    ("chunks not ordered by name", _column("name", "<I", 2**31, row=0)),
    ("a chunk of 255 dimensions", _column("ndim", "<B", 255)),
    ("a chunk of no dimensions", _index(lambda c: c.__setitem__("ndim", bytes(len(c["ndim"]))))),
    ("a chunk at a negative offset", _column("offsets", "<q", -1)),
    ("a chunk at 2^63 - 1", _column("offsets", "<q", 2**63 - 1)),
    ("a chunk of a negative size", _column("shape", "<q", -1)),
    ("a chunk of an enormous size", _column("shape", "<q", 2**63 - 1)),
    ("a chunk that ends before it starts", _column("start", "<Q", 2**64 - 1)),
    ("a chunk that ends at 2^64 - 1", _column("stop", "<Q", 2**64 - 1)),
    (
        "a chunk a byte too long",
        _index(
            lambda c: c.__setitem__(
                "stop", (struct.unpack("<Q", c["stop"][:8])[0] + 1).to_bytes(8, "little") + c["stop"][8:]
            )
        ),
    ),
]

_INDEX_NEWER: list[tuple[str, Mutation]] = [("version 2", lambda d: d[:7] + b"\2" + d[8:])]


def _list(
    target: Literal["header", "manifest", "index"],
    corrupt: list[tuple[str, Mutation]],
    newer: list[tuple[str, Mutation]],
) -> list[Abuse]:
    return [
        *(Abuse(name, target, mutate) for name, mutate in corrupt),
        *(Abuse(name, target, mutate, UnsupportedFormatError) for name, mutate in newer),
    ]


ABUSE: list[Abuse] = [
    *_list("header", _HEADER, _HEADER_NEWER),
    *_list("manifest", _MANIFEST, _MANIFEST_NEWER),
    *_list("index", _INDEX, _INDEX_NEWER),
]
"""For a header, of a raw or a compressed shard; a manifest; an index."""

COMPRESSED_ABUSE: list[Abuse] = _list(
    "header", _COMPRESSED, [("container version 2", lambda d: d[:7] + b"\2" + d[8:])]
)
"""For the header of a compressed shard."""
