"""What does INDEX hold? Each shard's header as columns, and those of all shards put together.

`scan` takes them straight from a header's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec

from ckptengine.format.entries import ShardHeader, is_c_order
from ckptengine.format.limits import INT64_MAX
from ckptengine.format.per_rank import PerRankFinder, ShardValues
from ckptengine.format.tree import leaves

if TYPE_CHECKING:
    # numpy is imported where columns are made: what only asks for a manifest should not wait for it.
    import numpy as np
    from numpy.typing import NDArray

Sizes: TypeAlias = "tuple[int, ...]"
Info: TypeAlias = "tuple[str, Sizes, Sizes | None]"
"""A tensor's dtype, global shape, and `flat_of`: what its chunks have in common."""

Size = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]


class IndexContent(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The msgpack of INDEX: lists parallel to `names`, then columns, one row for each stored chunk.

    Columns are parts of the memory they were decoded from, as all of them together may take hundreds of MiB.

    The last five came later: where they are None, the headers know more than this index.
    """

    attempt: str
    names: list[str]
    dtype: list[str]
    global_shape: list[tuple[Size, ...]]
    flat_of: list[tuple[Size, ...] | None]
    name: memoryview
    rank: memoryview
    ndim: memoryview
    offsets: memoryview
    shape: memoryview
    start: memoryview
    stop: memoryview
    sharded: memoryview | None = None
    hidden: list[str] | None = None
    partial: list[str] | None = None
    per_rank: list[str] | None = None
    some_ranks: list[str] | None = None


_COLUMNS = ("ndim", "offsets", "shape", "start", "stop", "sharded")

Row: TypeAlias = "tuple[str, Info, int, Sizes, Sizes, int, int, bool]"


@dataclass(frozen=True, slots=True, eq=False)
class ShardColumns:
    """One shard's tensors, then its views in C order.

    names, infos, ndim, start, stop and sharded have an item for each; offsets and shape as many as ndim says.
    sharded: the rank said which part of a global tensor it is, if only all of it. hidden: tensors that are no
    leaf of the state, but the memory that several views share. skipped: the views in any other order, which
    have no place in columns. replicas: tensors whose bytes another rank holds. values: what the shard holds
    beside them, to be compared with other ranks'; None: it has been, or is to be later.
    """

    attempt: str
    rank: int
    names: list[str]
    infos: list[Info]
    ndim: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    shape: NDArray[np.int64]
    start: NDArray[np.uint64]
    stop: NDArray[np.uint64]
    sharded: NDArray[np.bool_]
    hidden: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    values: ShardValues | None = None


def hidden_tensors(header: ShardHeader) -> list[str]:
    """Stored tensors that are no leaf of the state: the memory that several views share."""
    bases = {view.of for view in header.views}
    if not bases:
        return []
    used = set(leaves(header.tree))
    return [entry.name for i, entry in enumerate(header.tensors) if entry.name in bases and i not in used]


def columns_of(header: ShardHeader) -> ShardColumns:
    """The columns of a decoded header. Large values (`kind`) are no tensors."""
    skipped: list[str] = []

    def rows() -> Iterator[Row]:
        starts = {}
        for entry in header.tensors:
            starts[entry.name] = entry.start
            if entry.kind is not None:
                continue
            chunk = entry.chunk
            if chunk is None:
                yield whole_row(entry.name, entry.dtype, entry.shape, entry.start, entry.stop)
            else:
                info = (entry.dtype, chunk.global_shape, chunk.flat_of)
                yield part_row(entry.name, info, chunk.offsets, chunk.shape, entry.start, entry.stop)
        for view in header.views:
            # Only in C order are a view's bytes one range that reads like a stored tensor's.
            if not is_c_order(view.shape, view.stride):
                skipped.append(view.name)
                continue
            start, chunk = starts[view.of] + view.byte_offset, view.chunk
            stop = start + view.extent_nbytes
            if chunk is None:
                yield whole_row(view.name, view.dtype, view.shape, start, stop)
            else:
                info = (view.dtype, chunk.global_shape, chunk.flat_of)
                yield part_row(view.name, info, chunk.offsets, chunk.shape, start, stop)

    return replace(
        columns_from(header.attempt, header.rank, rows()),
        hidden=hidden_tensors(header),
        skipped=skipped,
        replicas=list(header.replicas),
        values=values_of(header),
    )


def values_of(header: ShardHeader) -> ShardValues:
    """What a decoded header says beside the parts of global tensors."""
    return ShardValues(
        msgspec.json.encode(header.tree),
        [entry.name for entry in header.own_entries],
        header.own,
        {i: entry.name for i, entry in enumerate(header.tensors) if entry.kind is not None},
        {view.name: view.of for view in header.views},
    )


def whole_row(name: str, dtype: str, shape: Sizes, start: int, stop: int) -> Row:
    return name, (dtype, shape, None), len(shape), (0,) * len(shape), shape, start, stop, False


def part_row(name: str, info: Info, offsets: Sizes, shape: Sizes, start: int, stop: int) -> Row:
    return name, info, len(shape), offsets, shape, start, stop, True


def columns_from(attempt: str, rank: int, rows: Iterable[Row]) -> ShardColumns:
    import numpy as np

    names, infos, ndim, offsets, shape, start, stop, sharded = tuple(zip(*rows, strict=True)) or ((),) * 8
    return ShardColumns(
        attempt=attempt,
        rank=rank,
        names=list(names),
        infos=list(infos),
        ndim=np.array(ndim, np.uint8),
        offsets=np.array([*chain.from_iterable(offsets)], np.int64),
        shape=np.array([*chain.from_iterable(shape)], np.int64),
        start=np.array(start, np.uint64),
        stop=np.array(stop, np.uint64),
        sharded=np.array(sharded, np.bool_),
    )


class IndexBuilder:
    """Takes shards' columns, in the order of their ranks, and gives what INDEX is to hold.

    Of a shard that holds parts of the same tensors as the one before, as nearly all do, only the numbers are
    kept.
    """

    def __init__(self) -> None:
        self._attempts: set[str] = set()
        self._ranks: list[int] = []
        self._infos: dict[str, tuple[Info, int]] = {}
        self._hidden: set[str] = set()
        self._partial: set[str] = set()
        self._replicas: set[str] = set()
        # For each shard its tensors' numbers, in the order in which `_infos` met them.
        self._numbers: list[NDArray[np.int64]] = []
        self._columns: dict[str, list[NDArray[Any]]] = {name: [] for name in _COLUMNS}
        self._last: ShardColumns | None = None
        self.per_rank = PerRankFinder()

    def add(self, shard: ShardColumns) -> None:
        """Where a lower rank has said something else of a name, only what that rank said is kept."""
        import numpy as np

        if self._ranks and shard.rank <= self._ranks[-1]:
            raise ValueError(f"rank {shard.rank} comes after rank {self._ranks[-1]}")
        self._attempts.add(shard.attempt)
        self._ranks.append(shard.rank)
        self._hidden.update(shard.hidden)
        self._partial.update(shard.skipped)
        self._replicas.update(shard.replicas)
        if shard.values is not None:
            self.per_rank.add(shard.values)
        for name, columns in self._columns.items():
            columns.append(getattr(shard, name))
        if self._last is None or self._last.names != shard.names or self._last.infos != shard.infos:
            self._numbers.append(np.array([*map(self._number, shard.names, shard.infos)], np.int64))
            self._last = replace(shard, values=None)
        else:
            self._numbers.append(self._numbers[-1])

    def _number(self, name: str, info: Info) -> int:
        known, number = self._infos.setdefault(name, (info, len(self._infos)))
        if known == info:
            return number
        self._partial.add(name)
        return -1

    @property
    def tensors(self) -> int:
        """How many tensors all ranks have, also of those that are not in the index."""
        return len(self._partial.union(self._infos, self._replicas))

    def content(self) -> IndexContent:
        """All of it, ordered by name, then by rank. `ValueError` unless the shards are of one attempt."""
        import numpy as np

        if len(self._attempts) != 1:
            raise ValueError(f"headers of {len(self._attempts)} attempts, not of one")
        names = sorted(self._infos)
        infos = [self._infos[name][0] for name in names]
        place = np.full(len(names) + 1, -1, np.int64)  # the last is found by -1
        place[[self._infos[name][1] for name in names]] = np.arange(len(names))
        number = place[np.concatenate(self._numbers)]
        rows = np.flatnonzero(number >= 0)
        rows = rows[np.argsort(number[rows], kind="stable")]
        column = {name: np.concatenate(columns) for name, columns in self._columns.items()}
        ndim = column["ndim"]
        taken = ndim[rows]
        # Where a row's offsets begin in the shards' order, less where they go, and counted up from there.
        begins = np.cumsum(ndim, dtype=np.int64) - ndim
        dims = np.repeat(begins[rows] - (np.cumsum(taken, dtype=np.int64) - taken), taken)
        dims += np.arange(len(dims))
        per_rank = self.per_rank.found()
        rank = np.repeat(np.array(self._ranks, "<u4"), [len(numbers) for numbers in self._numbers])
        return IndexContent(
            attempt=next(iter(self._attempts)),
            names=names,
            dtype=[info[0] for info in infos],
            global_shape=[info[1] for info in infos],
            flat_of=[info[2] for info in infos],
            name=_bytes(number[rows], "<u4"),
            rank=_bytes(rank[rows], "<u4"),
            ndim=_bytes(taken, "u1"),
            offsets=_bytes(column["offsets"][dims], "<i8"),
            shape=_bytes(column["shape"][dims], "<i8"),
            start=_bytes(column["start"][rows], "<u8"),
            stop=_bytes(column["stop"][rows], "<u8"),
            sharded=_bytes(column["sharded"][rows], "u1"),
            hidden=sorted(self._hidden),
            partial=sorted(self._partial),
            per_rank=sorted(per_rank.differing),
            some_ranks=sorted(per_rank.some_ranks),
        )


def _bytes(column: NDArray[Any], dtype: str) -> memoryview:
    # Through bytes: numpy's own memoryview of an empty array cannot be cast.
    return memoryview(column.astype(dtype, copy=False).tobytes())
