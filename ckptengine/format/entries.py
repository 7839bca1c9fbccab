"""What does a shard hold? The values of its header, and the rules they keep whether written or read."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import msgspec

from ckptengine.format import dtypes
from ckptengine.format.blocks import BlockTable
from ckptengine.format.digest import DIGEST_NBYTES
from ckptengine.format.geometry import Chunk, c_strides, check_shape
from ckptengine.format.layout import PAD_PREFIX
from ckptengine.format.limits import INT64_MAX, MAX_NDIM, PAGE
from ckptengine.format.names import AttemptId
from ckptengine.format.tree import check_tree

METADATA_KEY = "__metadata__"
KINDS = ("bytes", "bytearray", "ndarray")


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """One stored tensor: bytes [start, stop) of the data section, in C order.

    chunk: the part of the global tensor this is; None: the tensor is whole. stride: the source's, in
    elements, where it was dense but not in C order. placement: for people. kind, descr: a large value kept as
    a tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    chunk: Chunk | None = None
    stride: tuple[int, ...] | None = None
    placement: str | None = None
    kind: str | None = None
    descr: Any = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class ViewEntry(msgspec.Struct, frozen=True, gc=False):
    """A tensor whose bytes are those of the tensor `of`, from `byte_offset` on.

    stride: in elements; None: C order.
    """

    name: str
    of: str
    byte_offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    chunk: Chunk | None = None
    placement: str | None = None

    @property
    def extent_nbytes(self) -> int:
        """Bytes of the base tensor from the view's first element to the end of its last."""
        return _extent(self.shape, self.stride) * dtypes.itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """All that a shard says about its bytes.

    tensors: in offset order, without pads. replicas: name → the rank whose shard holds the bytes. digests: 16
    bytes per block, joined. stored_nbytes, methods: each block's stored length, and one character that says
    how it is stored (`blocks.METHODS`), in compressed shards only. own: `per_rank.OWN_DIGITS` hexadecimal
    digits for each of `own_entries`, joined; None in a shard that does not have them. header_nbytes: where
    the data begins.
    """

    run: str
    attempt: str
    step: int
    rank: int
    world_size: int
    codec: Literal["raw", "zstd"]
    block_nbytes: int
    data_nbytes: int
    tensors: tuple[TensorEntry, ...]
    views: tuple[ViewEntry, ...] = ()
    replicas: dict[str, int] = field(default_factory=dict)
    tree: Any = None
    digests: bytes = b""
    stored_nbytes: tuple[int, ...] | None = None
    methods: str | None = None
    own: bytes | None = None
    header_nbytes: int = 0

    @property
    def blocks(self) -> BlockTable:
        return BlockTable(self.data_nbytes, self.block_nbytes)

    @property
    def leaf_names(self) -> tuple[str, ...]:
        """The names a tree's tensor indices stand for."""
        return (*[t.name for t in self.tensors], *[v.name for v in self.views], *self.replicas)

    @property
    def own_entries(self) -> list[TensorEntry]:
        """The whole tensors, and the large values: no part of what other ranks hold parts of."""
        return [entry for entry in self.tensors if entry.chunk is None]

    def block_digest(self, i: int) -> bytes:
        """The digest of block i's uncompressed bytes."""
        return self.digests[i * DIGEST_NBYTES : (i + 1) * DIGEST_NBYTES]

    def validate(self) -> None:
        """Raise `ValueError`, naming the entry, unless all but the digests keeps the rules of the format."""
        attempt = AttemptId.parse(self.attempt)
        if str(attempt.run) != self.run:
            raise ValueError(f"attempt {self.attempt} is not of run {self.run}")
        if not 0 <= self.step <= INT64_MAX:
            raise ValueError(f"step {self.step} is out of range")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of a world of {self.world_size}")
        if self.codec not in ("raw", "zstd"):
            raise ValueError(f"unknown codec {self.codec!r}")
        _ = self.blocks
        self._validate_tensors()
        by_name = {entry.name: entry for entry in self.tensors} if self.views else {}
        for view in self.views:
            try:
                _validate_view(view, by_name)
            except ValueError as error:
                raise ValueError(f"view {view.name!r}: {error}") from None
        for name, rank in self.replicas.items():
            if not 0 <= rank < self.world_size or rank == self.rank:
                raise ValueError(f"replica {name!r}: its bytes cannot be in the shard of rank {rank}")
        names = self.leaf_names
        distinct = set(names)
        if len(distinct) != len(names):
            raise ValueError("two entries have the same name")
        reserved = [name for name in names if name.startswith(PAD_PREFIX)]
        if reserved or METADATA_KEY in distinct:
            raise ValueError(f"the name {(*reserved, METADATA_KEY)[0]!r} is reserved")
        try:
            check_tree(self.tree, len(names))
        except ValueError as error:
            raise ValueError(f"tree: {error}") from None

    def _validate_tensors(self) -> None:
        at = 0
        rules = {name: (dtypes.itemsize(name), dtypes.alignment(name)) for name in dtypes.names()}
        # What does not depend on the place, as a model has far fewer kinds of chunks than tensors.
        checked: dict[Any, tuple[int, int]] = {}
        for entry in self.tensors:
            start, stop, shape = entry.start, entry.stop, entry.shape
            if not at <= start < at + PAGE:
                raise ValueError(
                    f"tensor {entry.name!r}: starts at {start}, which leaves a hole or an overlap at {at}"
                )
            at = stop
            if entry.kind is None and entry.descr is None:
                if entry.chunk is None and entry.stride is None:
                    nbytes, alignment = rules.get(entry.dtype, (0, 1))
                    if len(shape) > MAX_NDIM:
                        nbytes = 0
                    for size in shape:
                        nbytes = nbytes * size if size > 0 else 0
                else:
                    key = (entry.dtype, shape, entry.chunk, entry.stride)
                    nbytes, alignment = checked.get(key) or (-1, 1)
                # Of more than no bytes, as many as are there: so no size is too large either.
                if 0 < stop - start == nbytes and not start % alignment:
                    continue
            try:
                checked[entry.dtype, shape, entry.chunk, entry.stride] = _validate_tensor(entry)
            except ValueError as error:
                raise ValueError(f"tensor {entry.name!r}: {error}") from None
        if not at <= self.data_nbytes < at + PAGE:
            raise ValueError(f"the data section has {self.data_nbytes} bytes, but its tensors end at {at}")


def dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Do the strides place every element at an offset of its own in [0, numel)?"""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def is_c_order(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> bool:
    """Are the strides those of a C-order tensor? Strides of dimensions of size 1 do not matter."""
    if stride is None or 0 in shape:
        return True
    return all(
        size == 1 or step == expected
        for size, step, expected in zip(shape, stride, c_strides(shape), strict=True)
    )


def _extent(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> int:
    """Elements from the first to the last, both counted."""
    if stride is None or 0 in shape:
        return prod(shape)
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _validate_array(entry: TensorEntry | ViewEntry) -> None:
    """The rules tensors and views share."""
    if not dtypes.is_known(entry.dtype):
        raise ValueError(f"unknown dtype {entry.dtype!r}")
    check_shape(entry.shape)
    chunk = entry.chunk
    if chunk is not None:
        if chunk.shape != entry.shape:
            raise ValueError(f"its chunk's shape {chunk.shape} is not its own, {entry.shape}")
        chunk.validate()
    stride = entry.stride
    if stride is not None and (
        len(stride) != len(entry.shape) or any(not 0 <= step <= INT64_MAX for step in stride)
    ):
        raise ValueError(f"stride {stride} does not fit shape {entry.shape}")


def _validate_tensor(entry: TensorEntry) -> tuple[int, int]:
    """Returns how many bytes it has, and what its start must be a multiple of."""
    _validate_array(entry)
    if entry.stride is not None and not dense(entry.shape, entry.stride):
        raise ValueError(f"stride {entry.stride} is not dense for shape {entry.shape}")
    nbytes, alignment = prod(entry.shape) * dtypes.itemsize(entry.dtype), dtypes.alignment(entry.dtype)
    if entry.stop - entry.start != nbytes:
        raise ValueError(
            f"{entry.dtype} of shape {entry.shape} has {nbytes} bytes, not {entry.stop - entry.start}"
        )
    if entry.start % alignment:
        raise ValueError(f"{entry.dtype} must not start at {entry.start}")
    if entry.kind is None:
        if entry.descr is not None:
            raise ValueError("descr without kind")
    elif entry.kind not in KINDS:
        raise ValueError(f"unknown kind {entry.kind!r}")
    elif entry.chunk is not None:
        raise ValueError(f"a chunk of a value of kind {entry.kind!r}")
    elif entry.dtype != "uint8" or len(entry.shape) != 1:
        raise ValueError(f"{entry.kind} must be uint8 of one dimension")
    elif entry.kind == "ndarray":
        _validate_descr(entry.descr)
    elif entry.descr is not None:
        raise ValueError(f"{entry.kind} with descr")
    return nbytes, alignment


def _validate_descr(descr: Any) -> None:
    if not isinstance(descr, list) or len(descr) != 3:
        raise ValueError(
            "an ndarray's descr is numpy's dtype description, the shape and whether in Fortran order"
        )
    dtype, shape, fortran = descr
    if not isinstance(dtype, str | list) or not isinstance(shape, list) or not isinstance(fortran, bool):
        raise ValueError("malformed descr")
    if any(type(size) is not int for size in shape):
        raise ValueError("malformed shape in descr")
    check_shape(shape)
    check_tree(dtype, 0)


def _validate_view(view: ViewEntry, tensors: dict[str, TensorEntry]) -> None:
    _validate_array(view)
    base = tensors.get(view.of)
    if base is None:
        raise ValueError(f"there is no tensor {view.of!r} in this shard")
    if view.byte_offset < 0 or view.byte_offset + view.extent_nbytes > base.nbytes:
        raise ValueError(
            f"bytes {view.byte_offset} + {view.extent_nbytes} are not in {view.of!r} of {base.nbytes} bytes"
        )
