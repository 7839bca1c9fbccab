"""Which bytes of one chunk are which bytes of another? Pure geometry, the whole of resharding.

A chunk is a hyper-rectangle of a global tensor, or, as FSDP1's flat parameters are, a range of the flattened
tensor. An overlap of two chunks is a `Box`; `copy_runs` turns it into the fewest contiguous copies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import msgspec

from ckptengine.format.limits import INT64_MAX, MAX_NDIM


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The elements `offsets` … `offsets + shape` of a tensor of `global_shape`, kept in C order.

    With `flat_of` the chunk is a range of the flattened tensor: `global_shape` is `(numel,)` and `flat_of`
    the true shape.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    flat_of: tuple[int, ...] | None = None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Chunk:
        """The chunk that is all of a tensor."""
        shape = tuple(shape)
        return cls(shape, (0,) * len(shape), shape)

    @property
    def nelem(self) -> int:
        return prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Does the chunk hold every element? (A whole flat chunk has the same bytes as the tensor.)"""
        return self.shape == self.global_shape

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The global tensor's true shape."""
        return self.global_shape if self.flat_of is None else self.flat_of

    def validate(self) -> None:
        """Raise `ValueError` unless the chunk lies inside its tensor and no size overflows 64 bits."""
        check_shape(self.global_shape)
        if not len(self.global_shape) == len(self.offsets) == len(self.shape):
            raise ValueError(f"global_shape, offsets and shape differ in length: {self}")
        for size, offset, length in zip(self.global_shape, self.offsets, self.shape, strict=True):
            if offset < 0 or length < 0 or offset + length > size:
                raise ValueError(f"the chunk is not inside its tensor: {self}")
        if self.flat_of is not None:
            check_shape(self.flat_of)
            if self.global_shape != (prod(self.flat_of),):
                raise ValueError(f"global_shape is not the number of elements of flat_of: {self}")


class Box(msgspec.Struct, frozen=True, gc=False):
    """An overlap in global coordinates; in flat ones, of one dimension, where a flat chunk takes part."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def check_shape(shape: Sequence[int]) -> None:
    """Raise `ValueError` for a shape no tensor has: too many dimensions, negative or overflowing sizes."""
    if len(shape) > MAX_NDIM:
        raise ValueError(f"{len(shape)} dimensions, more than {MAX_NDIM}")
    if shape and min(shape) < 0:
        raise ValueError(f"negative size in shape {tuple(shape)}")
    # Zero sizes count as one: strides are products of the other sizes, and must not overflow either.
    if (prod(shape) or prod([size or 1 for size in shape])) > INT64_MAX:
        raise ValueError(f"the sizes of shape {tuple(shape)} overflow 64 bits")


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a C-order tensor."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def intersect(a: Chunk, b: Chunk) -> Box | None:
    """The elements two chunks of one tensor share; None if there are none.

    For a flat and a rectangular chunk the box is a range of the flattened tensor that starts with a shared
    element; the elements in it that are outside the rectangle are left out by `byte_runs` and `copy_runs`.
    """
    if a.tensor_shape != b.tensor_shape:
        raise ValueError(f"chunks of different tensors: {a.tensor_shape} and {b.tensor_shape}")
    if (a.flat_of is None) != (b.flat_of is None):
        return _intersect_mixed(a, b) if a.flat_of is not None else _intersect_mixed(b, a)
    offsets = tuple(map(max, a.offsets, b.offsets))
    shape = tuple(
        min(a_offset + a_size, b_offset + b_size) - offset
        for offset, a_offset, a_size, b_offset, b_size in zip(
            offsets, a.offsets, a.shape, b.offsets, b.shape, strict=True
        )
    )
    if any(size <= 0 for size in shape):
        return None
    return Box(offsets, shape)


def _intersect_mixed(flat: Chunk, rect: Chunk) -> Box | None:
    if not flat.nelem or not rect.nelem:
        return None
    lo = flat.offsets[0]
    hi = lo + flat.shape[0]
    strides = c_strides(rect.global_shape)
    ends = (offset + size - 1 for offset, size in zip(rect.offsets, rect.shape, strict=True))
    last = sum(end * stride for end, stride in zip(ends, strides, strict=True))
    first_piece = next(_flat_pieces(rect, lo, hi), None)
    if first_piece is None:
        return None
    start = first_piece[0]
    return Box((start,), (min(hi, last + 1) - start,))


def byte_runs(box: Box, chunk: Chunk, itemsize: int) -> Iterator[tuple[int, int]]:
    """The box's bytes in a chunk that holds it: `(start, nbytes)`, ascending, as few as there can be."""
    if len(box.shape) != len(chunk.shape):
        # What a rectangle has of a flat range are neighbours in the rectangle, whatever lies between them in
        # the whole tensor.
        pieces = list(_flat_pieces(chunk, box.offsets[0], box.offsets[0] + box.shape[0]))
        if pieces:
            (_, start, _), (_, last, nelem) = pieces[0], pieces[-1]
            yield start * itemsize, (last + nelem - start) * itemsize
        return
    _check_inside(box, chunk)
    inner = _inner(box.shape, chunk.shape)
    nbytes = prod(box.shape[inner:]) * itemsize
    for start in _outer_starts(box, chunk, inner, itemsize):
        yield start, nbytes


def copy_runs(box: Box, src: Chunk, dst: Chunk, itemsize: int) -> Iterator[tuple[int, int, int]]:
    """The copies `(src_start, dst_start, nbytes)`, in bytes, that bring the box from one chunk to another.

    Box: what `intersect(src, dst)` gave. Each copy is contiguous on both sides and as long as it can be.
    """
    if (src.flat_of is None) != (dst.flat_of is None):
        flat, rect = (src, dst) if src.flat_of is not None else (dst, src)
        lo, hi = box.offsets[0], box.offsets[0] + box.shape[0]
        for flat_start, position, nelem in _flat_pieces(rect, lo, hi):
            in_flat, in_rect = (flat_start - flat.offsets[0]) * itemsize, position * itemsize
            if flat is src:
                yield in_flat, in_rect, nelem * itemsize
            else:
                yield in_rect, in_flat, nelem * itemsize
        return
    _check_inside(box, src)
    _check_inside(box, dst)
    inner = max(_inner(box.shape, src.shape), _inner(box.shape, dst.shape))
    nbytes = prod(box.shape[inner:]) * itemsize
    for src_start, dst_start in zip(
        _outer_starts(box, src, inner, itemsize), _outer_starts(box, dst, inner, itemsize), strict=True
    ):
        yield src_start, dst_start, nbytes


def _check_inside(box: Box, chunk: Chunk) -> None:
    for offset, size, chunk_offset, chunk_size in zip(
        box.offsets, box.shape, chunk.offsets, chunk.shape, strict=True
    ):
        if not chunk_offset <= offset <= offset + size <= chunk_offset + chunk_size:
            raise ValueError(f"{box} is not inside {chunk}")


def _inner(box_shape: Sequence[int], chunk_shape: Sequence[int]) -> int:
    """The dimension from which on the box is contiguous in the chunk: all after it are taken in full."""
    inner = max(len(box_shape) - 1, 0)
    while inner and box_shape[inner] == chunk_shape[inner]:
        inner -= 1
    return inner


def _outer_starts(box: Box, chunk: Chunk, inner: int, itemsize: int) -> Iterator[int]:
    """Where in the chunk, in bytes, the runs of the box start: one for each index before `inner`."""
    strides = c_strides(chunk.shape)
    base = itemsize * sum(
        (offset - chunk_offset) * stride
        for offset, chunk_offset, stride in zip(box.offsets, chunk.offsets, strides, strict=True)
    )
    steps = [
        [i * stride * itemsize for i in range(size)]
        for size, stride in zip(box.shape[:inner], strides[:inner], strict=True)
    ]
    for index in product(*steps):
        yield base + sum(index)


def _flat_pieces(chunk: Chunk, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """A rectangle's elements in the range [lo, hi): `(flat index, position in chunk, nelem)`, ascending."""
    if not chunk.nelem or lo >= hi:
        return
    inner = _inner(chunk.shape, chunk.global_shape)
    length = prod(chunk.shape[inner:])
    strides = c_strides(chunk.global_shape)
    base = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
    outer = list(zip(chunk.shape[:inner], strides[:inner], strict=True))
    count = prod(chunk.shape[:inner])

    def flat_start(piece: int) -> int:
        start = base
        for size, stride in reversed(outer):
            piece, index = divmod(piece, size)
            start += index * stride
        return start

    for piece in range(max(bisect_right(range(count), lo, key=flat_start) - 1, 0), count):
        start = flat_start(piece)
        if start >= hi:
            return
        first, last = max(start, lo), min(start + length, hi)
        if first < last:
            yield first, piece * length + first - start, last - first
