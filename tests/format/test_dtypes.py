"""Does every torch dtype have its size, and the safetensors name that its readers know?"""

from __future__ import annotations

import pytest
import torch

from ckptengine.format import dtypes
from tests.format.strategies import DTYPES

ALL = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_dtype_of_torch_is_known_but_the_quantized(name: str) -> None:
    quantized = name.startswith(("qint", "quint"))
    assert dtypes.is_known(name) != quantized
    if not quantized:
        assert dtypes.itemsize(name) == ALL[name].itemsize


@pytest.mark.parametrize("name", DTYPES)
def test_codes_come_back_and_alignment_divides_16(name: str) -> None:
    code = dtypes.safetensors_code(name)
    assert code is None or dtypes.torch_name(code) == name
    assert 16 % dtypes.alignment(name) == 0
    assert dtypes.itemsize(name) % dtypes.alignment(name) == 0


def test_codes_are_safetensors_own() -> None:
    from safetensors.torch import _TYPES

    for code, dtype in _TYPES.items():
        name = str(dtype).removeprefix("torch.")
        if name != "float4_e2m1fn_x2":
            assert dtypes.safetensors_code(name) == code


def test_unknown_names_are_key_errors() -> None:
    assert not dtypes.is_known("float128")
    for ask in (dtypes.itemsize, dtypes.alignment, dtypes.safetensors_code, dtypes.torch_name):
        with pytest.raises(KeyError):
            ask("float128")
