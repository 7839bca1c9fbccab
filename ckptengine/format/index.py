"""Which chunks of which tensors are in which shards? All shard headers, boiled down to what resharding needs.

INDEX is an optimisation: it can be rebuilt from the headers, and is used only if its digest is the
manifest's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import zstandard

from ckptengine.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptengine.format import dtypes
from ckptengine.format.columns import (
    IndexBuilder,
    IndexContent,
    columns_of,
)
from ckptengine.format.digest import DIGEST_NBYTES, digest
from ckptengine.format.entries import ShardHeader
from ckptengine.format.geometry import Chunk, c_strides
from ckptengine.format.limits import INT64_MAX, MAX_INDEX_NBYTES
from ckptengine.format.names import AttemptId
from ckptengine.format.per_rank import PerRank

if TYPE_CHECKING:
    # numpy is imported where columns are made: what only asks for a manifest should not wait for it.
    import numpy as np
    from numpy.typing import NDArray

_VERSION = 1
_MAGIC = b"CKPTIDX"
_HEAD = struct.Struct("<7sBQ")
_ROWS_AT_ONCE = 1 << 18
"""Chunks that are checked at once: the columns of thousands of ranks have millions of rows."""


@dataclass(frozen=True, slots=True)
class IndexedChunk:
    """A chunk of a tensor, and the bytes [start, stop) of its rank's data section that hold it.

    sharded: the rank said which chunk of a global tensor it is; otherwise it is a whole tensor of the rank's
    own.
    """

    name: str
    rank: int
    chunk: Chunk
    start: int
    stop: int
    sharded: bool


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRows:
    """The stored chunks of one tensor, by rank, as columns: what `Index.chunks` tells, for many ranks.

    offsets, shape: a row for each chunk. start: its first byte in its rank's data section. strides: of the
    elements of chunks that are not in C order there, by row.
    """

    dtype: str
    global_shape: tuple[int, ...]
    flat_of: tuple[int, ...] | None
    rank: NDArray[np.int64]
    offsets: NDArray[np.int64]
    shape: NDArray[np.int64]
    start: NDArray[np.int64]
    sharded: NDArray[np.bool_]
    strides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rank)

    def strides_of(self, row: int) -> tuple[int, ...]:
        """In elements, of the bytes in the data section."""
        given = self.strides.get(row)
        return c_strides(self.shape[row].tolist()) if given is None else given

    def only(self, rows: Sequence[int] | NDArray[Any]) -> ChunkRows:
        """Some of the rows, by their numbers or by a mask."""
        import numpy as np

        numbers = np.arange(len(self))[rows]
        return ChunkRows(
            self.dtype,
            self.global_shape,
            self.flat_of,
            self.rank[numbers],
            self.offsets[numbers],
            self.shape[numbers],
            self.start[numbers],
            self.sharded[numbers],
            {new: self.strides[old] for new, old in enumerate(numbers.tolist()) if old in self.strides}
            if self.strides
            else {},
        )


class Index:
    """The tensors of all shards, by name.

    hidden: those that are nothing but the memory that several views share. partial: those of which the
    headers know
    more: a rank's view that is not in C order, or a rank's tensor that is not like the lowest rank's. partial
    is None for an index that does not tell either. per_rank: which values ranks do not hold alike; None if
    the index does not tell.
    """

    def __init__(self, content: IndexContent) -> None:
        """Takes the columns of `content` as they are; raises `ValueError` unless they are consistent."""
        import numpy as np

        self.attempt = content.attempt
        AttemptId.parse(content.attempt)
        self._names = content.names
        self._numbers = {name: i for i, name in enumerate(content.names)}
        per_name = content.dtype, content.global_shape, content.flat_of
        if any(len(values) != len(content.names) for values in per_name):
            raise ValueError("lists differ in length")
        self._infos = list(zip(*per_name, strict=True))
        self._name = np.frombuffer(content.name, "<u4")
        self._rank = np.frombuffer(content.rank, "<u4")
        self._ndim = np.frombuffer(content.ndim, "u1")
        self._offsets = np.frombuffer(content.offsets, "<i8")
        self._shape = np.frombuffer(content.shape, "<i8")
        self._start = np.frombuffer(content.start, "<u8")
        self._stop = np.frombuffer(content.stop, "<u8")
        self._sharded = None if content.sharded is None else np.frombuffer(content.sharded, "u1")
        self._dims = np.concatenate(([0], np.cumsum(self._ndim, dtype=np.int64)))
        self._validate()
        self._rows = np.searchsorted(self._name, np.arange(len(self._names) + 1))
        for lists in (content.per_rank, content.some_ranks):
            if lists is not None and any(a >= b for a, b in pairwise(lists)):
                raise ValueError("names of values are not sorted, or not unique")
        if (content.per_rank is None) != (content.some_ranks is None):
            raise ValueError("per_rank and some_ranks go together")
        self.hidden = frozenset(content.hidden or ())
        self.partial = None if content.partial is None else frozenset(content.partial)
        self.per_rank = (
            None
            if content.per_rank is None or content.some_ranks is None
            else PerRank(frozenset(content.per_rank), frozenset(content.some_ranks))
        )

    def names(self) -> list[str]:
        """All tensors, sorted."""
        return list(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __len__(self) -> int:
        return len(self._names)

    def info(self, name: str) -> tuple[str, tuple[int, ...], tuple[int, ...] | None]:
        """A tensor's dtype, global shape, and `flat_of` if it is flattened; `KeyError` if there is none."""
        return self._infos[self._numbers[name]]

    def nbytes(self, name: str) -> int:
        """Bytes of all stored chunks of a tensor; `KeyError` if there is none of that name."""
        number = self._numbers[name]
        rows = slice(int(self._rows[number]), int(self._rows[number + 1]))
        return int((self._stop[rows] - self._start[rows]).sum())

    def chunks(self, name: str) -> list[IndexedChunk]:
        """The stored chunks of a tensor, by rank; `KeyError` if there is none of that name."""
        number = self._numbers[name]
        _, global_shape, flat_of = self._infos[number]
        rows = slice(int(self._rows[number]), int(self._rows[number + 1]))
        count, ndim = rows.stop - rows.start, len(global_shape)
        dims = slice(int(self._dims[rows.start]), int(self._dims[rows.stop]))
        offsets = self._offsets[dims].reshape(count, ndim).tolist()
        shapes = self._shape[dims].reshape(count, ndim).tolist()
        chunks = [
            Chunk(global_shape, tuple(offset), tuple(shape), flat_of)
            for offset, shape in zip(offsets, shapes, strict=True)
        ]
        if self._sharded is None:
            sharded = [not chunk.is_whole for chunk in chunks]
        else:
            sharded = self._sharded[rows].astype(bool).tolist()
        ranks, starts, stops = (column[rows].tolist() for column in (self._rank, self._start, self._stop))
        columns = zip(ranks, chunks, starts, stops, sharded, strict=True)
        return [IndexedChunk(name, *values) for values in columns]

    def rows(self, name: str) -> ChunkRows:
        """The stored chunks of a tensor, by rank, as columns; `KeyError` if there is none of that name."""
        import numpy as np

        number = self._numbers[name]
        dtype, global_shape, flat_of = self._infos[number]
        rows = slice(int(self._rows[number]), int(self._rows[number + 1]))
        count, ndim = rows.stop - rows.start, len(global_shape)
        dims = slice(int(self._dims[rows.start]), int(self._dims[rows.stop]))
        shape = self._shape[dims].reshape(count, ndim)
        if self._sharded is None:
            sharded = (shape != np.array(global_shape, np.int64)).any(axis=1)
        else:
            sharded = self._sharded[rows].astype(np.bool_)
        return ChunkRows(
            dtype,
            global_shape,
            flat_of,
            self._rank[rows].astype(np.int64),
            self._offsets[dims].reshape(count, ndim),
            shape,
            self._start[rows].astype(np.int64),
            sharded,
        )

    def _validate(self) -> None:
        import numpy as np

        if any(a >= b for a, b in zip(self._names, self._names[1:], strict=False)):
            raise ValueError("names are not sorted, or not unique")
        # A model has far fewer shapes than tensors.
        checked = set()
        for name, info in zip(self._names, self._infos, strict=True):
            if info in checked:
                continue
            checked.add(info)
            dtype, global_shape, flat_of = info
            if not dtypes.is_known(dtype):
                raise ValueError(f"tensor {name!r}: unknown dtype {dtype!r}")
            Chunk(global_shape, (0,) * len(global_shape), global_shape, flat_of).validate()
            if prod(global_shape) * dtypes.itemsize(dtype) > INT64_MAX:
                raise ValueError(f"tensor {name!r} of {global_shape} overflows 64 bits")
        count = len(self._name)
        if any(len(column) != count for column in (self._rank, self._ndim, self._start, self._stop)):
            raise ValueError("columns differ in length")
        if self._sharded is not None and (len(self._sharded) != count or np.any(self._sharded > 1)):
            raise ValueError("sharded does not say yes or no for each chunk")
        if len(self._offsets) != self._dims[-1] or len(self._shape) != self._dims[-1]:
            raise ValueError("offsets or shape do not fit ndim")
        if not count:
            return
        if self._name[-1] >= len(self._names) or np.any(self._name[1:] < self._name[:-1]):
            raise ValueError("chunks are not ordered by name, or of a name that is not there")
        ndims = np.array([len(shape) for _, shape, _ in self._infos], dtype=np.int64)
        sizes = np.array([size for _, shape, _ in self._infos for size in shape], dtype=np.int64)
        firsts = np.concatenate(([0], np.cumsum(ndims)))
        itemsizes = np.array([dtypes.itemsize(dtype) for dtype, _, _ in self._infos], dtype=np.uint64)
        for start in range(0, count, _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, count))
            self._validate_rows(rows, ndims, firsts, sizes, itemsizes)

    def _validate_rows(
        self,
        rows: slice,
        ndims: NDArray[np.int64],
        firsts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        itemsizes: NDArray[np.uint64],
    ) -> None:
        """Some of the chunks. firsts: where in `sizes`, which has the global sizes, a tensor's begin."""
        import numpy as np

        name, ndim = self._name[rows], self._ndim[rows]
        if np.any(ndims[name] != ndim):
            raise ValueError("a chunk's ndim is not its tensor's")
        begins = self._dims[rows] - self._dims[rows.start]
        dims = slice(int(self._dims[rows.start]), int(self._dims[rows.stop]))
        offsets, shape = self._offsets[dims], self._shape[dims]
        whole = sizes[np.repeat(firsts[name] - begins, ndim) + np.arange(len(shape))]
        inside = (offsets >= 0) & (shape >= 0) & (shape <= whole)
        if not np.all(inside) or np.any(offsets > whole - shape):
            raise ValueError("a chunk is not inside its tensor")
        # No product overflows: a chunk is inside its tensor, whose size was checked.
        nelem = np.ones(len(name), dtype=np.uint64)
        has_dims = np.flatnonzero(ndim)
        if len(has_dims):
            nelem[has_dims] = np.multiply.reduceat(shape.astype(np.uint64), begins[has_dims])
        start, stop = self._start[rows], self._stop[rows]
        if np.any(stop < start) or np.any(stop - start != nelem * itemsizes[name]):
            raise ValueError("a chunk's bytes are not as many as its elements need")
        if np.any(stop > INT64_MAX):
            raise ValueError("a chunk's bytes overflow 64 bits")


def index_from_headers(headers: Iterable[ShardHeader]) -> Index:
    """The index of shards whose headers are at hand, for where INDEX is missing or damaged."""
    return Index(_built(headers).content())


def build_index(headers: Iterable[ShardHeader]) -> bytes:
    """INDEX for these shards, all of one attempt; see `encode_index`."""
    return encode_index(_built(headers))


def _built(headers: Iterable[ShardHeader]) -> IndexBuilder:
    builder = IndexBuilder()
    for header in sorted(headers, key=lambda header: header.rank):
        builder.add(columns_of(header))
    return builder


def encode_index(builder: IndexBuilder) -> bytes:
    """INDEX for what was added to the builder. `ValueError` if it would be larger than a reader accepts.

    Whole tensors that differ in dtype or shape between ranks are values of each rank under one name: the
    lowest rank's is indexed. Large values (`kind`), and views that are not in C order, are not: they are read
    through their header.
    """
    content = builder.content()
    Index(content)
    packed = msgspec.msgpack.encode(content)
    frame = zstandard.ZstdCompressor(level=3).compress(packed)
    body = _HEAD.pack(_MAGIC, _VERSION, len(frame)) + frame
    data = body + digest(body)
    if max(len(data), len(packed)) > MAX_INDEX_NBYTES:
        raise ValueError(f"the index needs {len(packed)} bytes, more than {MAX_INDEX_NBYTES}")
    return data


def decode_index(data: bytes, *, path: str) -> Index:
    """The index that `data` encodes; errors as for the manifest."""
    try:
        return Index(_decode(data, path))
    except (ValueError, zstandard.ZstdError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"malformed index: {error}",
            path=path,
            hint="the shard headers hold the same, so it can be ignored",
        ) from error


def _decode(data: bytes, path: str) -> IndexContent:
    if not _HEAD.size + DIGEST_NBYTES <= len(data) <= MAX_INDEX_NBYTES:
        raise ValueError(f"it cannot be {len(data)} bytes long")
    magic, version, frame_nbytes = _HEAD.unpack_from(data)
    if magic != _MAGIC or version < _VERSION:
        raise ValueError("not an index of ckptengine")
    if version > _VERSION:
        raise UnsupportedFormatError(
            f"index of version {version}", path=path, hint="install a newer version of ckptengine"
        )
    if frame_nbytes != len(data) - _HEAD.size - DIGEST_NBYTES:
        raise ValueError(f"its length does not fit: {frame_nbytes} bytes of frame in a file of {len(data)}")
    if digest(memoryview(data)[:-DIGEST_NBYTES]) != data[-DIGEST_NBYTES:]:
        raise ValueError("its bytes and its digest differ")
    frame = data[_HEAD.size : -DIGEST_NBYTES]
    parameters = zstandard.get_frame_parameters(frame)
    if parameters.content_size > MAX_INDEX_NBYTES:
        # Also the value that stands for "unknown".
        raise ValueError("its decompressed size is not given, or too large")
    # In steps, so that memory grows with what is there and not with what the frame claims.
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_INDEX_NBYTES).decompressobj()
    packed = decompressor.decompress(frame)
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("not one whole frame")
    return msgspec.msgpack.decode(packed, type=IndexContent)
