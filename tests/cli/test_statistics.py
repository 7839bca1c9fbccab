"""Are a tensor's statistics those that torch computes?"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ckptengine.cli.statistics import Accumulator, Statistics, can_describe
from ckptengine.format import dtypes


def as_bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


def describe(tensor: torch.Tensor, pieces: int = 1) -> Statistics:
    data = tensor.contiguous().view(torch.uint8).numpy().reshape(-1).tobytes()
    accumulator = Accumulator(str(tensor.dtype).removeprefix("torch."))
    size = len(data) // pieces
    size -= size % tensor.element_size()
    for start in range(0, len(data), size or 1):
        accumulator.add(as_bytes(data[start : start + size]))
    return accumulator.result()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    ],
)
@pytest.mark.parametrize("pieces", [1, 7])
def test_floats(dtype: torch.dtype, pieces: int) -> None:
    tensor = (torch.randn(10_000, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    exact = tensor.to(torch.float64)
    found = describe(tensor, pieces)
    assert (found.count, found.nan, found.inf) == (10_000, 0, 0)
    assert found.zeros == int((exact == 0).sum())
    assert found.min == exact.min().item()
    assert found.max == exact.max().item()
    assert found.mean == pytest.approx(exact.mean().item(), rel=1e-12)
    assert found.std == pytest.approx(exact.std(correction=0).item(), rel=1e-12)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ],
)
def test_every_bit_pattern_of_the_eight_bit_floats(dtype: torch.dtype) -> None:
    for bits in range(256):
        tensor = torch.tensor([bits], dtype=torch.uint8).view(dtype)
        value = tensor.to(torch.float32).item()
        found = describe(tensor)
        if math.isnan(value):
            assert (found.nan, found.min) == (1, None), bits
        elif math.isinf(value):
            assert (found.inf, found.min) == (1, None), bits
        else:
            assert found.min == value, bits


def test_a_byte_of_four_bit_floats_holds_two_values() -> None:
    accumulator = Accumulator("float4_e2m1fn_x2")
    accumulator.add(as_bytes(bytes([0x7F, 0x21])))  # 6, -6 | 0.5, 1
    found = accumulator.result()
    assert (found.count, found.min, found.max, found.mean) == (4, -6.0, 6.0, 0.375)


def test_nan_and_infinity_are_counted_and_left_out() -> None:
    found = describe(torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 4.0]))
    assert (found.count, found.zeros, found.nan, found.inf) == (6, 2, 1, 2)
    assert (found.min, found.max, found.mean) == (0.0, 4.0, pytest.approx(4 / 3))


def test_nothing_finite_gives_no_figures() -> None:
    found = describe(torch.tensor([math.nan]))
    assert (found.min, found.max, found.mean, found.std) == (None, None, None, None)
    assert Accumulator("float32").result().count == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers_keep_their_exact_extremes(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    found = describe(torch.tensor([limits.min, limits.max, 0, 1], dtype=dtype))
    assert (found.min, found.max) == (limits.min, limits.max)
    assert found.zeros == (1 if limits.min else 2)


def test_uint64_and_bool() -> None:
    found = describe(torch.from_numpy(np.array([2**64 - 1, 5], dtype=np.uint64)))
    assert (found.min, found.max) == (5, 2**64 - 1)
    found = describe(torch.tensor([True, False, True, True]))
    assert (found.count, found.zeros, found.min, found.max, found.mean) == (4, 1, 0, 1, 0.75)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64])
def test_complex_tensors_are_described_by_their_magnitudes(dtype: torch.dtype) -> None:
    found = describe(torch.tensor([3 + 4j, 0, complex(math.nan, 0)], dtype=dtype))
    assert found.magnitude
    assert (found.zeros, found.nan, found.min, found.max, found.mean) == (1, 1, 0.0, 5.0, 2.5)


def test_half_precision_complex() -> None:
    data = np.array([3, 4, 6, 8], dtype=np.float16).tobytes()
    accumulator = Accumulator("complex32")
    accumulator.add(as_bytes(data))
    assert accumulator.result().mean == 7.5


def test_the_mean_of_large_values_far_from_zero_keeps_its_digits() -> None:
    tensor = torch.arange(1_000_000, dtype=torch.float64) + 1e9
    found = describe(tensor, 3)
    assert found.std == pytest.approx(tensor.std(correction=0).item(), rel=1e-9)


def test_bytes_without_a_meaning_are_not_described() -> None:
    undescribed = {name for name in dtypes._DTYPES if not can_describe(name)}
    assert all(name.startswith(("bits", "int", "uint")) for name in undescribed)
    assert not can_describe("bits8")
