"""How do numpy's arrays, scalars and dtypes become JSON, and come back? By numpy's own dtype descriptions."""

from __future__ import annotations

import warnings
from math import prod
from typing import Any

import numpy as np

# Void, bytes, str, the numbers and the dates. Not objects, nor what extensions add, whose description is not
# theirs.
_KINDS = frozenset("biufcmMSUV")


def pack_dtype(dtype: np.dtype[Any]) -> Any:
    """The dtype's description, as JSON. ValueError unless it describes all of the dtype."""
    try:
        if dtype.hasobject or dtype.kind not in _KINDS:
            raise ValueError("not a plain dtype")
        with warnings.catch_warnings():
            # numpy warns where a description loses metadata.
            warnings.simplefilter("error")
            descr = np.lib.format.dtype_to_descr(dtype)
        packed = _listed(descr)
        if unpack_dtype(packed) != dtype:
            raise ValueError("its description loses part of it")
    except (ValueError, TypeError, UserWarning) as error:
        raise ValueError(f"dtype {dtype} ({error})") from None
    return packed


def unpack_dtype(descr: Any) -> np.dtype[Any]:
    """The described dtype; ValueError or TypeError if it is malformed, or holds objects."""
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_unlisted(descr))
    if dtype.hasobject:
        raise ValueError("numpy dtype with objects")
    return dtype


def pack_array(array: np.ndarray[Any, Any]) -> tuple[Any, bool, bytes]:
    """`(description, in Fortran order?, bytes)`."""
    descr = pack_dtype(array.dtype)
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return descr, fortran, array.tobytes("F" if fortran else "C")


def unpack_array(
    descr: Any, shape: Any, fortran: bool, data: bytes | bytearray | memoryview
) -> np.ndarray[Any, Any]:
    """The array, in memory of its own."""
    dtype = unpack_dtype(descr)
    if type(shape) is not list or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"malformed shape {shape!r:.80}")
    if len(data) != prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for an array of shape {tuple(shape)} and dtype {dtype}")
    array: np.ndarray[Any, Any] = np.empty(shape, dtype, order="F" if fortran else "C")
    if data:
        # Both sides as flat bytes in memory order: assigning elements would not carry the padding of a
        # struct.
        array.reshape(-1, order="A").view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    return array


def pack_scalar(value: np.generic) -> tuple[Any, bytes]:
    """`(description, bytes)`."""
    if type(value) is not value.dtype.type:
        raise ValueError(f"type {type(value).__qualname__}")
    # An empty str_ has an item size of 0, and bytes nevertheless.
    return pack_dtype(value.dtype), value.tobytes()[: value.dtype.itemsize]


def unpack_scalar(descr: Any, data: bytes) -> Any:
    return unpack_array(descr, [], False, data)[()]


def _listed(descr: Any) -> Any:
    return [_listed(part) for part in descr] if isinstance(descr, tuple | list) else descr


def _unlisted(descr: Any) -> Any:
    """A description as numpy wants it: a str, or a list of fields `(name or (title, name), description[,
    shape])`.
    """
    if type(descr) is str:
        return descr
    if type(descr) is not list:
        raise ValueError(f"malformed numpy dtype {descr!r:.80}")
    fields: list[Any] = []
    for field in descr:
        if type(field) is not list or len(field) not in (2, 3):
            raise ValueError(f"malformed field of a numpy dtype {field!r:.80}")
        name = tuple(field[0]) if type(field[0]) is list else field[0]
        shape = (tuple(field[2]) if type(field[2]) is list else field[2],) if len(field) == 3 else ()
        fields.append((name, _unlisted(field[1]), *shape))
    return fields
