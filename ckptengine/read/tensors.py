"""Where is each tensor of a step: as INDEX tells it, or, where INDEX cannot, as the headers do?

One file of a few megabytes answers for thousands of ranks, whose headers are then read only where bytes are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from ckptengine.errors import CheckpointError
from ckptengine.format.columns import hidden_tensors
from ckptengine.format.digest import hexdigest
from ckptengine.format.limits import MAX_INDEX_NBYTES
from ckptengine.format.manifest import Manifest
from ckptengine.format.names import INDEX_NAME
from ckptengine.format.shard import ShardHeader
from ckptengine.read.world import Piece, locate, tensor_name
from ckptengine.storage.store import Store

if TYPE_CHECKING:
    from ckptengine.format.index import Index, IndexedChunk

logger = logging.getLogger(__name__)

HEADERS_UP_TO_NBYTES = 4 << 20
HEADERS_UP_TO_SHARDS = 32
"""As many headers as this are read at once sooner than INDEX, which brings numpy with it, is made use of."""


class Tensors(Protocol):
    """The tensors by name, without what is no leaf of the state."""

    def names(self) -> list[str]:
        """Sorted."""
        ...

    def pieces(self, name: str) -> list[Piece]:
        """What the ranks hold of a tensor, by rank. Empty for a name that is not there."""
        ...

    def nbytes(self, name: str) -> dict[str, int]:
        """Bytes of all pieces, by dtype, the first piece's first. `KeyError` for a name that is not there."""
        ...


class HeaderTensors:
    """As the headers given tell it: all ranks', or those of one shard that is looked at alone."""

    def __init__(self, headers: Iterable[ShardHeader]) -> None:
        headers = list(headers)
        hidden = {name for header in headers for name in hidden_tensors(header)}
        self._pieces = {name: pieces for name, pieces in locate(headers).items() if name not in hidden}

    def names(self) -> list[str]:
        return sorted(self._pieces)

    def pieces(self, name: str) -> list[Piece]:
        return self._pieces.get(name, [])

    def nbytes(self, name: str) -> dict[str, int]:
        return _by_dtype(self._pieces[name])


class StepTensors:
    """A step's tensors, from INDEX as far as that goes. headers: gives those of all ranks, in order."""

    def __init__(
        self, store: Store, step_path: str, manifest: Manifest, headers: Callable[[], Sequence[ShardHeader]]
    ) -> None:
        self._headers = headers
        self._index = _read_index(store, step_path, manifest)

    @cached_property
    def _from_headers(self) -> HeaderTensors:
        return HeaderTensors(self._headers())

    def names(self) -> list[str]:
        return self._from_headers.names() if self._index is None else self._index.names()

    def pieces(self, name: str) -> list[Piece]:
        return self._source(name).pieces(name)

    def nbytes(self, name: str) -> dict[str, int]:
        return self._source(name).nbytes(name)

    def is_indexed(self, name: str) -> bool:
        """Does `pieces` tell what INDEX says, and not what the headers do?"""
        return self._index is not None and name not in self._index.partial

    def _source(self, name: str) -> Tensors:
        return self._index if self._index is not None and self.is_indexed(name) else self._from_headers


class _IndexTensors:
    """As INDEX tells it. partial: of these the headers have to be asked."""

    def __init__(self, index: Index, partial: frozenset[str]) -> None:
        self._index = index
        self.partial = partial
        # Where one rank holds several parts of `weight`, each is called by where it begins, as `weight@8_0`.
        self._parts: dict[str, list[str]] = {}
        for name in index.names():
            for found in index.chunks(name) if "@" in name else ():
                parts = self._parts.setdefault(_fqn(found), [])
                if name not in parts:
                    parts.append(name)
        plain = {name for name in index.names() if "@" not in name}
        for name in plain & self._parts.keys():
            self._parts[name].append(name)
        self._names = (plain | self._parts.keys() | partial) - index.hidden

    def names(self) -> list[str]:
        return sorted(self._names)

    def pieces(self, name: str) -> list[Piece]:
        if name not in self._names:
            return []
        if name not in self._parts:
            return [_piece(self._index, found) for found in self._index.chunks(name)]
        found = [one for part in self._parts[name] for one in self._index.chunks(part) if _fqn(one) == name]
        found.sort(key=lambda one: (one.rank, one.start))
        return [_piece(self._index, one) for one in found]

    def nbytes(self, name: str) -> dict[str, int]:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._parts:
            return {self._index.info(name)[0]: self._index.nbytes(name)}
        return _by_dtype(self.pieces(name))


def _by_dtype(pieces: Iterable[Piece]) -> dict[str, int]:
    found: dict[str, int] = {}
    for piece in pieces:
        found[piece.dtype] = found.get(piece.dtype, 0) + piece.stop - piece.start
    return found


def _fqn(found: IndexedChunk) -> str:
    return tensor_name(found.name, found.chunk if found.sharded else None)


def _piece(index: Index, found: IndexedChunk) -> Piece:
    dtype = index.info(found.name)[0]
    return Piece(found.rank, dtype, found.chunk, found.start, found.stop, found.sharded)


def _read_index(store: Store, step_path: str, manifest: Manifest) -> _IndexTensors | None:
    """None where the headers have to be asked instead: they are few, or INDEX does not tell enough."""
    if are_few(manifest):
        return None
    index = read_index(store, step_path, manifest)
    if index is None or index.partial is None or any("@" in name for name in index.partial):
        return None
    return _IndexTensors(index, index.partial)


def are_few(manifest: Manifest) -> bool:
    """Is reading all headers as good as reading INDEX?"""
    total = sum(shard.header_nbytes for shard in manifest.shards)
    return len(manifest.shards) <= HEADERS_UP_TO_SHARDS and total <= HEADERS_UP_TO_NBYTES


def read_index(store: Store, step_path: str, manifest: Manifest) -> Index | None:
    """INDEX, if it is there and is the one that the manifest names. It is only a copy of what the headers
    say."""
    ref = manifest.index
    if ref is None:
        return None
    from ckptengine.format.index import decode_index

    path = os.path.join(step_path, INDEX_NAME)
    try:
        data = store.read(path, limit=MAX_INDEX_NBYTES)
        if hexdigest(data) != ref.digest:
            logger.info("reading all shard headers: %s is not the one the manifest names", path)
            return None
        return decode_index(data, path=path)
    except (CheckpointError, FileNotFoundError) as error:
        logger.info("reading all shard headers, as INDEX cannot be read: %s", error)
        return None
