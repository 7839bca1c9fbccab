"""What does MANIFEST.json say? The file whose presence is the commit and whose digest is the fingerprint."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, Literal

import msgspec

from ckptengine.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptengine.format import strict_json
from ckptengine.format.digest import DIGEST_NBYTES, hexdigest, is_lower_hex
from ckptengine.format.limits import (
    INT64_MAX,
    MAX_HEADER_NBYTES,
    MAX_INDEX_NBYTES,
    MAX_MANIFEST_NBYTES,
    PAGE,
    round_up,
)
from ckptengine.format.names import RAW_SUFFIX, ZSTD_SUFFIX, AttemptId, check_relative_path
from ckptengine.format.tree import check_tree

_FORMAT = "ckptengine"
_VERSION = 1
_FEATURES: frozenset[str] = frozenset()
_ENDING = b',\n  "digest": "', b'"\n}\n'
_ENDING_NBYTES = len(_ENDING[0]) + 2 * DIGEST_NBYTES + len(_ENDING[1])

Size = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]


@dataclass(frozen=True, slots=True)
class ShardRef:
    """One rank's shard: its path below the step directory, its size, and its header's size and digest."""

    rank: int
    path: str
    size: int
    header_nbytes: int
    header_digest: str


@dataclass(frozen=True, slots=True)
class IndexRef:
    """The INDEX that belongs to the commit."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed checkpoint.

    created: Unix seconds. nbytes: of all shard files. tensors: of all ranks. metadata: the user's, as a tree
    without tensors. features: what a reader must know beyond version 1. fingerprint: the manifest's own
    digest, once encoded.
    """

    step: int
    attempt: str
    run: str
    world_size: int
    created: float
    codec: Literal["raw", "zstd"]
    block_nbytes: int
    nbytes: int
    tensors: int
    metadata: Any
    shards: tuple[ShardRef, ...]
    index: IndexRef | None
    features: tuple[str, ...] = ()
    fingerprint: str = ""

    def validate(self) -> None:
        """Raise `ValueError` unless the manifest keeps every rule of the format."""
        attempt = AttemptId.parse(self.attempt)
        if str(attempt.run) != self.run:
            raise ValueError(f"attempt {self.attempt} is not of run {self.run}")
        if not 0 <= self.step <= INT64_MAX:
            raise ValueError(f"step {self.step} is out of range")
        if not isfinite(self.created):
            raise ValueError(f"created at {self.created}")
        if self.codec not in ("raw", "zstd"):
            raise ValueError(f"unknown codec {self.codec!r}")
        if self.block_nbytes <= 0 or self.block_nbytes % PAGE:
            raise ValueError(f"block_nbytes is not a positive multiple of {PAGE}: {self.block_nbytes}")
        # The count first: a list of as many ranks as a hostile world_size says would not fit into memory.
        if not 0 < self.world_size == len(self.shards) or any(
            shard.rank != rank for rank, shard in enumerate(self.shards)
        ):
            raise ValueError(
                f"{len(self.shards)} shards, not one for each of {self.world_size} ranks, in order"
            )
        for shard in self.shards:
            self._validate_shard(shard)
        if len({shard.path for shard in self.shards}) != self.world_size:
            raise ValueError("two ranks have the same shard")
        if self.nbytes != sum(shard.size for shard in self.shards):
            raise ValueError(f"nbytes {self.nbytes} is not the sum of the shards' sizes")
        if self.tensors < 0:
            raise ValueError(f"{self.tensors} tensors")
        if self.index is not None and not (
            0 < self.index.size <= MAX_INDEX_NBYTES and is_lower_hex(self.index.digest, 2 * DIGEST_NBYTES)
        ):
            raise ValueError("malformed reference to the index")
        try:
            check_tree(self.metadata, 0)
        except ValueError as error:
            raise ValueError(f"metadata: {error}") from None

    def _validate_shard(self, shard: ShardRef) -> None:
        try:
            check_relative_path(shard.path)
        except CorruptCheckpointError as error:
            raise ValueError(error.message) from None
        suffix = ZSTD_SUFFIX if self.codec == "zstd" else RAW_SUFFIX
        if not shard.path.startswith(f"{self.attempt}/") or not shard.path.endswith(suffix):
            raise ValueError(
                f"the shard of rank {shard.rank} is not a {suffix} file of attempt {self.attempt}"
            )
        if (
            not 0 < shard.header_nbytes <= round_up(MAX_HEADER_NBYTES, PAGE)
            or shard.header_nbytes % PAGE
            or not shard.header_nbytes <= shard.size <= INT64_MAX
            or shard.size % PAGE
        ):
            raise ValueError(
                f"the shard of rank {shard.rank} cannot be {shard.size} = {shard.header_nbytes} + … bytes"
            )
        if not is_lower_hex(shard.header_digest, 2 * DIGEST_NBYTES):
            raise ValueError(f"malformed header digest of rank {shard.rank}")


class _Shard(msgspec.Struct, forbid_unknown_fields=True):
    rank: Size
    path: str
    size: Size
    header_nbytes: Size
    header_digest: str


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    size: Size
    digest: str


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON object, in the order of its text."""

    format: Literal["ckptengine"]
    version: Literal[1]
    features: tuple[str, ...]
    step: Size
    attempt: str
    run: str
    world_size: Size
    created: float
    codec: Literal["raw", "zstd"]
    block_nbytes: Size
    nbytes: Size
    tensors: Size
    metadata: Any
    index: _Index | None
    shards: tuple[_Shard, ...]
    digest: str


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's text, ending with its digest. `ValueError` if it breaks a rule of the format."""
    manifest.validate()
    if not _FEATURES.issuperset(manifest.features):
        raise ValueError(f"unknown features {manifest.features}")
    fields = []
    for name in _Manifest.__struct_fields__[:-1]:
        if name == "format":
            text = f'"{_FORMAT}"'
        elif name == "version":
            text = str(_VERSION)
        elif name == "metadata":
            # No string in JSON text holds a raw newline, so indenting the lines leaves the value alone.
            text = msgspec.json.format(msgspec.json.encode(manifest.metadata), indent=2).decode()
            text = text.replace("\n", "\n  ")
        elif name == "shards":
            text = "[\n" + ",\n".join(f"    {_spaced(shard)}" for shard in manifest.shards) + "\n  ]"
        else:
            text = _spaced(getattr(manifest, name))
        fields.append(f'  "{name}": {text}')
    body = ("{\n" + ",\n".join(fields)).encode()
    data = body + _ENDING[0] + hexdigest(body).encode() + _ENDING[1]
    if len(data) > MAX_MANIFEST_NBYTES:
        raise ValueError(
            f"the manifest needs {len(data)} bytes, more than {MAX_MANIFEST_NBYTES}: metadata is too large"
        )
    return data


def decode_manifest(data: bytes, *, path: str) -> Manifest:
    """The manifest that `data` encodes, its fingerprint filled in.

    Every malformation is a `CorruptCheckpointError`; a newer version or an unknown feature an
    `UnsupportedFormatError`.
    """
    try:
        if len(data) > MAX_MANIFEST_NBYTES:
            raise ValueError(f"{len(data)} bytes, more than {MAX_MANIFEST_NBYTES}")
        value = strict_json.loads(data)
        _check_support(value, path)
        # The digest first: damage should be called damage, not by the rule it happens to break.
        fingerprint = _check_digest(data)
        raw = msgspec.convert(value, _Manifest)
        manifest = Manifest(
            step=raw.step,
            attempt=raw.attempt,
            run=raw.run,
            world_size=raw.world_size,
            created=float(raw.created),
            codec=raw.codec,
            block_nbytes=raw.block_nbytes,
            nbytes=raw.nbytes,
            tensors=raw.tensors,
            metadata=raw.metadata,
            shards=tuple(
                ShardRef(shard.rank, shard.path, shard.size, shard.header_nbytes, shard.header_digest)
                for shard in raw.shards
            ),
            index=IndexRef(raw.index.size, raw.index.digest) if raw.index is not None else None,
            features=raw.features,
            fingerprint=fingerprint,
        )
        manifest.validate()
    except ValueError as error:
        raise CorruptCheckpointError(
            f"malformed manifest: {error}", path=path, hint="restore an earlier step"
        ) from error
    return manifest


def _spaced(value: Any) -> str:
    """JSON on one line, with spaces after separators, as people like it."""
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _check_support(value: Any, path: str) -> None:
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise ValueError("not a manifest of ckptengine")
    version, features = value.get("version"), value.get("features")
    problem = None
    if type(version) is int and version > _VERSION:
        problem = f"format version {version}; this version reads {_VERSION}"
    elif isinstance(features, list) and all(isinstance(name, str) for name in features):
        unknown = sorted(set(features) - _FEATURES)
        if unknown:
            problem = f"it needs features this version lacks: {', '.join(unknown)}"
    if problem is not None:
        raise UnsupportedFormatError(
            f"cannot read this checkpoint: {problem}", path=path, hint="install a newer version of ckptengine"
        )


def _check_digest(data: bytes) -> str:
    body, ending = data[:-_ENDING_NBYTES], data[-_ENDING_NBYTES:]
    fingerprint = hexdigest(body)
    if ending != _ENDING[0] + fingerprint.encode() + _ENDING[1]:
        raise ValueError("its text and its own digest differ")
    return fingerprint
