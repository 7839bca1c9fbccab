"""Small, valid examples of each part of the format, and the pieces hostile ones are made of."""

from __future__ import annotations

from dataclasses import replace

from ckptengine.format.digest import DIGEST_NBYTES, digest
from ckptengine.format.geometry import Chunk
from ckptengine.format.index import build_index
from ckptengine.format.manifest import IndexRef, Manifest, ShardRef, encode_manifest
from ckptengine.format.names import AttemptId, RunId, shard_filename
from ckptengine.format.shard import (
    ShardHeader,
    TensorEntry,
    ViewEntry,
    decode_header,
    encode_header,
    seal_header,
)

RUN = RunId(life=3, created_ms=1_700_000_000_000, nonce="0badf00d")
ATTEMPT = AttemptId(RUN, save=12)
STEP = 1000


def shard_header(*, rank: int = 0, codec: str = "raw") -> ShardHeader:
    """A header with everything: chunks, a flat chunk, pads, bytes for a dtype, views, a replica, values."""
    tensors = (
        TensorEntry(
            "embed.weight", "bfloat16", (4, 8), 0, 64, Chunk((8, 8), (4 * rank, 0), (4, 8)), None, "Shard(0)"
        ),
        TensorEntry("flat", "float32", (5,), 64, 84, Chunk((12,), (5 * rank,), (5,), flat_of=(3, 4))),
        TensorEntry("channels_last", "float32", (1, 2, 3, 4), 96, 192, stride=(24, 1, 8, 2)),
        TensorEntry("fourier", "complex128", (2, 2), 192, 256),
        TensorEntry("empty", "float32", (0, 7), 256, 256),
        TensorEntry("scalar", "int64", (), 256, 264),
        TensorEntry(
            "table",
            "uint8",
            (16,),
            272,
            288,
            kind="ndarray",
            descr=[[["a", "<f4"], ["b", "<f4"]], [2], False],
        ),
        TensorEntry("blob", "uint8", (9000,), 288, 9288, kind="bytes"),
    )
    views = (
        ViewEntry(
            "head.weight", "embed.weight", 0, "bfloat16", (4, 8), None, Chunk((8, 8), (4 * rank, 0), (4, 8))
        ),
        ViewEntry("transposed", "embed.weight", 0, "bfloat16", (8, 4), (1, 8)),
    )
    return ShardHeader(
        run=str(RUN),
        attempt=str(ATTEMPT),
        step=STEP,
        rank=rank,
        world_size=2,
        codec="zstd" if codec == "zstd" else "raw",
        block_nbytes=4096,
        data_nbytes=12288,
        tensors=tensors,
        views=views,
        replicas={"norm.weight": 1 - rank},
        tree={
            "model": {"embed.weight": {"$": "t", "i": 0}, "norm.weight": {"$": "t", "i": 10}},
            "betas": {"$": "tuple", "v": [0.9, 0.999]},
            "name": "größe",
        },
    )


def shard_data() -> bytes:
    """A data section for `shard_header`."""
    return bytes(range(256)) * 48


def sealed_header(*, rank: int = 0, codec: str = "raw") -> bytes:
    """The bytes of `shard_header`, with the digests of `shard_data`."""
    header = shard_header(rank=rank, codec=codec)
    data = shard_data()
    spans = [header.blocks.span(i) for i in range(header.blocks.count)]
    digests = [digest(data[start:stop]) for start, stop in spans]
    if codec == "raw":
        return seal_header(encode_header(header), digests)
    return seal_header(encode_header(header), digests, [300, 4096, 5], "102")


def plain_header(codec: str = "raw") -> bytes:
    """The smallest header that says something: one whole tensor of one rank, one block."""
    header = replace(
        shard_header(codec=codec),
        world_size=1,
        block_nbytes=16 << 20,
        data_nbytes=4096,
        tensors=(TensorEntry("weight", "float32", (1024,), 0, 4096),),
        views=(),
        replicas={},
        tree={"weight": {"$": "t", "i": 0}},
    )
    stored, methods = ([17], "4") if codec == "zstd" else (None, None)
    return seal_header(encode_header(header), [digest(bytes(4096))], stored, methods)


def plain_manifest() -> bytes:
    """The smallest manifest: one rank, no metadata, no index."""
    whole = manifest()
    shard = whole.shards[0]
    return encode_manifest(
        replace(whole, world_size=1, shards=(shard,), nbytes=shard.size, metadata=None, index=None)
    )


def plain_index() -> bytes:
    return build_index([decode_header(plain_header(), path="")])


def manifest() -> Manifest:
    shards = tuple(
        ShardRef(rank, f"{ATTEMPT}/{shard_filename(rank, compressed=False)}", 16384, 4096, f"{rank:032x}")
        for rank in range(2)
    )
    return Manifest(
        step=STEP,
        attempt=str(ATTEMPT),
        run=str(RUN),
        world_size=2,
        created=1_700_000_123.25,
        codec="raw",
        block_nbytes=4096,
        nbytes=32768,
        tensors=11,
        metadata={"note": "a “quoted”\nnote", "loss": 1.5, "nested": {"list": [1, None, True]}},
        shards=shards,
        index=IndexRef(345, "f" * 2 * DIGEST_NBYTES),
    )


def manifest_bytes() -> bytes:
    return encode_manifest(manifest())


def index_bytes() -> bytes:
    return build_index([shard_header(rank=0), shard_header(rank=1)])
