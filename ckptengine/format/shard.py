"""How is a shard's header laid down in bytes?

Writing: `encode_header` before the first block is written, which fixes the header's size, and `seal_header`
after the last, which fills in the digests. Reading: `shard_reading`, whose names are here, too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ckptengine.format import dtypes
from ckptengine.format.blocks import METHODS
from ckptengine.format.digest import DIGEST_NBYTES, is_lower_hex
from ckptengine.format.entries import METADATA_KEY, ShardHeader, TensorEntry, ViewEntry
from ckptengine.format.layout import PAD_PREFIX
from ckptengine.format.limits import MAX_HEADER_NBYTES, PAGE, round_up
from ckptengine.format.per_rank import OWN_DIGITS
from ckptengine.format.shard_reading import decode_header, header_nbytes
from ckptengine.format.wire import (
    KEYS,
    MAGIC,
    PER_BLOCK,
    PREFIX_NBYTES,
    STORED_DIGITS,
    VERSION,
    ZSTD_MAGIC,
    WireExtra,
    WireShard,
    WireTensor,
    WireView,
)

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
    if header.block_nbytes >= 16**STORED_DIGITS:
        raise ValueError(f"block_nbytes must be less than 4 GiB, not {header.block_nbytes}")
    compressed = header.codec == "zstd"
    metadata = {
        f"{KEYS}format": str(VERSION),
        f"{KEYS}shard": _dumps(
            WireShard(**{name: getattr(header, name) for name in WireShard.__struct_fields__})
        ),
        f"{KEYS}digests": "0" * (2 * DIGEST_NBYTES * n_blocks),
        **({f"{KEYS}{key}": "0" * (width * n_blocks) for key, width in PER_BLOCK} if compressed else {}),
        **({} if own is None else {f"{KEYS}own": own}),
        f"{KEYS}tensors": _dumps(_extras(header.tensors)),
        f"{KEYS}views": _dumps({view.name: _view(view) for view in header.views}),
        f"{KEYS}replicas": _dumps(header.replicas),
        f"{KEYS}tree": _dumps(header.tree),
    }
    text = msgspec.json.encode({METADATA_KEY: metadata, **_safetensors_entries(header)})
    prefix_nbytes = PREFIX_NBYTES if compressed else PREFIX_NBYTES - len(ZSTD_MAGIC)
    nbytes = round_up(prefix_nbytes + len(text), PAGE)
    if nbytes - prefix_nbytes > MAX_HEADER_NBYTES:
        raise ValueError(
            f"the header needs {nbytes} bytes, more than {MAX_HEADER_NBYTES}: "
            "keep large values as tensors or numpy arrays"
        )
    prefix = (ZSTD_MAGIC if compressed else b"") + struct.pack("<Q", nbytes - prefix_nbytes)
    data = (prefix + text).ljust(nbytes, b" ")
    return HeaderTemplate(
        data=data,
        digests_at=_value_at(data, f"{KEYS}digests"),
        stored_at=_value_at(data, f"{KEYS}stored") if compressed else None,
        methods_at=_value_at(data, f"{KEYS}methods") if compressed else None,
        n_blocks=n_blocks,
        own_at=None if own is None else _value_at(data, f"{KEYS}own"),
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
        if any(not 0 < length < 16**STORED_DIGITS for length in stored):
            raise ValueError(f"a stored length does not fit: {stored}")
        put(template.stored_at, "".join(f"{length:0{STORED_DIGITS}x}" for length in stored).encode())
    if methods is not None and template.methods_at is not None:
        put(template.methods_at, methods.encode())
    if own is not None and template.own_at is not None:
        put(template.own_at, own.encode())
    return bytes(data)


def tensor_spans(template: HeaderTemplate) -> list[tuple[str, str, int, int]]:
    """`(name, dtype, start, stop)` of each tensor, in offset order without pads. The template is trusted: it
    is this version's own."""
    raw, extras = _trusted(template)
    decode = msgspec.json.Decoder(WireTensor).decode
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
    decode = msgspec.json.Decoder(WireTensor).decode
    return [
        decode(text).data_offsets
        for name, text in raw.items()
        if not name.startswith(PAD_PREFIX)
        and ((extra := extras.get(name)) is None or extra.global_shape is None)
    ]


def _trusted(template: HeaderTemplate) -> tuple[dict[str, msgspec.Raw], dict[str, WireExtra]]:
    """The entries of a template, which is this version's own, and what safetensors cannot say of them."""
    at = PREFIX_NBYTES if template.data.startswith(MAGIC) else PREFIX_NBYTES - len(ZSTD_MAGIC)
    raw = msgspec.json.decode(template.data[at:], type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(raw.pop(METADATA_KEY), type=dict[str, str])
    return raw, msgspec.json.decode(metadata[f"{KEYS}tensors"], type=dict[str, WireExtra])


def _dumps(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _value_at(data: bytes, key: str) -> int:
    """Where the value of a metadata key starts."""
    # Inside other strings quotes are escaped, and the metadata comes first: so the first match is the key.
    key_text = f'"{key}":"'.encode()
    return data.index(key_text) + len(key_text)


def _extras(tensors: Sequence[TensorEntry]) -> dict[str, WireExtra]:
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
            extras[entry.name] = WireExtra(
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


def _view(view: ViewEntry) -> WireView:
    chunk = view.chunk
    return WireView(
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


def _safetensors_entries(header: ShardHeader) -> dict[str, WireTensor]:
    """The tensors as safetensors wants them, with a pad in every gap: the same pads that `lay_out` gives."""
    entries: dict[str, WireTensor] = {}
    at = pads = 0

    def pad(stop: int) -> None:
        nonlocal pads
        if at < stop:
            entries[f"{PAD_PREFIX}{pads}"] = WireTensor("U8", (stop - at,), (at, stop))
            pads += 1

    for entry in header.tensors:
        pad(entry.start)
        code = dtypes.safetensors_code(entry.dtype)
        if code is None:
            entries[entry.name] = WireTensor("U8", (entry.nbytes,), (entry.start, entry.stop))
        else:
            entries[entry.name] = WireTensor(code, entry.shape, (entry.start, entry.stop))
        at = entry.stop
    pad(header.data_nbytes)
    return entries
