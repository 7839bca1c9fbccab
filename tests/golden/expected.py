"""What the golden checkpoints hold. Nothing here may change: the files were written from it, once."""

from __future__ import annotations

import http
import re
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckptengine.adapters.tensors import LocalChunk

WORLD_SIZE = 2
STEP = 7
METADATA = {"note": "golden", "pair": (1, 2.5), "when": {2024: None}}

SHARDED = torch.arange(24, dtype=torch.float32).view(6, 4)
REPLICATED = torch.arange(5, dtype=torch.int64) * 1_000_000_007
FLAT = (torch.arange(35, dtype=torch.float64) / 3).view(5, 7)
FLAT_CUTS = (0, 13, 35)

COMMON_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8"),
    *("uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128"),
)
EXOTIC_DTYPES = (
    *("complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "float4_e2m1fn_x2", "bits16", "bits8", "bits4x2", "bits2x4", "bits1x8"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
)


def of_dtype(name: str) -> torch.Tensor:
    """Six elements whose bytes are 0, 1, 2, …; of bool every other one true."""
    dtype = getattr(torch, name)
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype)


def exotic_state() -> dict[str, Any]:
    """One tensor of each dtype that some version of torch lacks; it had all of them when this was written."""
    return {name: of_dtype(name) for name in EXOTIC_DTYPES}


def compressible_state() -> dict[str, Any]:
    """Tensors of one block each, which are stored best as they are, compressed, or as planes of each size."""
    count = torch.arange(512, dtype=torch.int64)
    noise = torch.zeros(4096, dtype=torch.int64)
    for i in range(1, 4096):
        noise[i] = (noise[i - 1] * 1_103_515_245 + 12_345) % 2**31
    return {
        "noise": (noise >> 16).to(torch.uint8),
        "text": torch.frombuffer(bytearray(b"all work and no play " * 196)[:4096], dtype=torch.uint8),
        "half": ((noise[:2048] >> 8) % 1000 / 1000 + 1).to(torch.bfloat16),
        "single": ((noise[:1024] >> 4) / 2**28 + 1).to(torch.float32),
        "double": count * 1_000_003,
    }


def layouts() -> dict[str, torch.Tensor]:
    line = torch.arange(40, dtype=torch.int32)
    weight = torch.arange(12, dtype=torch.float32).view(3, 4)
    return {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "permuted": torch.arange(24, dtype=torch.int16).view(2, 3, 4).permute(2, 0, 1),
        "gaps": torch.arange(30, dtype=torch.int8).view(5, 6)[::2, 1:4],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
        "weight": weight,
        "tied": weight,
        "transposed": weight.t(),
        "left": line[:25],
        "right": line[15:],
    }


def values() -> dict[Any, Any]:
    """One of each kind in the format's table."""
    return {
        "none": None,
        "bool": [True, False],
        "int": [0, -7, 2**53, -(2**53), 2**53 + 1, -(2**90)],
        "float": [0.0, -0.0, 0.1, 1e300, float("inf"), float("-inf"), float("nan")],
        "complex": complex(1.5, float("-inf")),
        "str": ["", "a.b/c", "näh 雪", "\ud800"],
        "bytes": (b"", b"\0\xff", bytearray(b"abc")),
        "sets": [{1, "a", None}, frozenset({(1, 2)})],
        "dict": {1: "int", "1": "str", (2, "x"): "tuple", None: "none", 2.5: "float", "$": "dollar"},
        "odict": OrderedDict([("z", 1), ("a", [OrderedDict()])]),
        "counter": Counter({"b": 2, "a": 1, (3,): 0}),
        "deques": [deque([1, "two"]), deque([3.0, None], maxlen=5)],
        "size": torch.Size([2, 0, 5]),
        "torch": [torch.bfloat16, torch.device("cuda", 1), torch.strided, torch.channels_last],
        "enum": [http.HTTPStatus.NOT_FOUND, re.RegexFlag.ASCII | re.RegexFlag.DOTALL],
        "arrays": [
            np.arange(6, dtype=">i4").reshape(2, 3),
            np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            np.array([("a", 1.5)], dtype=[("name", "S4"), ("value", "<f8")]),
        ],
        "scalars": [np.float32(0.5), np.int8(-3), np.bool_(True), np.datetime64("2024-05-06")],
        "npdtype": np.dtype([("x", "<u2"), ("y", "<f4", (2,))]),
        "large bytes": bytes(range(256)) * 5,
        "large bytearray": bytearray(range(250)) * 5,
        "large array": np.asfortranarray(np.arange(600, dtype=np.int16).reshape(20, 30)),
        "": {"": "empty keys"},
    }


def own(rank: int) -> dict[str, Any]:
    return {"rank": rank, "rng": torch.full((4 + rank,), rank + 1, dtype=torch.uint8), f"only {rank}": [rank]}


def local_state(rank: int) -> dict[Any, Any]:
    """What a rank's part is when it is read by itself, with plain tensors in place of sharded ones."""
    start, stop = FLAT_CUTS[rank : rank + 2]
    return _state(
        rank, SHARDED[3 * rank : 3 * rank + 3].clone(), REPLICATED.clone(), FLAT.view(-1)[start:stop].clone()
    )


def whole_state() -> dict[Any, Any]:
    """What is read without a rank: whole tensors, rank 0's values, and what only other ranks have."""
    state = _state(0, SHARDED, REPLICATED, FLAT)
    state["own"]["only 1"] = [1]
    return state


def saved_state(rank: int, mesh: DeviceMesh) -> dict[Any, Any]:
    """What a rank saves, and in shape what it restores into."""
    start, stop = FLAT_CUTS[rank : rank + 2]
    return _state(
        rank,
        DTensor.from_local(SHARDED[3 * rank : 3 * rank + 3].clone(), mesh, [Shard(0)]),
        DTensor.from_local(REPLICATED.clone(), mesh, [Replicate()]),
        LocalChunk(FLAT.view(-1)[start:stop].clone(), (35,), (start,), flat_of=(5, 7)),
    )


def _state(rank: int, sharded: Any, replicated: Any, flat: Any) -> dict[Any, Any]:
    return {
        "model": {"sharded": sharded, "replicated": replicated, "flat": flat},
        "dtypes": {name: of_dtype(name) for name in COMMON_DTYPES},
        "layouts": layouts(),
        "values": values(),
        "own": own(rank),
    }
