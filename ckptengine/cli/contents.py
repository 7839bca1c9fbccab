"""Which tensors does a path hold: a checkpoint's, or those of one shard file?"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptengine.catalog.catalog import read_manifest, resolve
from ckptengine.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ckptengine.format.digest import hexdigest
from ckptengine.format.entries import ShardHeader, TensorEntry, ViewEntry
from ckptengine.format.names import MANIFEST_NAME
from ckptengine.format.shard import PREFIX_NBYTES, decode_header, header_nbytes
from ckptengine.read.shards import open_header, shard_path
from ckptengine.read.tensors import HeaderTensors, StepTensors, Tensors
from ckptengine.read.world import Piece

if TYPE_CHECKING:
    from ckptengine.format.manifest import Manifest
    from ckptengine.storage.store import Store


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor as the table shows it. entry: what the header of the first rank that holds it says."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    entry: TensorEntry | ViewEntry | None

    @property
    def ranks(self) -> set[int]:
        return {piece.rank for piece in self.pieces}

    @property
    def nbytes(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def placement(self) -> str | None:
        if self.entry is not None and self.entry.placement is not None:
            return self.entry.placement
        return "flat" if self.pieces and self.pieces[0].chunk.flat_of is not None else None


@dataclass
class Contents:
    """An opened path.

    manifest: the step's; for a shard file None unless that commit names it. shard: the header, where the
    path is a shard file: then only that rank's part is known.
    """

    path: str
    step_path: str
    manifest: Manifest | None
    shard: ShardHeader | None
    tensors: Tensors
    header: Callable[[int], ShardHeader]
    _entries: dict[int, dict[str, TensorEntry | ViewEntry]] = field(default_factory=dict)

    @property
    def ranks(self) -> Sequence[int]:
        if self.shard is not None:
            return [self.shard.rank]
        assert self.manifest is not None
        return range(self.manifest.world_size)

    def file(self, rank: int) -> str:
        """The path of a rank's shard."""
        if self.shard is not None:
            return self.path
        assert self.manifest is not None
        return shard_path(self.step_path, self.manifest.shards[rank])

    def file_name(self, rank: int) -> str:
        """The same, relative to the step's directory."""
        return os.path.relpath(self.file(rank), self.step_path)

    def row(self, name: str) -> Row | None:
        """A listed tensor; or else a large value kept under that name, found by asking rank by rank."""
        pieces = tuple(self.tensors.pieces(name))
        if pieces:
            first = pieces[0]
            entry = self._entry(first.rank, name)
            return Row(name, first.dtype, first.chunk.tensor_shape, pieces, entry)
        for rank in self.ranks:
            entry = self._entry(rank, name)
            if entry is not None:
                return Row(name, entry.dtype, entry.shape, (), entry)
        return None

    def _entry(self, rank: int, name: str) -> TensorEntry | ViewEntry | None:
        if rank not in self._entries:
            header = self.header(rank)
            entries: list[TensorEntry | ViewEntry] = [*header.tensors, *header.views]
            self._entries[rank] = {entry.name: entry for entry in entries}
        return self._entries[rank].get(name)


def open_contents(store: Store, path: str) -> Contents:
    """path: a root (its newest committed step), a step's directory, its manifest, or one shard file."""
    if os.path.isfile(path) and os.path.basename(path) != MANIFEST_NAME:
        return _open_shard(store, path)
    _, step_path = resolve(store, path)
    manifest = read_manifest(store, step_path)
    header = _HeadersOnDemand(store, step_path, manifest)
    tensors = StepTensors(
        store, step_path, manifest, lambda: [header(rank) for rank in range(manifest.world_size)]
    )
    return Contents(step_path, step_path, manifest, None, tensors, header)


def not_found(contents: Contents, name: str) -> CheckpointNotFoundError:
    """No tensor has this name; names like it are in the hint."""
    from difflib import get_close_matches

    if contents.shard is not None and name in contents.shard.replicas:
        owner = contents.shard.replicas[name]
        return CheckpointNotFoundError(
            "this rank has a replica of the tensor, whose bytes are in another shard",
            path=contents.path,
            fqn=name,
            hint=f"inspect the shard of rank {owner}",
        )
    close = get_close_matches(name, contents.tensors.names(), n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "without a name, inspect lists the tensors"
    return CheckpointNotFoundError("there is no tensor of this name", path=contents.path, fqn=name, hint=hint)


class _HeadersOnDemand:
    def __init__(self, store: Store, step_path: str, manifest: Manifest) -> None:
        self._store = store
        self._step_path = step_path
        self._manifest = manifest
        self._headers: dict[int, ShardHeader] = {}

    def __call__(self, rank: int) -> ShardHeader:
        if rank not in self._headers:
            ref = self._manifest.shards[rank]
            self._headers[rank] = open_header(self._store, self._step_path, ref, self._manifest)
        return self._headers[rank]


def _open_shard(store: Store, path: str) -> Contents:
    with store.open(path) as file:
        prefix = bytearray(min(PREFIX_NBYTES, file.size))
        file.pread_into(0, memoryview(prefix))
        nbytes = header_nbytes(bytes(prefix), path)
        if nbytes > file.size:
            raise CorruptCheckpointError(
                "the file ends within its header", path=path, expected=nbytes, actual=file.size
            )
        data = bytearray(nbytes)
        file.pread_into(0, memoryview(data))
        header = decode_header(bytes(data), path=path, file_nbytes=file.size)
    step_path = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    manifest = _commit_of(store, step_path, path, hexdigest(data))
    return Contents(path, step_path, manifest, header, HeaderTensors([header]), lambda rank: header)


def _commit_of(store: Store, step_path: str, path: str, header_digest: str) -> Manifest | None:
    """The manifest that names this shard, with this header."""
    try:
        manifest = read_manifest(store, step_path)
    except (CheckpointError, FileNotFoundError):
        return None
    here = os.path.realpath(path)
    for ref in manifest.shards:
        if ref.header_digest == header_digest and os.path.realpath(os.path.join(step_path, ref.path)) == here:
            return manifest
    return None
