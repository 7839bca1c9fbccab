"""Is one state another, in everything that counts?"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import torch

from ckptengine.adapters.items import dense_stride
from ckptengine.adapters.leaves import same_strides
from ckptengine.adapters.objects import is_stateful
from ckptengine.adapters.tensors import LocalChunk
from tests.adapters.fake import bits


def pieces(value: Any) -> Iterator[torch.Tensor | LocalChunk]:
    """The tensors and chunks of a state, also those in its objects."""
    value = opened(value)
    if isinstance(value, torch.Tensor | LocalChunk):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from pieces(inner)
    elif type(value) in (list, tuple):
        for inner in value:
            yield from pieces(inner)


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a state, also those of its chunks."""
    for piece in pieces(value):
        yield piece.tensor if isinstance(piece, LocalChunk) else piece


def opened(value: Any) -> Any:
    """What an object is stored as; anything else itself."""
    return value.state_dict() if is_stateful(value) else value


def check_equal(found: Any, saved: Any, where: str = "state") -> None:
    """Equal in types, order, dtype, shape and bits, all the way down."""
    found, saved = opened(found), opened(saved)
    if isinstance(saved, LocalChunk):
        if isinstance(found, LocalChunk):
            assert found.chunk == saved.chunk, where
            found = found.tensor
        assert isinstance(found, torch.Tensor), where
        assert found.dtype == saved.tensor.dtype, where
        assert found.shape in (saved.chunk.shape, saved.chunk.tensor_shape), where
        assert bits(found) == bits(saved.tensor), where
        return
    if isinstance(saved, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        assert (found.dtype, found.shape) == (saved.dtype, saved.shape), where
        assert bits(found) == bits(saved), where
        return
    assert type(found) is type(saved), f"{where}: {found!r} for {saved!r}"
    if isinstance(saved, dict):
        assert list(map(typed, found)) == list(map(typed, saved)), where
        for key, value in saved.items():
            check_equal(found[key], value, f"{where}[{key!r}]")
    elif isinstance(saved, list | tuple | deque) and not isinstance(saved, torch.Size):
        assert len(found) == len(saved), where
        assert getattr(found, "maxlen", None) == getattr(saved, "maxlen", None), where
        for index, value in enumerate(saved):
            check_equal(found[index], value, f"{where}[{index}]")
    elif isinstance(saved, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (saved.dtype, saved.shape), where
        assert content(found) == content(saved), where
    elif isinstance(saved, set | frozenset):
        assert sorted(map(typed, found)) == sorted(map(typed, saved)), where
    else:
        assert typed(found) == typed(saved), where


def content(array: np.ndarray[Any, Any] | np.generic) -> bytes:
    """The bytes of an array's elements, without what lies between the fields of a structure."""
    if array.dtype.names is None:
        return array.tobytes()
    return b"".join(content(array[name]) for name in array.dtype.names)


def typed(value: Any) -> str:
    """Tells apart what `==` does not: 1 and True, 0.0 and -0.0, one nan and another."""
    if isinstance(value, float):
        return f"float {struct.pack('>d', value).hex()}"
    if isinstance(value, complex):
        return f"complex {typed(value.real)} {typed(value.imag)}"
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(typed, value))}"
    return f"{type(value).__qualname__} {value!r}"


def check_layout(found: Any, saved: Any, *, chunks: bool = True) -> None:
    """Dense strides are kept; tensors share memory exactly where they did and the format promises a tie.

    chunks: also those of `LocalChunk`s, which a load of whole tensors makes anew.
    """
    sources = list(leaves(saved))
    tensors = list(leaves(found))
    assert len(tensors) == len(sources)
    groups = tied(sources)
    kept = []
    for tensor, source, group, piece in zip(tensors, sources, groups, pieces(saved), strict=True):
        if isinstance(piece, LocalChunk) and not chunks:
            continue
        stride = None if in_other_memory(source) else dense_stride(source)
        if stride is not None:
            assert same_strides(tuple(source.shape), tensor.stride(), stride)
        elif source.is_contiguous():
            assert tensor.is_contiguous()
        if source.numel():
            kept.append((tensor, source, group))
    for (one, its_source, its_group), (other, others_source, others_group) in combinations(kept, 2):
        shared = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        assert shared == (its_group == others_group)
        if shared:
            assert one.data_ptr() - other.data_ptr() == its_source.data_ptr() - others_source.data_ptr()


def in_other_memory(tensor: torch.Tensor) -> bool:
    """Is it a view whose memory does not hold its values? They are stored from a copy, which is no view."""
    return tensor.is_conj() or tensor.is_neg()


def tied(tensors: list[torch.Tensor]) -> list[int]:
    """For each tensor a number, which those have in common that the format promises to keep tied.

    That is, of those whose bytes, from the first to the last, overlap: all, if one in C order covers them or
    if the memory they lie in is no more than they are, and each begins at a whole element of its own. Else
    only those that are the same tensor.
    """
    numbers = list(range(len(tensors)))
    reaches = sorted(
        (*reach(tensor), index)
        for index, tensor in enumerate(tensors)
        if tensor.numel() and not in_other_memory(tensor)
    )
    while reaches:
        start, stop, _ = reaches[0]
        members = []
        while reaches and reaches[0][0] < stop:
            stop = max(stop, reaches[0][1])
            members.append(reaches.pop(0)[2])
        alike: dict[Any, int] = {}
        for index in members:
            numbers[index] = alike.setdefault(identity(tensors[index]), index)
        distinct = [tensors[index] for index in alike.values()]
        covered = any(
            tensor.is_contiguous() and (tensor.data_ptr(), tensor.nbytes) == (start, stop - start)
            for tensor in distinct
        )
        aligned = all((tensor.data_ptr() - start) % tensor.itemsize == 0 for tensor in distinct)
        if aligned and (covered or stop - start <= sum(tensor.nbytes for tensor in distinct)):
            for index in members:
                numbers[index] = members[0]
    return numbers


def reach(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of its first byte in memory, and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same for one tensor under two names."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def check_numpy_order(found: Any, saved: Any) -> None:
    found, saved = opened(found), opened(saved)
    if isinstance(saved, np.ndarray):
        fortran = saved.flags.f_contiguous and not saved.flags.c_contiguous
        assert found.flags.f_contiguous if fortran else found.flags.c_contiguous
        assert found.flags.writeable
    elif isinstance(saved, dict):
        for key, value in saved.items():
            check_numpy_order(found[key], value)
    elif type(saved) in (list, tuple):
        for one, other in zip(found, saved, strict=True):
            check_numpy_order(one, other)
