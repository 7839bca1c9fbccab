"""How is a shard's header read? `header_nbytes` of the first 16 bytes, then `decode_header` of that many.

A damaged or hostile one is a `CorruptCheckpointError` that says what is wrong, whatever it is.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import msgspec

from ckptengine.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptengine.format import dtypes, strict_json
from ckptengine.format.blocks import AS_IT_IS, METHODS, ZSTD, BlockTable
from ckptengine.format.digest import DIGEST_NBYTES, is_lower_hex
from ckptengine.format.entries import METADATA_KEY, ShardHeader, TensorEntry, ViewEntry
from ckptengine.format.geometry import Chunk
from ckptengine.format.layout import PAD_PREFIX
from ckptengine.format.limits import MAX_HEADER_NBYTES, PAGE, round_up
from ckptengine.format.per_rank import OWN_DIGITS
from ckptengine.format.wire import (
    KEYS,
    MAGIC,
    PREFIX_NBYTES,
    STORED_DIGITS,
    VERSION,
    ZSTD_MAGIC,
    Size,
    WireExtra,
    WireShard,
    WireTensor,
    WireView,
)


def header_nbytes(prefix: bytes, path: str) -> int:
    """Where the data section begins, from a shard's first 16 bytes: how much to read for `decode_header`."""
    if len(prefix) < PREFIX_NBYTES:
        raise _corrupt(f"the file ends after {len(prefix)} bytes", path)
    at = 0
    if prefix[: len(MAGIC)] == MAGIC:
        version = prefix[len(MAGIC)]
        if version > VERSION:
            raise _unsupported(f"compressed shard of version {version}", path)
        if version < VERSION:
            raise _corrupt("not a compressed shard", path)
        at = len(ZSTD_MAGIC)
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
    compressed = data.startswith(MAGIC)
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


def _parse(text: bytes, path: str) -> tuple[dict[str, str], dict[str, WireTensor]]:
    """The two kinds of things in a safetensors header. The version comes first: the rest may depend on it."""
    raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    if METADATA_KEY not in raw:
        raise ValueError(f"no {METADATA_KEY}: not a shard of ckptengine")
    metadata = msgspec.json.decode(raw.pop(METADATA_KEY), type=dict[str, str])
    version = metadata.get(f"{KEYS}format", "")
    if version != str(VERSION):
        if re.fullmatch("[1-9][0-9]{0,8}", version):
            raise _unsupported(f"shard of format {version}; this version reads format {VERSION}", path)
        raise ValueError(f"format {version!r:.40}: not a shard of ckptengine")
    decode = msgspec.json.Decoder(WireTensor).decode
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
    tensors: dict[str, WireTensor], metadata: dict[str, str], *, compressed: bool, nbytes: int
) -> ShardHeader:
    known = {f"{KEYS}{key}" for key in ("format", "shard", "digests", "tensors", "views", "replicas", "tree")}
    if compressed:
        known.add(f"{KEYS}stored")
    ours = {key for key in metadata if key.startswith(KEYS)}
    # Shards from before byte planes have no methods; those of one rank, and the first ones, no `own`.
    known.update(ours & ({f"{KEYS}own", f"{KEYS}methods"} if compressed else {f"{KEYS}own"}))
    if ours != known:
        raise ValueError(f"metadata keys missing or unknown: {', '.join(sorted(ours ^ known))}")
    shard = _nested(metadata, "shard", WireShard)
    if (shard.codec == "zstd") != compressed:
        raise ValueError(f"codec {shard.codec!r} in a {'compressed' if compressed else 'raw'} shard")
    blocks = BlockTable(shard.data_nbytes, shard.block_nbytes)
    stored = _stored(metadata[f"{KEYS}stored"], blocks) if compressed else None
    header = ShardHeader(
        **msgspec.structs.asdict(shard),
        tensors=_tensors(tensors, _nested(metadata, "tensors", dict[str, WireExtra]), shard.data_nbytes),
        views=tuple(
            ViewEntry(
                name, v.of, v.byte_offset, v.dtype, v.shape, v.stride, _chunk(name, v.shape, v), v.placement
            )
            for name, v in _nested(metadata, "views", dict[str, WireView]).items()
        ),
        replicas=_nested(metadata, "replicas", dict[str, Size]),
        tree=_nested(metadata, "tree"),
        digests=_digests(metadata[f"{KEYS}digests"], blocks.count),
        stored_nbytes=stored,
        methods=None if stored is None else _methods(metadata.get(f"{KEYS}methods"), stored, blocks),
        own=_own(metadata.get(f"{KEYS}own")),
        header_nbytes=nbytes,
    )
    header.validate()
    if header.own is not None and len(header.own) != OWN_DIGITS * len(header.own_entries):
        raise ValueError(f"{KEYS}own is not a digest for each whole tensor")
    return header


def _nested(metadata: dict[str, str], key: str, type: Any = Any) -> Any:
    try:
        return strict_json.loads(metadata[f"{KEYS}{key}"], type)
    except ValueError as error:
        raise ValueError(f"{KEYS}{key}: {error}") from None


def _tensors(
    entries: dict[str, Any], extras: dict[str, WireExtra], data_nbytes: int
) -> tuple[TensorEntry, ...]:
    tensors = []
    at = pads = 0
    none = WireExtra()
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


def _chunk(name: str, shape: tuple[int, ...], extra: WireExtra | WireView) -> Chunk | None:
    if extra.global_shape is None or extra.offsets is None:
        if extra.global_shape is not None or extra.offsets is not None or extra.flat_of is not None:
            raise ValueError(f"tensor {name!r}: global_shape and offsets go together")
        return None
    return Chunk(extra.global_shape, extra.offsets, shape, extra.flat_of)


def _digests(text: str, count: int) -> bytes:
    if not is_lower_hex(text, 2 * DIGEST_NBYTES * count):
        raise ValueError(f"{KEYS}digests is not {count} digests")
    return bytes.fromhex(text)


def _own(text: str | None) -> bytes | None:
    if text is not None and not is_lower_hex(text, len(text)):
        raise ValueError(f"{KEYS}own is not hexadecimal")
    return None if text is None else text.encode()


def _stored(text: str, blocks: BlockTable) -> tuple[int, ...]:
    if not is_lower_hex(text, STORED_DIGITS * blocks.count):
        raise ValueError(f"{KEYS}stored is not {blocks.count} lengths")
    lengths = tuple(int(text[at : at + STORED_DIGITS], 16) for at in range(0, len(text), STORED_DIGITS))
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
        raise ValueError(f"{KEYS}methods is not {blocks.count} known methods")
    for i, (method, n, whole) in enumerate(zip(text, stored, lengths, strict=True)):
        if (method == AS_IT_IS) != (n == whole):
            raise ValueError(f"block {i} of {whole} bytes, stored in {n}, cannot be of method {method}")
    return text
