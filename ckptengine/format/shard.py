"""How is a shard's header laid down in bytes?

Writing: `encode_header` before the first block is written, which fixes the header's size, and `seal_header`
after the last, which fills in the digests. Reading: `header_nbytes` of the first 16 bytes, then
`decode_header` of that many.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from ckptengine.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptengine.format import dtypes, strict_json
from ckptengine.format.blocks import AS_IT_IS, METHODS, ZSTD, BlockTable
from ckptengine.format.digest import DIGEST_NBYTES, is_lower_hex
from ckptengine.format.entries import METADATA_KEY, ShardHeader, TensorEntry, ViewEntry
from ckptengine.format.geometry import Chunk
from ckptengine.format.layout import PAD_PREFIX
from ckptengine.format.limits import INT64_MAX, MAX_HEADER_NBYTES, PAGE, round_up
from ckptengine.format.per_rank import OWN_DIGITS

__all__ = [
    "METADATA_KEY",
    "PREFIX_NBYTES",
    "HeaderTemplate",
    "ShardHeader",
    "TensorEntry",
    "ViewEntry",
    "decode_header",
    "encode_header",
    "header_nbytes",
    "own_spans",
    "seal_header",
    "tensor_spans",
]

PREFIX_NBYTES = 16
"""How much of a shard `header_nbytes` needs to see."""

_VERSION = 1
_MAGIC = b"CKPTZ\0\0"
_ZSTD_MAGIC = _MAGIC + bytes([_VERSION])
_STORED_DIGITS = 8
_PER_BLOCK = (("stored", _STORED_DIGITS), ("methods", 1))
"""What a compressed shard says of each block beside its digest, in so many characters."""
_KEYS = "ckptengine."

Size = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
Sizes = tuple[Size, ...]


class _Tensor(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A tensor as safetensors has it."""

    dtype: str
    shape: Sizes
    data_offsets: tuple[Size, Size]


class _Extra(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """What safetensors cannot say about a tensor."""

    dtype: str | None = None
    shape: Sizes | None = None
    stride: Sizes | None = None
    global_shape: Sizes | None = None
    offsets: Sizes | None = None
    flat_of: Sizes | None = None
    placement: str | None = None
    kind: str | None = None
    descr: list[Any] | None = None


class _View(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    of: str
    byte_offset: Size
    dtype: str
    shape: Sizes
    stride: Sizes | None = None
    global_shape: Sizes | None = None
    offsets: Sizes | None = None
    flat_of: Sizes | None = None
    placement: str | None = None


class _Shard(msgspec.Struct, forbid_unknown_fields=True):
    run: str
    attempt: str
    step: Size
    rank: Size
    world_size: Size
    codec: Literal["raw", "zstd"]
    block_nbytes: Size
    data_nbytes: Size


@dataclass(frozen=True, slots=True)
class HeaderTemplate:
    """A header in its final size whose digests, stored lengths and methods are still zeros.

    own_at: where the digests of the shard's own tensors go; None: it does not keep them.
    """

    data: bytes
    digests_at: int
    stored_at: int | None
    methods_at: int | None
    n_blocks: int
    own_at: int | None = None

    @property
    def nbytes(self) -> int:
        return len(self.data)


def encode_header(header: ShardHeader) -> HeaderTemplate:
    """The header's bytes, without its digests. `ValueError` if it breaks a rule of the format."""
    header.validate()
    n_blocks = header.blocks.count
    own = "0" * (OWN_DIGITS * len(header.own_entries)) if header.own is not None else None
    if header.block_nbytes >= 16**_STORED_DIGITS:
        raise ValueError(f"block_nbytes must be less than 4 GiB, not {header.block_nbytes}")
    compressed = header.codec == "zstd"
    metadata = {
        f"{_KEYS}format": str(_VERSION),
        f"{_KEYS}shard": _dumps(_Shard(**{name: getattr(header, name) for name in _Shard.__struct_fields__})),
        f"{_KEYS}digests": "0" * (2 * DIGEST_NBYTES * n_blocks),
        **({f"{_KEYS}{key}": "0" * (width * n_blocks) for key, width in _PER_BLOCK} if compressed else {}),
        **({} if own is None else {f"{_KEYS}own": own}),
        f"{_KEYS}tensors": _dumps(_extras(header.tensors)),
        f"{_KEYS}views": _dumps({view.name: _view(view) for view in header.views}),
        f"{_KEYS}replicas": _dumps(header.replicas),
        f"{_KEYS}tree": _dumps(header.tree),
    }
    text = msgspec.json.encode({METADATA_KEY: metadata, **_safetensors_entries(header)})
    prefix_nbytes = PREFIX_NBYTES if compressed else PREFIX_NBYTES - len(_ZSTD_MAGIC)
    nbytes = round_up(prefix_nbytes + len(text), PAGE)
    if nbytes - prefix_nbytes > MAX_HEADER_NBYTES:
        raise ValueError(
            f"the header needs {nbytes} bytes, more than {MAX_HEADER_NBYTES}: "
            "keep large values as tensors or numpy arrays"
        )
    prefix = (_ZSTD_MAGIC if compressed else b"") + struct.pack("<Q", nbytes - prefix_nbytes)
    data = (prefix + text).ljust(nbytes, b" ")
    return HeaderTemplate(
        data=data,
        digests_at=_value_at(data, f"{_KEYS}digests"),
        stored_at=_value_at(data, f"{_KEYS}stored") if compressed else None,
        methods_at=_value_at(data, f"{_KEYS}methods") if compressed else None,
        n_blocks=n_blocks,
        own_at=None if own is None else _value_at(data, f"{_KEYS}own"),
    )


def seal_header(
    template: HeaderTemplate,
    digests: Sequence[bytes],
    stored: Sequence[int] | None = None,
    methods: str | None = None,
    own: str | None = None,
) -> bytes:
    """The finished header: the template with every block's digest and, if compressed, stored length and
    method; and the digests of its own tensors, if they are kept."""
    if len(digests) != template.n_blocks or any(len(d) != DIGEST_NBYTES for d in digests):
        raise ValueError(f"needs {template.n_blocks} digests of {DIGEST_NBYTES} bytes, got {len(digests)}")
    if (stored is None) != (template.stored_at is None) or (
        stored is not None and len(stored) != len(digests)
    ):
        raise ValueError("stored lengths are needed for the blocks of a compressed shard, and for no other")
    if (methods is None) != (template.methods_at is None) or (
        methods is not None and (len(methods) != len(digests) or not METHODS.issuperset(methods))
    ):
        raise ValueError("a method is needed for each block of a compressed shard, and for no other")
    if (own is None) != (template.own_at is None) or (
        own is not None and not (is_lower_hex(own, len(own)) and _fits(template, own))
    ):
        raise ValueError("needs a digest for each of the shard's own tensors, if it keeps them")
    data = bytearray(template.data)

    def put(at: int, text: bytes) -> None:
        data[at : at + len(text)] = text

    put(template.digests_at, b"".join(digests).hex().encode())
    if stored is not None and template.stored_at is not None:
        if any(not 0 < length < 16**_STORED_DIGITS for length in stored):
            raise ValueError(f"a stored length does not fit: {stored}")
        put(template.stored_at, "".join(f"{length:0{_STORED_DIGITS}x}" for length in stored).encode())
    if methods is not None and template.methods_at is not None:
        put(template.methods_at, methods.encode())
    if own is not None and template.own_at is not None:
        put(template.own_at, own.encode())
    return bytes(data)


def tensor_spans(template: HeaderTemplate) -> list[tuple[str, str, int, int]]:
    """`(name, dtype, start, stop)` of each tensor, in offset order without pads. The template is trusted: it
    is this version's own."""
    raw, extras = _trusted(template)
    decode = msgspec.json.Decoder(_Tensor).decode
    spans = []
    for name, text in raw.items():
        if name.startswith(PAD_PREFIX):
            continue
        entry, extra = decode(text), extras.get(name)
        dtype = extra.dtype if extra is not None and extra.dtype is not None else None
        spans.append((name, dtype or dtypes.torch_name(entry.dtype), *entry.data_offsets))
    return spans


def _fits(template: HeaderTemplate, own: str) -> bool:
    """Is there room for just as many digits?"""
    start = template.own_at or 0
    return template.data[start : start + len(own) + 1] == b"0" * len(own) + b'"'


def own_spans(template: HeaderTemplate) -> list[tuple[int, int]]:
    """`(start, stop)` of each whole tensor and large value, in offset order: what `own` has a digest for."""
    raw, extras = _trusted(template)
    decode = msgspec.json.Decoder(_Tensor).decode
    return [
        decode(text).data_offsets
        for name, text in raw.items()
        if not name.startswith(PAD_PREFIX)
        and ((extra := extras.get(name)) is None or extra.global_shape is None)
    ]


def _trusted(template: HeaderTemplate) -> tuple[dict[str, msgspec.Raw], dict[str, _Extra]]:
    """The entries of a template, which is this version's own, and what safetensors cannot say of them."""
    at = PREFIX_NBYTES if template.data.startswith(_MAGIC) else PREFIX_NBYTES - len(_ZSTD_MAGIC)
    raw = msgspec.json.decode(template.data[at:], type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(raw.pop(METADATA_KEY), type=dict[str, str])
    return raw, msgspec.json.decode(metadata[f"{_KEYS}tensors"], type=dict[str, _Extra])


def header_nbytes(prefix: bytes, path: str) -> int:
    """Where the data section begins, from a shard's first 16 bytes: how much to read for `decode_header`."""
    if len(prefix) < PREFIX_NBYTES:
        raise _corrupt(f"the file ends after {len(prefix)} bytes", path)
    at = 0
    if prefix[: len(_MAGIC)] == _MAGIC:
        version = prefix[len(_MAGIC)]
        if version > _VERSION:
            raise _unsupported(f"compressed shard of version {version}", path)
        if version < _VERSION:
            raise _corrupt("not a compressed shard", path)
        at = len(_ZSTD_MAGIC)
    (n,) = struct.unpack_from("<Q", prefix, at)
    if n == 0:
        raise _corrupt("the shard has no header: its writer did not finish", path)
    nbytes = int(at + 8 + n)
    if n > MAX_HEADER_NBYTES or nbytes % PAGE:
        raise _corrupt(f"the header cannot be {n} bytes long: not a shard, or damaged", path)
    return nbytes


def decode_header(data: bytes, *, path: str, file_nbytes: int | None = None) -> ShardHeader:
    """The header that `data`, everything before the data section, encodes.

    file_nbytes: the file's size, if it is to be checked. Every malformation is a `CorruptCheckpointError`, a
    newer version an `UnsupportedFormatError`.
    """
    expected = header_nbytes(data[:PREFIX_NBYTES], path)
    if len(data) != expected:
        raise CorruptCheckpointError(
            "the header is cut off", path=path, expected=f"{expected} bytes", actual=f"{len(data)} bytes"
        )
    compressed = data.startswith(_MAGIC)
    try:
        metadata, tensors = _parse(data[PREFIX_NBYTES if compressed else 8 :], path)
        header = _header(tensors, metadata, compressed=compressed, nbytes=expected)
    except (ValueError, RecursionError) as error:
        raise _corrupt(f"malformed shard header: {error}", path) from error
    if file_nbytes is not None:
        stored = header.data_nbytes
        if header.stored_nbytes is not None:
            stored = sum(round_up(length, PAGE) for length in header.stored_nbytes)
        if expected + stored != file_nbytes:
            raise CorruptCheckpointError(
                "the file's size is not what its header says",
                path=path,
                rank=header.rank,
                expected=f"{expected + stored} bytes",
                actual=f"{file_nbytes} bytes",
            )
    return header


def _corrupt(message: str, path: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(message, path=path, hint="restore an earlier step")


def _unsupported(message: str, path: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(message, path=path, hint="install a newer version of ckptengine")


def _dumps(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _value_at(data: bytes, key: str) -> int:
    """Where the value of a metadata key starts."""
    # Inside other strings quotes are escaped, and the metadata comes first: so the first match is the key.
    key_text = f'"{key}":"'.encode()
    return data.index(key_text) + len(key_text)


def _extras(tensors: Sequence[TensorEntry]) -> dict[str, _Extra]:
    extras = {}
    for entry in tensors:
        as_bytes = dtypes.safetensors_code(entry.dtype) is None
        chunk = entry.chunk
        if (
            as_bytes
            or chunk
            or entry.stride is not None
            or entry.placement is not None
            or entry.kind is not None
        ):
            extras[entry.name] = _Extra(
                entry.dtype if as_bytes else None,
                entry.shape if as_bytes else None,
                entry.stride,
                chunk.global_shape if chunk else None,
                chunk.offsets if chunk else None,
                chunk.flat_of if chunk else None,
                entry.placement,
                entry.kind,
                entry.descr,
            )
    return extras


def _view(view: ViewEntry) -> _View:
    chunk = view.chunk
    return _View(
        view.of,
        view.byte_offset,
        view.dtype,
        view.shape,
        view.stride,
        chunk.global_shape if chunk else None,
        chunk.offsets if chunk else None,
        chunk.flat_of if chunk else None,
        view.placement,
    )


def _safetensors_entries(header: ShardHeader) -> dict[str, _Tensor]:
    """The tensors as safetensors wants them, with a pad in every gap: the same pads that `lay_out` gives."""
    entries: dict[str, _Tensor] = {}
    at = pads = 0

    def pad(stop: int) -> None:
        nonlocal pads
        if at < stop:
            entries[f"{PAD_PREFIX}{pads}"] = _Tensor("U8", (stop - at,), (at, stop))
            pads += 1

    for entry in header.tensors:
        pad(entry.start)
        code = dtypes.safetensors_code(entry.dtype)
        if code is None:
            entries[entry.name] = _Tensor("U8", (entry.nbytes,), (entry.start, entry.stop))
        else:
            entries[entry.name] = _Tensor(code, entry.shape, (entry.start, entry.stop))
        at = entry.stop
    pad(header.data_nbytes)
    return entries


def _parse(text: bytes, path: str) -> tuple[dict[str, str], dict[str, _Tensor]]:
    """The two kinds of things in a safetensors header. The version comes first: the rest may depend on it."""
    raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    if METADATA_KEY not in raw:
        raise ValueError(f"no {METADATA_KEY}: not a shard of ckptengine")
    metadata = msgspec.json.decode(raw.pop(METADATA_KEY), type=dict[str, str])
    version = metadata.get(f"{_KEYS}format", "")
    if version != str(_VERSION):
        if re.fullmatch("[1-9][0-9]{0,8}", version):
            raise _unsupported(f"shard of format {version}; this version reads format {_VERSION}", path)
        raise ValueError(f"format {version!r:.40}: not a shard of ckptengine")
    decode = msgspec.json.Decoder(_Tensor).decode
    tensors = {}
    name = ""
    try:
        for name, entry in raw.items():
            tensors[name] = decode(entry)
    except msgspec.ValidationError as error:
        raise ValueError(f"tensor {name!r}: {error}") from None
    strict_json.check_unambiguous(text, {METADATA_KEY: metadata, **tensors})
    return metadata, tensors


def _header(
    tensors: dict[str, _Tensor], metadata: dict[str, str], *, compressed: bool, nbytes: int
) -> ShardHeader:
    known = {
        f"{_KEYS}{key}" for key in ("format", "shard", "digests", "tensors", "views", "replicas", "tree")
    }
    if compressed:
        known.add(f"{_KEYS}stored")
    ours = {key for key in metadata if key.startswith(_KEYS)}
    # Shards from before byte planes have no methods; those of one rank, and the first ones, no `own`.
    known.update(ours & ({f"{_KEYS}own", f"{_KEYS}methods"} if compressed else {f"{_KEYS}own"}))
    if ours != known:
        raise ValueError(f"metadata keys missing or unknown: {', '.join(sorted(ours ^ known))}")
    shard = _nested(metadata, "shard", _Shard)
    if (shard.codec == "zstd") != compressed:
        raise ValueError(f"codec {shard.codec!r} in a {'compressed' if compressed else 'raw'} shard")
    blocks = BlockTable(shard.data_nbytes, shard.block_nbytes)
    stored = _stored(metadata[f"{_KEYS}stored"], blocks) if compressed else None
    header = ShardHeader(
        **msgspec.structs.asdict(shard),
        tensors=_tensors(tensors, _nested(metadata, "tensors", dict[str, _Extra]), shard.data_nbytes),
        views=tuple(
            ViewEntry(
                name, v.of, v.byte_offset, v.dtype, v.shape, v.stride, _chunk(name, v.shape, v), v.placement
            )
            for name, v in _nested(metadata, "views", dict[str, _View]).items()
        ),
        replicas=_nested(metadata, "replicas", dict[str, Size]),
        tree=_nested(metadata, "tree"),
        digests=_digests(metadata[f"{_KEYS}digests"], blocks.count),
        stored_nbytes=stored,
        methods=None if stored is None else _methods(metadata.get(f"{_KEYS}methods"), stored, blocks),
        own=_own(metadata.get(f"{_KEYS}own")),
        header_nbytes=nbytes,
    )
    header.validate()
    if header.own is not None and len(header.own) != OWN_DIGITS * len(header.own_entries):
        raise ValueError(f"{_KEYS}own is not a digest for each whole tensor")
    return header


def _nested(metadata: dict[str, str], key: str, type: Any = Any) -> Any:
    try:
        return strict_json.loads(metadata[f"{_KEYS}{key}"], type)
    except ValueError as error:
        raise ValueError(f"{_KEYS}{key}: {error}") from None


def _tensors(entries: dict[str, Any], extras: dict[str, _Extra], data_nbytes: int) -> tuple[TensorEntry, ...]:
    tensors = []
    at = pads = 0
    none = _Extra()
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        if start != at or stop < start:
            raise ValueError(f"tensor {name!r}: bytes [{start}, {stop}) leave a hole or an overlap at {at}")
        at = stop
        if name.startswith(PAD_PREFIX):
            if name != f"{PAD_PREFIX}{pads}" or entry.dtype != "U8" or entry.shape != (stop - start,):
                raise ValueError(f"malformed pad {name!r}")
            if not 0 < stop - start < PAGE:
                raise ValueError(f"pad {name!r} of {stop - start} bytes")
            pads += 1
            continue
        extra = extras.pop(name, none)
        dtype, shape = extra.dtype, extra.shape
        if dtype is None and shape is None:
            try:
                dtype = dtypes.torch_name(entry.dtype)
            except KeyError:
                raise ValueError(f"tensor {name!r}: unknown dtype {entry.dtype!r}") from None
            shape = entry.shape
        elif dtype is None or shape is None or entry.dtype != "U8" or entry.shape != (stop - start,):
            raise ValueError(f"tensor {name!r}: its true dtype and shape go together, over bytes of type U8")
        tensors.append(
            TensorEntry(
                name,
                dtype,
                shape,
                start,
                stop,
                _chunk(name, shape, extra) if extra is not none else None,
                extra.stride,
                extra.placement,
                extra.kind,
                extra.descr,
            )
        )
    if at != data_nbytes:
        raise ValueError(f"the tensors end at {at}, the data section at {data_nbytes}")
    if extras:
        raise ValueError(f"tensor {next(iter(extras))!r} is described but not stored")
    return tuple(tensors)


def _chunk(name: str, shape: tuple[int, ...], extra: _Extra | _View) -> Chunk | None:
    if extra.global_shape is None or extra.offsets is None:
        if extra.global_shape is not None or extra.offsets is not None or extra.flat_of is not None:
            raise ValueError(f"tensor {name!r}: global_shape and offsets go together")
        return None
    return Chunk(extra.global_shape, extra.offsets, shape, extra.flat_of)


def _digests(text: str, count: int) -> bytes:
    if not is_lower_hex(text, 2 * DIGEST_NBYTES * count):
        raise ValueError(f"{_KEYS}digests is not {count} digests")
    return bytes.fromhex(text)


def _own(text: str | None) -> bytes | None:
    if text is not None and not is_lower_hex(text, len(text)):
        raise ValueError(f"{_KEYS}own is not hexadecimal")
    return None if text is None else text.encode()


def _stored(text: str, blocks: BlockTable) -> tuple[int, ...]:
    if not is_lower_hex(text, _STORED_DIGITS * blocks.count):
        raise ValueError(f"{_KEYS}stored is not {blocks.count} lengths")
    lengths = tuple(int(text[at : at + _STORED_DIGITS], 16) for at in range(0, len(text), _STORED_DIGITS))
    for i, length in enumerate(lengths):
        start, stop = blocks.span(i)
        if not 0 < length <= stop - start:
            raise ValueError(f"block {i} of {stop - start} bytes is stored in {length}")
    return lengths


def _methods(text: str | None, stored: tuple[int, ...], blocks: BlockTable) -> str:
    lengths = [stop - start for start, stop in map(blocks.span, range(blocks.count))]
    if text is None:
        return "".join(AS_IT_IS if n == whole else ZSTD for n, whole in zip(stored, lengths, strict=True))
    if len(text) != blocks.count or not METHODS.issuperset(text):
        raise ValueError(f"{_KEYS}methods is not {blocks.count} known methods")
    for i, (method, n, whole) in enumerate(zip(text, stored, lengths, strict=True)):
        if (method == AS_IT_IS) != (n == whole):
            raise ValueError(f"block {i} of {whole} bytes, stored in {n}, cannot be of method {method}")
    return text
