"""Writes small complete checkpoints with the format and storage layers only, so that readers are tested
without the engine's own writer.

`write_checkpoint(root, step)` is enough for most tests; `content` gives full control of what each rank holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckptengine.codecs.block import pack_into
from ckptengine.format import dtypes
from ckptengine.format.blocks import AS_IT_IS, PLANES, ZSTD
from ckptengine.format.digest import digest, hexdigest
from ckptengine.format.geometry import Chunk
from ckptengine.format.index import build_index
from ckptengine.format.layout import PAD_PREFIX, lay_out
from ckptengine.format.limits import PAGE, round_up
from ckptengine.format.manifest import IndexRef, Manifest, ShardRef, decode_manifest, encode_manifest
from ckptengine.format.names import INDEX_NAME, MANIFEST_NAME, AttemptId, RunId, shard_filename, step_dirname
from ckptengine.format.shard import (
    ShardHeader,
    TensorEntry,
    ViewEntry,
    decode_header,
    encode_header,
    seal_header,
)

RUN = RunId(1, 0x18C0DE000000, "0123abcd")


@dataclass
class Tensor:
    """What a rank stores: the bytes of one tensor or chunk, in C order."""

    name: str
    array: np.ndarray
    chunk: Chunk | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    placement: str | None = None
    kind: str | None = None
    descr: Any = None


@dataclass
class RankContent:
    """One rank's shard: tensors, views onto them, replicas of other ranks' tensors, and the tree.

    Without `tree`, it is `{"model": {name: leaf}, **values}` in leaf order.
    """

    tensors: list[Tensor] = field(default_factory=list)
    views: list[ViewEntry] = field(default_factory=list)
    replicas: dict[str, int] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    tree: Any = None


def sample_content(rank: int, ranks: int) -> RankContent:
    """The default: a matrix split by rows, a flat parameter split unevenly, a tied view, a scalar, an empty
    tensor, a replicated tensor that rank 0 stores, a tensor of each rank's own, and values of several
    kinds."""
    whole = np.arange(8 * ranks * 96, dtype=np.float32).reshape(8 * ranks, 96)
    rows = whole[8 * rank : 8 * rank + 8]
    flat = np.arange(30 * 41, dtype=np.float64)
    cuts = [round(i * flat.size / ranks) + (7 if 0 < i < ranks else 0) for i in range(ranks + 1)]
    part = flat[cuts[rank] : cuts[rank + 1]]
    bias = np.arange(33, dtype=np.int16)
    content = RankContent(
        tensors=[
            Tensor("embed.weight", rows, Chunk(whole.shape, (8 * rank, 0), rows.shape), placement="Shard(0)"),
            Tensor("flat", part, Chunk((flat.size,), (cuts[rank],), part.shape, flat_of=(30, 41))),
            Tensor("own", np.full(5 + rank, rank, dtype=np.uint8)),
            Tensor("rank0.scalar", np.array(1.5, dtype=np.float32)),
            Tensor("empty", np.zeros((0, 3), dtype=np.float16)),
        ],
        values={
            "step": 7,
            "lr": 0.125,
            "name": "sample",
            "none": None,
            "rank": rank,
            "betas": {"$": "tuple", "v": [0.9, 0.95]},
            "groups": [{"decay": True}, {"decay": False}],
        },
    )
    content.views = [
        ViewEntry(
            name="head.weight",
            of="embed.weight",
            byte_offset=0,
            dtype="float32",
            shape=rows.shape,
            stride=None,
            chunk=Chunk(whole.shape, (8 * rank, 0), rows.shape),
            placement="Shard(0)",
        )
    ]
    if rank == 0:
        content.tensors.append(Tensor("bias", bias))
    else:
        content.replicas["bias"] = 0
        content.tensors = [tensor for tensor in content.tensors if not tensor.name.startswith("rank0.")]
    return content


def split_content(tensors: Mapping[str, np.ndarray]) -> Callable[[int, int], RankContent]:
    """Each array split over the ranks by its first dimension, as evenly as it goes; 0-d ones are on rank 0,
    the other ranks hold replicas."""

    def content(rank: int, ranks: int) -> RankContent:
        made = RankContent()
        for name, array in tensors.items():
            if array.ndim:
                cuts = [i * len(array) // ranks for i in range(ranks + 1)]
                part = array[cuts[rank] : cuts[rank + 1]]
                chunk = Chunk(array.shape, (cuts[rank], *(0,) * (array.ndim - 1)), part.shape)
                made.tensors.append(Tensor(name, part, None if ranks == 1 else chunk))
            elif rank == 0:
                made.tensors.append(Tensor(name, array))
            else:
                made.replicas[name] = 0
        return made

    return content


def write_checkpoint(
    root: str | Path,
    step: int,
    *,
    ranks: int = 2,
    codec: str = "raw",
    block_nbytes: int = 4096,
    tensors: Mapping[str, np.ndarray] | None = None,
    content: Callable[[int, int], RankContent] | None = None,
    metadata: Any = None,
    save: int = 1,
    retry: int = 0,
    index: bool = True,
    commit: bool = True,
    created: float = 1_700_000_000.0,
) -> Path:
    """Writes `<root>/step-…` and returns its path. `tensors`: see `split_content`; without it,
    `sample_content`.

    `commit=False` leaves the manifest out. Several calls with other `save`s make several attempts at one
    step.
    """
    make = content or (split_content(tensors) if tensors is not None else sample_content)
    attempt = str(AttemptId(RUN, save, retry))
    step_path = Path(root) / step_dirname(step)
    (step_path / attempt).mkdir(parents=True)
    refs, headers = [], []
    for rank in range(ranks):
        relative = f"{attempt}/{shard_filename(rank, compressed=codec == 'zstd')}"
        data, header = shard_bytes(
            make(rank, ranks),
            attempt=attempt,
            step=step,
            rank=rank,
            ranks=ranks,
            codec=codec,
            block_nbytes=block_nbytes,
        )
        (step_path / relative).write_bytes(data)
        headers.append(header)
        refs.append(
            ShardRef(rank, relative, len(data), header.header_nbytes, hexdigest(data[: header.header_nbytes]))
        )
    index_data = build_index(headers)
    if index:
        (step_path / INDEX_NAME).write_bytes(index_data)
    manifest = Manifest(
        step=step,
        attempt=attempt,
        run=str(RUN),
        world_size=ranks,
        created=created,
        codec=codec,  # type: ignore[arg-type]
        block_nbytes=block_nbytes,
        nbytes=sum(ref.size for ref in refs),
        tensors=sum(len(header.tensors) for header in headers),
        metadata={"note": "written by a test"} if metadata is None else metadata,
        shards=tuple(refs),
        index=IndexRef(len(index_data), hexdigest(index_data)) if index else None,
    )
    if commit:
        (step_path / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return step_path


def read_manifest(step_path: str | Path) -> Manifest:
    path = Path(step_path) / MANIFEST_NAME
    return decode_manifest(path.read_bytes(), path=os.fspath(path))


def rewrite_manifest(step_path: str | Path, **changes: Any) -> None:
    """Replaces fields of a manifest, as a hostile or buggy writer would: its own digest is right again."""
    manifest = replace(read_manifest(step_path), **changes)
    (Path(step_path) / MANIFEST_NAME).write_bytes(encode_manifest(manifest))


def rewrite_shard(step_path: str | Path, rank: int, **changes: Any) -> None:
    """Replaces fields of a shard's header and the reference to it; every digest is right again."""
    manifest = read_manifest(step_path)
    ref = manifest.shards[rank]
    path = Path(step_path) / ref.path
    data = path.read_bytes()
    old = decode_header(data[: ref.header_nbytes], path=ref.path)
    new = replace(old, **changes)
    digests = [new.block_digest(i) for i in range(new.blocks.count)]
    sealed = seal_header(encode_header(new), digests, new.stored_nbytes, new.methods)
    path.write_bytes(sealed + data[ref.header_nbytes :])
    size = len(sealed) + len(data) - ref.header_nbytes
    refs = list(manifest.shards)
    refs[rank] = replace(ref, size=size, header_nbytes=len(sealed), header_digest=hexdigest(sealed))
    rewrite_manifest(step_path, shards=tuple(refs), nbytes=sum(one.size for one in refs))


def shard_bytes(
    content: RankContent,
    *,
    attempt: str = f"{RUN}-000001.0",
    step: int = 1,
    rank: int = 0,
    ranks: int = 1,
    codec: str = "raw",
    block_nbytes: int = 4096,
) -> tuple[bytes, ShardHeader]:
    """One shard file, and its header as a reader decodes it (with digests and stored lengths)."""
    arrays = {tensor.name: np.ascontiguousarray(tensor.array) for tensor in content.tensors}
    placed, data_nbytes = lay_out(
        [(t.name, arrays[t.name].nbytes, dtypes.alignment(_dtype(t))) for t in content.tensors]
    )
    data = bytearray(data_nbytes)
    spans = {}
    for name, start, stop in placed:
        if not name.startswith(PAD_PREFIX):
            data[start:stop] = arrays[name].tobytes()
            spans[name] = (start, stop)
    entries = tuple(
        TensorEntry(
            name=t.name,
            dtype=_dtype(t),
            shape=t.array.shape if t.shape is None else t.shape,
            start=spans[t.name][0],
            stop=spans[t.name][1],
            chunk=t.chunk,
            stride=t.stride,
            placement=t.placement,
            kind=t.kind,
            descr=t.descr,
        )
        for t in content.tensors
    )
    names = [t.name for t in content.tensors] + [v.name for v in content.views] + list(content.replicas)
    tree = content.tree
    if tree is None:
        tree = {"model": {name: {"$": "t", "i": i} for i, name in enumerate(names)}, **content.values}
    blocks = [bytes(data[at : at + block_nbytes]) for at in range(0, data_nbytes, block_nbytes)]
    stored, methods = blocks, AS_IT_IS * len(blocks)
    if codec == "zstd":
        # By turns, so that every checkpoint has all that can be.
        by_turns = (ZSTD, *PLANES.values())
        packed = [_packed(block, by_turns[i % len(by_turns)]) for i, block in enumerate(blocks)]
        stored = [frame or block for frame, block in zip(packed, blocks, strict=True)]
        methods = "".join(
            AS_IT_IS if frame is None else by_turns[i % len(by_turns)] for i, frame in enumerate(packed)
        )
    header = ShardHeader(
        run=attempt.rsplit("-", 1)[0],
        attempt=attempt,
        step=step,
        rank=rank,
        world_size=ranks,
        codec=codec,  # type: ignore[arg-type]
        block_nbytes=block_nbytes,
        data_nbytes=data_nbytes,
        tensors=entries,
        views=tuple(content.views),
        replicas=dict(content.replicas),
        tree=tree,
        digests=b"".join(digest(block) for block in blocks),
        stored_nbytes=tuple(len(block) for block in stored) if codec == "zstd" else None,
        methods=methods if codec == "zstd" else None,
        header_nbytes=0,
    )
    template = encode_header(header)
    sealed = seal_header(
        template,
        [digest(block) for block in blocks],
        list(header.stored_nbytes) if header.stored_nbytes else None,
        header.methods,
    )
    file = bytearray(sealed)
    for block in stored:
        file += block
        file += bytes(round_up(len(block), PAGE) - len(block))
    return bytes(file), replace(header, header_nbytes=len(sealed))


def _packed(block: bytes, method: str) -> bytes | None:
    out = memoryview(bytearray(len(block)))
    nbytes = pack_into(out, memoryview(block), method, 1)
    return None if nbytes is None else bytes(out[:nbytes])


def _dtype(tensor: Tensor) -> str:
    if tensor.dtype is not None:
        return tensor.dtype
    name = tensor.array.dtype.name
    assert dtypes.is_known(name), name
    return name


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    """Flips bits of one byte of a file, in place; the same call again undoes it."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
