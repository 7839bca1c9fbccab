"""What is a shard's header made of, as JSON has it? A safetensors header, whose metadata hold what
safetensors has no words for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ckptengine.format.limits import INT64_MAX

PREFIX_NBYTES = 16
"""How much of a shard `header_nbytes` needs to see."""

VERSION = 1
MAGIC = b"CKPTZ\0\0"
ZSTD_MAGIC = MAGIC + bytes([VERSION])
STORED_DIGITS = 8
PER_BLOCK = (("stored", STORED_DIGITS), ("methods", 1))
"""What a compressed shard says of each block beside its digest, in so many characters."""
KEYS = "ckptengine."

Size = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
Sizes = tuple[Size, ...]


class WireTensor(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A tensor as safetensors has it."""

    dtype: str
    shape: Sizes
    data_offsets: tuple[Size, Size]


class WireExtra(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
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


class WireView(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    of: str
    byte_offset: Size
    dtype: str
    shape: Sizes
    stride: Sizes | None = None
    global_shape: Sizes | None = None
    offsets: Sizes | None = None
    flat_of: Sizes | None = None
    placement: str | None = None


class WireShard(msgspec.Struct, forbid_unknown_fields=True):
    run: str
    attempt: str
    step: Size
    rank: Size
    world_size: Size
    codec: Literal["raw", "zstd"]
    block_nbytes: Size
    data_nbytes: Size
