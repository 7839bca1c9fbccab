"""What does INDEX hold of a header's bytes that a writer of this package has sealed?

For whoever knows that by their digest: a small part of what `decode_header` costs, with its checks and an
object for each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

import msgspec

from ckptengine.format import dtypes
from ckptengine.format.columns import Info, Row, ShardColumns, Sizes, columns_from, part_row, whole_row
from ckptengine.format.entries import METADATA_KEY, is_c_order
from ckptengine.format.layout import PAD_PREFIX
from ckptengine.format.per_rank import ShardValues
from ckptengine.format.tree import TAG

if TYPE_CHECKING:
    # numpy is imported where columns are made: what only asks for a manifest should not wait for it.
    import numpy as np
    from numpy.typing import NDArray


class _Metadata(msgspec.Struct, gc=False):
    shard: str = msgspec.field(name="ckptengine.shard")
    tensors: str = msgspec.field(name="ckptengine.tensors")
    views: str = msgspec.field(name="ckptengine.views")
    replicas: str = msgspec.field(name="ckptengine.replicas")
    tree: str = msgspec.field(name="ckptengine.tree")
    own: str | None = msgspec.field(default=None, name="ckptengine.own")


class _Entry(msgspec.Struct, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Extra(msgspec.Struct, gc=False):
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    global_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()
    flat_of: tuple[int, ...] | None = None
    kind: str | None = None


class _View(msgspec.Struct, gc=False):
    of: str
    byte_offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    global_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()
    flat_of: tuple[int, ...] | None = None


class _Shard(msgspec.Struct):
    attempt: str
    rank: int


_metadata = msgspec.json.Decoder(_Metadata).decode
_entries = msgspec.json.Decoder(dict[str, _Entry]).decode
_extras = msgspec.json.Decoder(dict[str, _Extra]).decode
_views = msgspec.json.Decoder(dict[str, _View]).decode

_BEGIN = f'{{"{METADATA_KEY}":'.encode()
# Inside a string the second quote has a backslash before it: the first of these is where the metadata ends.
_END = b'"},"'


def scan_header(header: bytes | memoryview) -> ShardColumns:
    """What `columns_of(decode_header(header))` is, for a header whose digest vouches for it.

    Nothing else is checked: `ValueError` (also `KeyError`) where it is no header at all.
    """
    return HeaderScanner().scan(header)


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """The stored tensors as safetensors has them, but for torch's names of dtypes; and some as columns."""

    names: list[str]
    dtypes: list[str]
    shapes: list[Sizes]
    starts: list[int]
    stops: list[int]
    ndim: NDArray[np.uint8]
    shape: NDArray[np.int64]
    start: NDArray[np.uint64]
    stop: NDArray[np.uint64]

    @classmethod
    def of(cls, entries: dict[str, _Entry]) -> _Stored:
        import numpy as np

        kept = [(name, entry) for name, entry in entries.items() if not name.startswith(PAD_PREFIX)]
        shapes = [entry.shape for _, entry in kept]
        starts, stops = ([entry.data_offsets[i] for _, entry in kept] for i in (0, 1))
        return cls(
            [name for name, _ in kept],
            [dtypes.torch_name(entry.dtype) for _, entry in kept],
            shapes,
            starts,
            stops,
            np.array([*map(len, shapes)], np.uint8),
            np.array([*chain.from_iterable(shapes)], np.int64),
            np.array(starts, np.uint64),
            np.array(stops, np.uint64),
        )


class HeaderScanner:
    """`scan_header` for one header after the other, in any thread.

    Ranks hold parts of the same tensors, mostly of one size: what safetensors says of them is then in all
    headers the same bytes, which are not taken apart again.
    """

    def __init__(self) -> None:
        self._last: tuple[bytes, _Stored] | None = None

    def scan(self, header: bytes | memoryview) -> ShardColumns:
        data = bytes(header)
        # A raw shard begins with the length of the JSON, a compressed one with eight bytes of its own.
        at = 8 if len(data) == 8 + int.from_bytes(data[:8], "little") else 16
        if not data.startswith(_BEGIN, at):
            raise ValueError(f"no {METADATA_KEY} at the beginning")
        end = data.find(_END, at) + 2
        if end < 2:  # no tensors: the metadata, and the end of the whole
            end = data.rindex(b"}")
        metadata = _metadata(memoryview(data)[at + len(_BEGIN) : end])
        stored = self._stored(data[end:])
        shard = msgspec.json.decode(metadata.shard, type=_Shard)
        extras = _extras(metadata.tensors)
        views = _views(metadata.views)
        found = [*map(extras.get, stored.names)]
        large = {i: stored.names[i] for i, extra in enumerate(found) if extra is not None and extra.kind}
        skipped: list[str] = []
        if views or any(extra.dtype is not None for extra in extras.values()):
            rows = chain(_rows(stored, found), _view_rows(stored, views, skipped))
            columns = columns_from(shard.attempt, shard.rank, rows)
        else:
            columns = _ordinary(shard.attempt, shard.rank, stored, found, large)
        values = ShardValues(
            metadata.tree.encode(),
            [
                name
                for name, extra in zip(stored.names, found, strict=True)
                if extra is None or extra.global_shape is None
            ],
            None if metadata.own is None else metadata.own.encode(),
            large,
            {name: view.of for name, view in views.items()},
        )
        return replace(
            columns,
            hidden=_hidden(stored, {*values.views.values()}, metadata.tree) if views else [],
            skipped=skipped,
            replicas=list(msgspec.json.decode(metadata.replicas, type=dict[str, int])),
            values=values,
        )

    def _stored(self, text: bytes) -> _Stored:
        """The entries of the stored tensors, from what follows the metadata."""
        last = self._last
        if last is None or last[0] != text:
            last = self._last = text, _Stored.of(_entries(b"{" + text.removeprefix(b",")))
        return last[1]


def _rows(stored: _Stored, found: Iterable[_Extra | None]) -> Iterator[Row]:
    columns = zip(stored.names, stored.dtypes, stored.shapes, stored.starts, stored.stops, found, strict=True)
    for name, dtype, shape, start, stop, extra in columns:
        if extra is None:
            yield whole_row(name, dtype, shape, start, stop)
        elif extra.kind is None:
            dtype = dtype if extra.dtype is None else extra.dtype
            shape = shape if extra.shape is None else extra.shape
            if extra.global_shape is None:
                yield whole_row(name, dtype, shape, start, stop)
            else:
                info = (dtype, extra.global_shape, extra.flat_of)
                yield part_row(name, info, extra.offsets, shape, start, stop)


def _view_rows(stored: _Stored, views: dict[str, _View], skipped: list[str]) -> Iterator[Row]:
    starts = dict(zip(stored.names, stored.starts, strict=True)) if views else {}
    for name, view in views.items():
        if not is_c_order(view.shape, view.stride):
            skipped.append(name)
            continue
        start = starts[view.of] + view.byte_offset
        stop = start + prod(view.shape) * dtypes.itemsize(view.dtype)
        if view.global_shape is None:
            yield whole_row(name, view.dtype, view.shape, start, stop)
        else:
            info = (view.dtype, view.global_shape, view.flat_of)
            yield part_row(name, info, view.offsets, view.shape, start, stop)


def _ordinary(
    attempt: str, rank: int, stored: _Stored, found: list[_Extra | None], large: dict[int, str]
) -> ShardColumns:
    """`columns_from` of `_rows` where safetensors knows all dtypes and shapes: nearly always, and faster."""
    import numpy as np

    infos: list[Info] = [
        (dtype, shape, None)
        if extra is None or extra.global_shape is None
        else (dtype, extra.global_shape, extra.flat_of)
        for dtype, shape, extra in zip(stored.dtypes, stored.shapes, found, strict=True)
    ]
    parts = [
        (0,) * len(shape) if extra is None or extra.global_shape is None else extra.offsets
        for shape, extra in zip(stored.shapes, found, strict=True)
    ]
    columns = ShardColumns(
        attempt=attempt,
        rank=rank,
        names=stored.names,
        infos=infos,
        ndim=stored.ndim,
        offsets=np.array([*chain.from_iterable(parts)], np.int64),
        shape=stored.shape,
        start=stored.start,
        stop=stored.stop,
        sharded=np.array([extra is not None and extra.global_shape is not None for extra in found], np.bool_),
    )
    if not large:
        return columns
    kept = np.ones(len(found), np.bool_)
    kept[[*large]] = False
    dims = np.repeat(kept, stored.ndim)
    return replace(
        columns,
        names=[name for i, name in enumerate(stored.names) if i not in large],
        infos=[info for i, info in enumerate(infos) if i not in large],
        ndim=stored.ndim[kept],
        offsets=columns.offsets[dims],
        shape=stored.shape[dims],
        start=stored.start[kept],
        stop=stored.stop[kept],
        sharded=columns.sharded[kept],
    )


def digests_in(header: bytes) -> bytes | None:
    """The digests of a shard's own tensors, in its finished header; None if it does not keep them."""
    begin = b'"ckptengine.own":"'
    at = header.find(begin)
    if at < 0:
        return None
    return header[at + len(begin) : header.index(b'"', at + len(begin))]


def _hidden(stored: _Stored, bases: set[str], tree: str) -> list[str]:
    """Those of the bases that are no leaf; their numbers are looked for in the tree's text.

    Inside a string quotes are escaped, so the text of a leaf is found nowhere but where a leaf is.
    """
    return [
        name
        for number, name in enumerate(stored.names)
        if name in bases and f'{{"{TAG}":"t","i":{number}}}' not in tree
    ]
