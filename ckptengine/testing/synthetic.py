"""Steps of as many ranks as one likes, made in no time: what grows with the world shows on a laptop.

Only the shards that are asked for are written. The manifest and INDEX are those of the whole world.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ckptengine.format.columns import IndexBuilder, ShardColumns, columns_of
from ckptengine.format.digest import digest, hexdigest
from ckptengine.format.entries import ShardHeader, TensorEntry
from ckptengine.format.geometry import Chunk
from ckptengine.format.index import encode_index
from ckptengine.format.limits import PAGE, round_up
from ckptengine.format.manifest import IndexRef, Manifest, ShardRef, encode_manifest
from ckptengine.format.names import INDEX_NAME, MANIFEST_NAME, AttemptId, RunId, shard_filename, step_dirname
from ckptengine.format.per_rank import OWN_DIGITS
from ckptengine.format.shard import encode_header, seal_header

_COLUMNS = 64
_CREATED_MS = 0x18C0DE000000


@dataclass(frozen=True, slots=True)
class World:
    """What is saved: `tensors` float32 matrices, of each of which every rank holds `rows` rows of 64.

    sharded: they are parts of global tensors; else each is a tensor of the rank's own. Every element is the
    rank that holds it. Besides, each rank has a value of its own, and the last rank a tensor that no other
    has.
    """

    ranks: int
    tensors: int = 500
    rows: int = 1
    sharded: bool = True
    step: int = 1000
    block_nbytes: int = 16 << 20

    @property
    def names(self) -> list[str]:
        """The tensors that every rank holds or has a part of, in the order of the shards."""
        return [f"model.layers.{i // 8}.block.{i % 8}.weight" for i in range(self.tensors)]

    @property
    def last(self) -> str:
        """The tensor of the last rank only."""
        return "tail.bias"

    @property
    def attempt(self) -> AttemptId:
        return AttemptId(RunId(1, _CREATED_MS, "5eed5eed"), self.step)

    def header(self, rank: int) -> ShardHeader:
        """A rank's header, without digests."""
        shape, whole = (self.rows, _COLUMNS), (self.rows * self.ranks, _COLUMNS)
        nbytes = 4 * self.rows * _COLUMNS
        chunk = Chunk(whole, (self.rows * rank, 0), shape) if self.sharded else None
        entries = [
            TensorEntry(name, "float32", shape, i * nbytes, (i + 1) * nbytes, chunk)
            for i, name in enumerate(self.names)
        ]
        if rank == self.ranks - 1:
            at = len(entries) * nbytes
            entries.append(TensorEntry(self.last, "float32", (_COLUMNS,), at, at + 4 * _COLUMNS))
        return ShardHeader(
            run=str(self.attempt.run),
            attempt=str(self.attempt),
            step=self.step,
            rank=rank,
            world_size=self.ranks,
            codec="raw",
            block_nbytes=self.block_nbytes,
            data_nbytes=round_up(entries[-1].stop, PAGE),
            tensors=tuple(entries),
            tree={
                "tensors": {entry.name: {"$": "t", "i": i} for i, entry in enumerate(entries)},
                "rank": rank,
            },
            own=b"",
        )

    def columns(self) -> Iterable[ShardColumns]:
        """What INDEX holds of each rank, without making every rank's header."""
        first = columns_of(self.header(0))
        assert first.values is not None
        tree = first.values.tree.removesuffix(b"0}")
        starts = first.offsets.copy()
        if self.sharded:
            starts[::2] += self.rows
        for rank in range(self.ranks - 1):
            offsets = first.offsets + rank * (starts - first.offsets)
            own = f"{rank:0{OWN_DIGITS}x}".encode() * len(first.values.own)
            values = replace(first.values, tree=tree + f"{rank}}}".encode(), digests=own)
            yield replace(first, rank=rank, offsets=offsets, names=list(first.names), values=values)
        yield columns_of(self.header(self.ranks - 1))

    def index(self) -> bytes:
        """INDEX of all ranks."""
        builder = IndexBuilder()
        for columns in self.columns():
            builder.add(columns)
        return encode_index(builder)


def shard_file(world: World, rank: int) -> tuple[bytes, bytes]:
    """A rank's header, and its data section."""
    import numpy as np

    header = world.header(rank)
    data = np.zeros(header.data_nbytes // 4, np.float32)
    data[: header.tensors[-1].stop // 4] = rank
    section = data.tobytes()
    spans = (header.blocks.span(i) for i in range(header.blocks.count))
    digests = [digest(section[start:stop]) for start, stop in spans]
    own = "".join(hexdigest(section[e.start : e.stop])[:OWN_DIGITS] for e in header.own_entries)
    return seal_header(encode_header(header), digests, own=own), section


def write_step(
    root: str | Path, world: World, *, shards: Iterable[int] | None = None, index: bool = True
) -> str:
    """Write a committed step below `root`, and return its path.

    shards: the ranks whose files are written, all by default. The manifest names those of the other ranks
    with a digest that no file has.
    """
    path = Path(root, step_dirname(world.step))
    (path / str(world.attempt)).mkdir(parents=True)
    header, section = shard_file(world, 0)
    missing = ShardRef(0, "", len(header) + len(section), len(header), "0" * 32)
    refs = [
        replace(missing, rank=rank, path=f"{world.attempt}/{shard_filename(rank, compressed=False)}")
        for rank in range(world.ranks)
    ]
    for rank in range(world.ranks) if shards is None else shards:
        header, section = shard_file(world, rank)
        (path / refs[rank].path).write_bytes(header + section)
        refs[rank] = replace(
            refs[rank],
            size=len(header) + len(section),
            header_nbytes=len(header),
            header_digest=hexdigest(header),
        )
    packed = world.index() if index else None
    if packed is not None:
        (path / INDEX_NAME).write_bytes(packed)
    manifest = Manifest(
        step=world.step,
        attempt=str(world.attempt),
        run=str(world.attempt.run),
        world_size=world.ranks,
        created=_CREATED_MS / 1000,
        codec="raw",
        block_nbytes=world.block_nbytes,
        nbytes=sum(ref.size for ref in refs),
        tensors=world.tensors + 1,
        metadata=None,
        shards=tuple(refs),
        index=None if packed is None else IndexRef(len(packed), hexdigest(packed)),
    )
    (path / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return str(path)
