"""Is one state another, in everything that counts?"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import torch

from ckptengine.adapters.aliases import dense_stride
from ckptengine.adapters.leaves import same_strides
from tests.adapters.fake import bits
from tests.adapters.test_roundtrip import addresses


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    elif type(value) in (list, tuple):
        for inner in value:
            yield from leaves(inner)


def check_equal(found: Any, saved: Any, where: str = "state") -> None:
    """Equal in types, order, dtype, shape and bits, all the way down."""
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


def check_layout(found: Any, saved: Any) -> None:
    """Dense strides and numpy's order are kept; tensors share memory exactly where they did."""
    pairs = list(zip(leaves(found), leaves(saved), strict=True))
    for tensor, source in pairs:
        stride = dense_stride(source) if not source.is_conj() else None
        if stride is not None:
            assert same_strides(tuple(source.shape), tensor.stride(), stride)
        elif source.is_contiguous():
            assert tensor.is_contiguous()
    for (one, its_source), (other, others_source) in combinations(pairs, 2):
        shared = bool(addresses(one) & addresses(other))
        if shared:
            assert addresses(its_source) & addresses(others_source)
            assert one.data_ptr() - other.data_ptr() == its_source.data_ptr() - others_source.data_ptr()
        elif its_source.numel() and not (its_source.is_conj() or others_source.is_conj()):
            assert not same_tensor(its_source, others_source)


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """One tensor under two names."""
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())


def check_numpy_order(found: Any, saved: Any) -> None:
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
