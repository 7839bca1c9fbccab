"""What is in a checkpoint, for a process that is no rank of the job that wrote it?

`open_checkpoint` needs no process group and no model: tensors come back whole, assembled from the shards of
all ranks, one by one, in part, or all at once. Every block read is checked against its digest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch

from ckptengine.adapters.assembly import Made, Request, SavedRanks
from ckptengine.adapters.keypath import joined
from ckptengine.adapters.values import Decoder, decode_value
from ckptengine.catalog.catalog import read_manifest, resolve
from ckptengine.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotCommittedError,
)
from ckptengine.format.dtypes import safetensors_code
from ckptengine.format.geometry import Chunk
from ckptengine.format.manifest import Manifest
from ckptengine.format.shard import ShardHeader
from ckptengine.format.tree import leaf, leaves
from ckptengine.read import trees, world
from ckptengine.read.cache import BlockCache
from ckptengine.read.merged import MergedTree
from ckptengine.read.reader import ShardReader
from ckptengine.read.selection import select
from ckptengine.read.shards import open_header, shard_path
from ckptengine.read.step import held_manifest
from ckptengine.read.tensors import StepTensors
from ckptengine.read.world import Piece
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import Store
from ckptengine.storage.threads import in_threads

CACHE_NBYTES = 64 << 20
"""Blocks kept between reads, so that tensors that share a block are not each the cause of a read."""


def open_checkpoint(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, threads: int = 4
) -> CheckpointReader:
    """Opens a checkpoint for reading: a root (its newest committed step), a step directory, or a manifest.

    While it is open, retention does not delete the step. allow_pickle: read values that were stored with
    pickle, which runs code from the checkpoint. threads: parallel block reads. Raises
    CheckpointNotFoundError, NotCommittedError, CorruptCheckpointError or UnsupportedFormatError.
    """
    store = PosixStore()
    _, step_path = resolve(store, os.fspath(path))
    return CheckpointReader(store, step_path, allow_pickle=allow_pickle, threads=threads)


class CheckpointReader:
    """One committed step, open for reading. A context manager; its methods may be called from any thread.

    Names of tensors (FQNs) are their keys in the saved state, joined with dots. Methods that read raise
    CorruptCheckpointError for damage, naming file, rank and tensors, StorageError where the file system
    fails, and CheckpointNotFoundError if the step was deleted or saved anew since it was opened.
    """

    def __init__(self, store: Store, step_path: str, *, allow_pickle: bool, threads: int) -> None:
        self.path = step_path
        self._store = store
        self._allow_pickle = allow_pickle
        self._threads = threads
        self._cache = BlockCache(CACHE_NBYTES)
        self._lock = threading.Lock()
        self._headers: dict[int, ShardHeader] = {}
        self._tensors: StepTensors | None = None
        self._own: dict[int, dict[str, list[Piece]]] = {}
        self._merged: MergedTree | None = None
        with ExitStack() as stack:
            self.manifest: Manifest = stack.enter_context(held_manifest(store, step_path))
            self._held: ExitStack | None = stack.pop_all()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"CheckpointReader({self.path!r}, step={self.step}, world_size={self.world_size})"

    def close(self) -> None:
        """Lets go of the step. Idempotent; tensors that were read stay."""
        held, self._held = self._held, None
        self._cache.clear()
        if held is not None:
            held.close()

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self.manifest.world_size

    @property
    def fingerprint(self) -> str:
        """The manifest's digest: equal for two checkpoints only if every byte of them is."""
        return self.manifest.fingerprint

    @property
    def metadata(self) -> Any:
        """What was passed to the save as `metadata`."""
        return decode_value(self.manifest.metadata, path="metadata", allow_pickle=self._allow_pickle)

    def keys(self) -> list[str]:
        """The names of all ranks' tensors, sorted."""
        with self._reading():
            return self._located().names()

    def where(self, fqn: str) -> list[tuple[int, Chunk, int, int]]:
        """Who holds a tensor: (rank, chunk, start, stop), where start and stop are bytes of that shard's data
        section."""
        with self._reading():
            return [(piece.rank, piece.chunk, piece.start, piece.stop) for piece in self._pieces(fqn)]

    def get_tensor(self, fqn: str, *, rank: int | None = None) -> torch.Tensor:
        """A tensor, assembled from all shards, on the CPU.

        Where ranks have tensors of their own under one name, it is the lowest rank's. rank: what this rank
        saved under the name instead, which of a sharded tensor is its chunk. Raises KeyError for an unknown
        name.
        """
        with self._reading():
            request = Request()
            if rank is None:
                pieces = self._covering(fqn)
                tensor = request.whole(pieces)
                self._confirm(fqn, pieces, request.destinations)
                self._deliver(request)
                return tensor
            header = self._header(self._checked(rank))
            if fqn not in header.leaf_names:
                raise _unknown(fqn, header.leaf_names, f"tensor of rank {rank}")
            made = SavedRanks(request, self._header)[rank].named(fqn)
            self._deliver(request)
            found = made()
            if not isinstance(found, torch.Tensor):
                raise KeyError(f"{fqn!r} is no tensor but a value; get_value reads it")
            return found

    def get_slice(self, fqn: str) -> TensorSlice:
        """A tensor to be read in part: `c.get_slice(fqn)[2:5]` reads the blocks that hold those rows, no
        others."""
        with self._reading():
            return TensorSlice(self, fqn, self._covering(fqn))

    def get_value(self, name: str, *, rank: int | None = None) -> Any:
        """What is in the state under a name (keys joined with dots): a value, or a container with all in it.

        rank: see `load`. Raises KeyError for an unknown name.
        """
        with self._reading():
            names = []
            for found, node in trees.named(self._tree(rank), _key_text):
                if found == name:
                    return self._decode(node, rank, name)
                names.append(found)
            raise _unknown(name, names, "value")

    def values(self, *, rank: int | None = None) -> dict[str, Any]:
        """All values that are not tensors, by name (keys joined with dots), in the order of the state."""
        with self._reading():
            found = {}
            for name, node in trees.named(self._tree(rank), _key_text):
                if name not in found and (trees.is_value(node) or self._is_large_value(node, rank)):
                    found[name] = self._decode(node, rank, name)
            return found

    def load(self, rank: int | None = None) -> Any:
        """The state, as nested dicts, lists and values, with tensors on the CPU; objects as their
        `state_dict()`.

        Without `rank`: every tensor whole, as it was where no rank shards it. The structure and all values
        are rank 0's; keys that only other ranks have are added. With `rank`: exactly what that rank saved:
        its own values, and of sharded tensors its chunks, as plain tensors. Tied tensors come back tied.
        """
        with self._reading():
            return self._decode(self._tree(rank), rank, "state")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Every public read: not after close, and with a clear error if the step went away in spite of the
        lock."""
        if self._held is None:
            raise ValueError(f"the checkpoint is closed: {self.path}")
        try:
            yield
        except (CheckpointError, FileNotFoundError) as error:
            if self._is_gone():
                raise CheckpointNotFoundError(
                    "the step was deleted or saved anew while it was open",
                    path=self.path,
                    hint="open the checkpoint again",
                ) from error
            if isinstance(error, CheckpointError) and error.path is None:
                error.path = self.path
            raise

    def _is_gone(self) -> bool:
        try:
            return read_manifest(self._store, self.path).fingerprint != self.manifest.fingerprint
        except (CheckpointNotFoundError, NotCommittedError):
            return True
        except CheckpointError:  # it is there, and the error that was met says what is wrong
            return False

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the {self.world_size} that saved this checkpoint")
        return rank

    def _header(self, rank: int) -> ShardHeader:
        header = self._headers.get(rank)
        if header is None:
            header = open_header(self._store, self.path, self.manifest.shards[rank], self.manifest)
            self._headers[rank] = header
        return header

    def _all_headers(self) -> list[ShardHeader]:
        ranks = range(self.world_size)
        in_threads(
            [rank for rank in ranks if rank not in self._headers],
            self._threads,
            lambda: None,
            lambda rank, _: self._header(rank),
        )
        return [self._headers[rank] for rank in ranks]

    def _located(self) -> StepTensors:
        with self._lock:
            if self._tensors is None:
                self._tensors = StepTensors(self._store, self.path, self.manifest, self._all_headers)
            return self._tensors

    def _pieces(self, fqn: str) -> list[Piece]:
        located = self._located()
        pieces = located.pieces(fqn)
        if not pieces:
            raise _unknown(fqn, located.names(), "tensor")
        return pieces

    def _confirm(self, fqn: str, pieces: Iterable[Piece], ranks: Iterable[int]) -> None:
        """Do the headers of the ranks that are read from say the same of these pieces as INDEX did?"""
        if not self._located().is_indexed(fqn):
            return
        for rank in ranks:
            if rank not in self._own:
                self._own[rank] = world.locate([self._header(rank)])
            own = self._own[rank].get(fqn, ())
            for piece in pieces:
                if piece.rank == rank and piece not in own:
                    raise CorruptCheckpointError(
                        "INDEX and the shard's header contradict each other",
                        path=shard_path(self.path, self.manifest.shards[rank]),
                        rank=rank,
                        fqn=fqn,
                        hint="run `ckpt verify`; without the INDEX file the headers alone are read",
                    )

    def _covering(self, fqn: str) -> list[Piece]:
        """The pieces that make up a tensor; CorruptCheckpointError if they do not."""
        pieces = self._pieces(fqn)
        chunks = world.sharded_pieces(pieces)
        if not chunks:
            return pieces[:1]
        problem = world.conflict(chunks)
        if problem is None:
            missing = world.gap(chunks)
            problem = None if missing is None else f"no rank holds {missing}"
        if problem is not None:
            raise CorruptCheckpointError(f"the tensor is not whole: {problem}", path=self.path, fqn=fqn)
        return chunks

    def _merged_tree(self) -> MergedTree:
        with self._lock:
            if self._merged is None:
                first, *others = self._all_headers()
                merged = MergedTree(first, self._header)
                for header in others:
                    merged.add(header)
                self._merged = merged
            return self._merged

    def _tree(self, rank: int | None) -> Any:
        return self._merged_tree().tree if rank is None else self._header(self._checked(rank)).tree

    def _is_large_value(self, node: Any, rank: int | None) -> bool:
        number = leaf(node)
        if number is None:
            return False
        if rank is None:
            rank, number, _ = self._merged_tree().leaves[number]
        entries = self._header(rank).tensors
        return number < len(entries) and entries[number].kind is not None

    def _decode(self, node: Any, rank: int | None, name: str) -> Any:
        """The state that a tree, or a part of it, stands for. All its bytes are read together."""
        request = Request()
        saved = SavedRanks(request, self._header)
        made: dict[int, Made] = {}
        if rank is not None:
            made = {number: saved[rank].make(number) for number in leaves(node)}
        else:
            tensors: dict[tuple[Piece, ...], Made] = {}
            for number in leaves(node):
                made[number] = self._whole(request, saved, *self._merged_tree().leaves[number], tensors)
        self._deliver(request)
        decoder = Decoder(lambda number: made[number](), root=name, allow_pickle=self._allow_pickle)
        return decoder.decode(node)

    def _whole(
        self,
        request: Request,
        saved: SavedRanks,
        rank: int,
        number: int,
        fqn: str,
        tensors: dict[tuple[Piece, ...], Made],
    ) -> Made:
        """A leaf of some rank's tree, whole. The same bytes give the same tensor, so that ties are kept."""
        header = self._header(rank)
        if number < len(header.tensors) and header.tensors[number].kind is not None:
            return saved[rank].make(number)
        pieces = tuple(self._covering(fqn))
        if not pieces[0].sharded:
            return saved[pieces[0].rank].named(fqn)
        if pieces not in tensors:
            tensor = request.whole(pieces)
            tensors[pieces] = lambda: tensor
        return tensors[pieces]

    def _deliver(self, request: Request) -> None:
        for rank, destinations in sorted(request.destinations.items()):
            header = self._header(rank)
            path = shard_path(self.path, self.manifest.shards[rank])
            open_shard = partial(ShardReader, self._store, path, header)
            self._cache.deliver(header, destinations, open_shard, self._threads)
        request.finish()


class TensorSlice:
    """A tensor of a checkpoint that is read when it is indexed, as `safetensors` does it."""

    def __init__(self, reader: CheckpointReader, fqn: str, pieces: list[Piece]) -> None:
        self._reader = reader
        self._pieces = pieces
        self.fqn = fqn

    def get_shape(self) -> list[int]:
        return list(self._pieces[0].chunk.tensor_shape)

    def get_dtype(self) -> str:
        """safetensors' name, as `F32`; torch's where safetensors has none."""
        dtype = self._pieces[0].dtype
        return safetensors_code(dtype) or dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Ints, slices with a positive step, and Ellipsis; the result has memory of its own."""
        selection = select(index, self._pieces[0].chunk.tensor_shape)
        with self._reader._reading():
            request = Request()
            selected = request.part(self._pieces, selection)
            self._reader._confirm(self.fqn, self._pieces, request.destinations)
            self._reader._deliver(request)
            return selected()


def _key_text(key: Any) -> str:
    return joined((decode_value(key),))


def _unknown(name: str, names: Any, what: str) -> KeyError:
    close = get_close_matches(name, names, n=3)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return KeyError(f"no {what} named {name!r}{hint}")
