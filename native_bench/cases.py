"""What is saved and restored: the cases, their tensors, and the values in them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from ckptengine.format.limits import PAGE, round_up

GIB = 1 << 30
MIB = 1 << 20

DTYPES = {"bfloat16": 2, "float32": 4}

_ALIGNMENT = 64
_LARGE = 128 << 10
"""From here on an allocator gives a tensor its own pages, and torch's begin 64 bytes into the first."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One table of the report.

    kind: `"model"`: bf16 weights and two fp32 Adam moments each; `"small"`: many tensors of 1-64 KiB. nbytes:
    of one rank's tensors, about. count: how many tensors a rank has. place: `"disk"` (the directory given) or
    `"tmpfs"`.
    apart: systems that do not take part, and why; the report says so. named: systems that targets are about,
    by name or as the fastest peers, measured in all rounds. at_most: rounds of those that no target is about.
    """

    name: str
    title: str
    kind: Literal["model", "small"]
    nbytes: int
    count: int
    world_size: int = 1
    place: Literal["disk", "tmpfs"] = "disk"
    apart: dict[str, str] = {}
    named: tuple[str, ...] = ()
    at_most: dict[str, int] = {}

    def takes(self, system: str) -> bool:
        return system not in self.apart


def _apart(reason: str, *systems: str) -> dict[str, str]:
    return dict.fromkeys(systems, reason)


_CODECS = _apart("compression is measured in `large` and on slow devices", "engine-zstd", "engine-auto")
_UNVERIFIED = _apart("what digests cost a restore is measured with one rank", "engine-unverified")


FULL = (
    Case(
        name="large",
        title="One rank, 2 GiB in 117 tensors",
        kind="model",
        nbytes=2 * GIB,
        count=117,
        named=("dcp-1", "dcp-2", "dcp-async-stager", "nvrx", "nvrx-writer", "safetensors"),
        at_most={"engine-zstd": 3, "engine-auto": 3},  # ten seconds each
    ),
    Case(
        name="small",
        title="One rank, 20,000 tensors of 1–64 KiB",
        kind="small",
        nbytes=0,
        count=20_000,
        apart={
            **_CODECS,
            **_apart(
                "passes each tensor on in shared memory of its own; a save of 20,000 took 97 s on a loaded "
                "machine on which the engine's took 0.4",
                "dcp-async-process",
            ),
            **_apart("no tensor has moments of its shape, as a model with AdamW has", "engine-overlap"),
        },
        named=("dcp-1", "dcp-2", "flashpack", "flashpack-parallel"),
    ),
    Case(
        name="two-ranks",
        title="Two ranks, 0.8 GiB in 117 tensors each",
        kind="model",
        nbytes=int(0.8 * GIB),
        count=117,
        world_size=2,
        apart={**_CODECS, **_UNVERIFIED},
        named=("dcp-2", "dcp-async-stager", "safetensors"),
    ),
    Case(
        name="tmpfs",
        title="One rank, 1 GiB in 117 tensors, on tmpfs",
        kind="model",
        nbytes=GIB,
        count=117,
        place="tmpfs",
        apart=_CODECS,
    ),
)


_ALIKE = _apart(
    "a quick run checks it in `large`",
    "engine-sync",
    "engine-overlap",
    "engine-zstd",
    "engine-auto",
    "engine-unverified",
    "torch-mmap",
    "dcp-2",
    "dcp-async-thread",
    "dcp-async-process",
    "dcp-async-stager",
    "nvrx",
    "nvrx-writer",
)
"""What a quick run need not see again: the first case has them."""

QUICK = (
    Case(name="large", title="One rank, 64 MiB in 117 tensors", kind="model", nbytes=64 * MIB, count=117),
    Case(
        name="small",
        title="One rank, 500 tensors of 1–64 KiB",
        kind="small",
        nbytes=0,
        count=500,
        apart=_ALIKE,
    ),
    Case(
        name="two-ranks",
        title="Two ranks, 32 MiB in 117 tensors each",
        kind="model",
        nbytes=32 * MIB,
        count=117,
        world_size=2,
        apart={
            **{name: why for name, why in _ALIKE.items() if name not in ("engine-overlap", "nvrx")},
            **_apart("a quick run checks it in `large`", "raw", "safetensors", "safetensors-load-file"),
        },
    ),
    Case(
        name="tmpfs",
        title="One rank, 32 MiB in 117 tensors, on tmpfs",
        kind="model",
        nbytes=32 * MIB,
        count=117,
        place="tmpfs",
        apart={**_ALIKE, **_apart("a quick run checks it in `large`", "safetensors", "torch")},
    ),
)


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor and where it lies in the memory that all workers of a rank share."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's tensors. `nbytes`: of the tensors; `extent`: of the memory that holds them."""

    tensors: tuple[Placed, ...]
    nbytes: int
    extent: int


def layout(case: Case, rank: int) -> Layout:
    """The tensors of `rank`, the same in every process. Names differ between ranks, as those of real shards
    do.

    A large tensor begins 64 bytes into a page, as torch's own allocations do: nothing here may be read into
    directly that could not be in a training process.
    """
    tensors = []
    offset = nbytes = 0
    for name, dtype, shape in _model(case) if case.kind == "model" else _small(case):
        size = math.prod(shape) * DTYPES[dtype]
        if size >= _LARGE:
            offset = round_up(offset, PAGE) + _ALIGNMENT
        else:
            offset = round_up(offset, _ALIGNMENT)
        tensors.append(Placed(f"rank{rank}.{name}", dtype, shape, offset))
        offset += size
        nbytes += size
    return Layout(tuple(tensors), nbytes, round_up(offset, PAGE))


def fill(case: Case, rank: int, memory: memoryview) -> None:
    """Put real-looking values there: weights N(0, 0.02), first moments N(0, 1e-3), second moments their
    squares.

    Values repeat after 16 MiB or more, which no codec used here looks back to.
    """
    rng = np.random.default_rng(1000 + rank)
    normal = rng.standard_normal(8 * MIB if case.nbytes > 256 * MIB else MIB, dtype=np.float32)
    pools = {
        "weight": _bfloat16(normal * np.float32(0.02)).view(np.uint8),
        "exp_avg": (normal * np.float32(1e-3)).view(np.uint8),
        "exp_avg_sq": np.square(normal * np.float32(1e-3)).view(np.uint8),
    }
    target = np.frombuffer(memory, np.uint8)
    for tensor in layout(case, rank).tensors:
        pool = pools.get(tensor.name.rpartition(".")[2], pools["weight"])
        at, end = tensor.offset, tensor.offset + tensor.nbytes
        while at < end:
            start = int(rng.integers(len(pool) // 64)) * 4
            n = min(end - at, len(pool) - start)
            target[at : at + n] = pool[start : start + n]
            at += n


def _model(case: Case) -> list[tuple[str, str, tuple[int, ...]]]:
    """A decoder's parameters, each with its moments: embedding, blocks of three matrices, a norm, a head."""
    count = case.count // 3
    blocks = (count - 3) // 3
    columns = 1024 if case.nbytes >= 256 * MIB else 64
    numel = case.nbytes // 10  # bf16 weight and two fp32 moments
    rows = max(numel // columns, count)
    block_rows = int(rows * 0.7) // max(3 * blocks, 1)
    embedding_rows = (rows - 3 * blocks * block_rows) // 2
    parameters: list[tuple[str, tuple[int, ...]]] = [("model.embed.weight", (embedding_rows, columns))]
    for block in range(blocks):
        parameters += [
            (f"model.layers.{block}.{part}.weight", (block_rows, columns)) for part in ("attn", "up", "down")
        ]
    parameters += [("model.norm.weight", (columns,)), ("model.head.weight", (embedding_rows, columns))]
    found: list[tuple[str, str, tuple[int, ...]]] = [(name, "bfloat16", shape) for name, shape in parameters]
    for name, shape in parameters:
        found += [(f"optim.{name}.{part}", "float32", shape) for part in ("exp_avg", "exp_avg_sq")]
    return found


def _small(case: Case) -> list[tuple[str, str, tuple[int, ...]]]:
    """Sizes spread evenly over the powers of two, as those of norms, biases and adapters are."""
    rng = random.Random(7)
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for i in range(case.count):
        # In words of 4 bytes: torchsnapshot cannot save an odd number of bfloat16.
        nbytes = int(1024 * 2 ** rng.uniform(0, 6)) // 4 * 4
        name = f"model.blocks.{i // 10}.{i % 10}"
        kind = ("weight", "exp_avg", "exp_avg_sq")[i % 3]
        dtype = "bfloat16" if kind == "weight" else "float32"
        found.append((f"{name}.{kind}", dtype, (nbytes // DTYPES[dtype],)))
    return found


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as uint16."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
