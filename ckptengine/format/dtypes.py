"""How is each dtype stored? Names are torch's without `torch.` (`"bfloat16"`), but torch is not needed.

Quantized dtypes are absent: their scales are not in the tensor's bytes, so the bytes alone would not restore
them.
"""

from __future__ import annotations

from collections.abc import Iterable

# name -> (bytes per element, safetensors code). torch.float4_e2m1fn_x2 packs two values in an element of one
# byte; safetensors' F4 counts the values instead, so that its shape differs from torch's, and it is stored as
# bytes here.
_DTYPES: dict[str, tuple[int, str | None]] = {
    "float64": (8, "F64"),
    "float32": (4, "F32"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "int64": (8, "I64"),
    "int32": (4, "I32"),
    "int16": (2, "I16"),
    "int8": (1, "I8"),
    "uint64": (8, "U64"),
    "uint32": (4, "U32"),
    "uint16": (2, "U16"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
    "complex64": (8, "C64"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e4m3fnuz": (1, "F8_E4M3FNUZ"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e5m2fnuz": (1, "F8_E5M2FNUZ"),
    "float8_e8m0fnu": (1, "F8_E8M0"),
    "float4_e2m1fn_x2": (1, None),
    "complex128": (16, None),
    "complex32": (4, None),
    "bits16": (2, None),
    "bits8": (1, None),
    "bits4x2": (1, None),
    "bits2x4": (1, None),
    "bits1x8": (1, None),
    **{f"{sign}int{bits}": (1, None) for sign in ("", "u") for bits in range(1, 8)},
}
_BY_CODE = {code: name for name, (_, code) in _DTYPES.items() if code is not None}
_MAX_ALIGNMENT = 16
_ALIGNMENTS = {name: min(itemsize, _MAX_ALIGNMENT) for name, (itemsize, _) in _DTYPES.items()}


def names() -> Iterable[str]:
    """All dtypes whose tensors can be stored."""
    return _DTYPES.keys()


def is_known(name: str) -> bool:
    """Can tensors of this dtype be stored?"""
    return name in _DTYPES


def itemsize(name: str) -> int:
    """Bytes per element; `KeyError` for an unknown dtype."""
    return _DTYPES[name][0]


def alignment(name: str) -> int:
    """Where a tensor of this dtype may start: at multiples of its item size, capped at 16."""
    return _ALIGNMENTS[name]


def safetensors_code(name: str) -> str | None:
    """safetensors' name of the dtype; None if it has none and the tensor is stored as bytes."""
    return _DTYPES[name][1]


def torch_name(code: str) -> str:
    """The dtype a safetensors code stands for; `KeyError` for one this format does not use."""
    return _BY_CODE[code]
