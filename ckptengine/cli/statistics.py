"""What are the statistics of a tensor, from its bytes alone?

numpy knows neither bfloat16 nor the 8- and 4-bit floats: they are widened to float32, which holds them all.
A complex tensor is described by its magnitudes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_STEP_ELEMENTS = 1 << 18
"""Elements looked at at once: their copies as float64 stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """count, zeros, nan, inf: numbers of elements. The rest is over finite ones; None if there are none."""

    count: int
    zeros: int
    nan: int
    inf: int
    min: int | float | None
    max: int | float | None
    mean: float | None
    std: float | None
    magnitude: bool


def can_describe(dtype: str) -> bool:
    """Do the bytes of this dtype mean numbers?"""
    return dtype in _DECODERS


class Accumulator:
    """Takes a tensor's bytes piece by piece. A piece holds whole elements."""

    def __init__(self, dtype: str) -> None:
        self._decode = _DECODERS[dtype]
        self._magnitude = dtype.startswith("complex")
        self._count = self._zeros = self._nan = self._inf = self._finite = 0
        self._min: int | float | None = None
        self._max: int | float | None = None
        self._mean = self._m2 = 0.0

    def add(self, data: Array) -> None:
        """data: bytes, as uint8."""
        values = self._decode(data)
        for start in range(0, values.size, _STEP_ELEMENTS):
            with np.errstate(all="ignore"):
                self._add(values[start : start + _STEP_ELEMENTS])

    def _add(self, values: Array) -> None:
        self._count += values.size
        self._zeros += values.size - int(np.count_nonzero(values))
        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            if not finite.all():
                self._nan += int(np.count_nonzero(np.isnan(values)))
                self._inf += int(np.count_nonzero(np.isinf(values)))
                values = values[finite]
        if not values.size:
            return
        low, high = values.min().item(), values.max().item()
        self._min = low if self._min is None else min(self._min, low)
        self._max = high if self._max is None else max(self._max, high)
        # Chan's update: two groups' means and squared deviations merge without losing digits to large sums.
        wide = values.astype(np.float64)
        mean = float(wide.mean())
        wide -= mean
        m2 = float(np.dot(wide, wide))
        total = self._finite + values.size
        delta = mean - self._mean
        self._mean += delta * values.size / total
        self._m2 += m2 + delta * delta * self._finite * values.size / total
        self._finite = total

    def result(self) -> Statistics:
        some = self._finite > 0
        return Statistics(
            count=self._count,
            zeros=self._zeros,
            nan=self._nan,
            inf=self._inf,
            min=self._min,
            max=self._max,
            mean=self._mean if some else None,
            std=math.sqrt(self._m2 / self._finite) if some else None,
            magnitude=self._magnitude,
        )


def _plain(dtype: str) -> Callable[[Array], Array]:
    little_endian = np.dtype(dtype).newbyteorder("<")
    return lambda data: data.view(little_endian)


def _bool(data: Array) -> Array:
    result: Array = (data != 0).view(np.uint8)
    return result


def _bfloat16(data: Array) -> Array:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _complex(part: str) -> Callable[[Array], Array]:
    def magnitudes(data: Array) -> Array:
        parts = data.view(part).astype(np.float64)
        result: Array = np.hypot(parts[0::2], parts[1::2])
        return result

    return magnitudes


def _from_table(table: Callable[[], Array]) -> Callable[[Array], Array]:
    return lambda data: table()[data]


def _float4_pairs(data: Array) -> Array:
    # Two values in a byte, the lower half first.
    table = _small_float(exponent_bits=2, mantissa_bits=1, bias=1, kind="finite")
    result: Array = np.stack((table[data & 15], table[data >> 4]), axis=-1).reshape(-1)
    return result


@lru_cache
def _small_float(*, exponent_bits: int, mantissa_bits: int, bias: int, kind: str) -> Array:
    """Every value of a small float, by its bits.

    kind: `"ieee"` has infinities and NaNs in the highest exponent; `"fn"` has only a NaN, with all bits set;
    `"fnuz"` only one, where minus zero would be; `"finite"` has neither.
    """
    values = []
    for bits in range(1 << (1 + exponent_bits + mantissa_bits)):
        sign = -1.0 if bits >> (exponent_bits + mantissa_bits) else 1.0
        exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
        mantissa = bits & ((1 << mantissa_bits) - 1)
        highest = exponent == (1 << exponent_bits) - 1
        if kind == "ieee" and highest:
            value = math.nan if mantissa else sign * math.inf
        elif (kind == "fn" and highest and mantissa == (1 << mantissa_bits) - 1) or (
            kind == "fnuz" and sign < 0 and not exponent and not mantissa
        ):
            value = math.nan
        else:
            fraction = mantissa / (1 << mantissa_bits)
            value = sign * (
                math.ldexp(1 + fraction, exponent - bias) if exponent else math.ldexp(fraction, 1 - bias)
            )
        values.append(value)
    return np.array(values, dtype=np.float32)


@lru_cache
def _e8m0() -> Array:
    return np.array([*(math.ldexp(1.0, bits - 127) for bits in range(255)), math.nan], dtype=np.float32)


def _small(exponent_bits: int, mantissa_bits: int, bias: int, kind: str) -> Callable[[Array], Array]:
    return _from_table(
        lambda: _small_float(exponent_bits=exponent_bits, mantissa_bits=mantissa_bits, bias=bias, kind=kind)
    )


_DECODERS: dict[str, Callable[[Array], Array]] = {
    **{
        name: _plain(name)
        for name in (
            *("float64", "float32", "float16"),
            *("int64", "int32", "int16", "int8"),
            *("uint64", "uint32", "uint16", "uint8"),
        )
    },
    "bfloat16": _bfloat16,
    "bool": _bool,
    "complex128": _complex("<f8"),
    "complex64": _complex("<f4"),
    "complex32": _complex("<f2"),
    "float8_e4m3fn": _small(4, 3, 7, "fn"),
    "float8_e4m3fnuz": _small(4, 3, 8, "fnuz"),
    "float8_e5m2": _small(5, 2, 15, "ieee"),
    "float8_e5m2fnuz": _small(5, 2, 16, "fnuz"),
    "float8_e8m0fnu": _from_table(_e8m0),
    "float4_e2m1fn_x2": _float4_pairs,
}
