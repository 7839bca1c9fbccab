"""How small do blocks of weights and of Adam's moments become, and how fast? `python -m native_bench.codecs`

One block of each kind is compressed and decompressed in memory, by each level of zstd, as it lies and as byte
planes, and by the parameters the engine uses for planes; on one thread and on several at once. The rounds go
through all cases in turn, so that a disturbance meets all of them; rates are medians, of uncompressed bytes:
per second of wall time, and of one core's time, which other work on the machine changes less. Every result is
compared with its source.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from ckptengine.codecs import planes, zstd
from native_bench.condition import condition_of
from native_bench.sections import Section, Table
from native_bench.targets import REPORTED, Target

MIB = 1 << 20
GIB = 1 << 30
LEVELS = (-5, 1, 3)
THREADS = (1, 2)
PLAIN, PLANES = "zstd 1", "planes, as the engine"
"""The methods that the report shows: `codec="zstd"` takes the one that leaves fewer bytes."""
TOLD = "bfloat16 weights, drawn"

Rates = dict[int, float]
"""Threads → bytes per second, all of them together."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of data by one method. `ratio`: uncompressed by compressed bytes."""

    data: str
    method: str
    nbytes: int
    ratio: float
    compress: Rates
    decompress: Rates
    compress_core: float
    decompress_core: float
    """Bytes per second of one core's time, with one thread."""


def drawn_weights(nbytes: int) -> dict[str, npt.NDArray[np.uint8]]:
    """Weights as they are before training: N(0, 0.02), as bfloat16 and as float32."""
    values = np.random.default_rng(0).standard_normal(nbytes // 2, dtype=np.float32) * np.float32(0.02)
    words = values.view(np.uint32)
    # Rounded to nearest, ties to even, as torch does.
    halves = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    return {"bfloat16 weights, drawn": halves.view(np.uint8), "float32 weights, drawn": _cut(values, nbytes)}


def trained_state(nbytes: int, steps: int) -> dict[str, npt.NDArray[np.uint8]]:
    """Weights and moments of AdamW, after training a small model on the standard library's sources."""
    import torch
    from torch.nn import functional as F

    from trainer.config import ModelConfig
    from trainer.data import Loader, read_corpus
    from trainer.model import ByteLlama

    torch.manual_seed(0)
    model = ByteLlama(ModelConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    loader = Loader(read_corpus(4 * MIB), seq_len=128, batch_size=8)
    for _ in range(steps):
        inputs, targets = loader.next_batch()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    states = list(optimizer.state.values())
    found = {"weights": [parameter.detach() for parameter in model.parameters()]}
    found |= {name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")}
    flat = {name: torch.cat([tensor.flatten() for tensor in tensors]) for name, tensors in found.items()}
    samples = {f"float32 {name}, trained": _cut(tensor.numpy(), nbytes) for name, tensor in flat.items()}
    for name, tensor in flat.items():
        samples[f"bfloat16 {name}, trained"] = _cut(tensor.bfloat16().view(torch.int16).numpy(), nbytes)
    return samples


def measure(samples: Mapping[str, npt.NDArray[np.uint8]], rounds: int) -> list[Row]:
    """Every sample by every method."""
    cases = [_Case(name, block, *method) for name, block in samples.items() for method in _methods(name)]
    for _ in range(rounds):
        for case in cases:
            for threads in THREADS:
                case.run(threads)
    return [case.row() for case in cases]


def to_markdown(rows: list[Row]) -> str:
    """Rates in GiB/s: `c` of compressing, `d` of decompressing."""
    heads = [f"{doing}, {part}" for doing in "cd" for part in ("core", *(f"{n} thr" for n in THREADS))]
    lines = [f"| data | method | ratio | {' | '.join(heads)} |", "|---|---|---|" + "---|" * len(heads)]
    for row in rows:
        compress = [row.compress_core, *row.compress.values()]
        decompress = [row.decompress_core, *row.decompress.values()]
        rates = [f"{rate / GIB:.2f}" for rate in compress + decompress]
        lines.append(f"| {row.data} | {row.method} | {row.ratio:.3f} | {' | '.join(rates)} |")
    return "\n".join(lines) + "\n"


def section(directory: Path, quick: bool) -> Section:
    """For the report."""
    nbytes, rounds, steps = (MIB, 1, 2) if quick else (12 * MIB, 5, 60)
    rows = measure(drawn_weights(nbytes) | trained_state(nbytes, steps), rounds)
    by = {(row.data, row.method): row for row in rows}
    cells = []
    for data in dict.fromkeys(row.data for row in rows):
        both = [by[data, method] for method in (PLAIN, PLANES)]
        rates = [[f"{row.compress_core / GIB:.2f}", f"{row.decompress_core / GIB:.2f}"] for row in both]
        cells.append(
            [data, f"{both[0].ratio:.2f}", *rates[0], f"**{both[1].ratio:.2f}**", *rates[1], _all(both[1])]
        )
    told = [by[name, PLANES] for name in (TOLD, "float32 exp_avg, trained", "float32 exp_avg_sq, trained")]
    measured = "; ".join(
        f"{row.data}: {row.ratio:.2f} at {row.compress_core / GIB:.2f} GiB/s a core" for row in told
    )
    head = ["data", "zstd 1: ratio", "pack GiB/s", "unpack", "planes: ratio", "pack GiB/s", "unpack"]
    head.append(f"pack, {max(THREADS)} threads")
    text = [
        f"One block of {nbytes / MIB:.0f} MiB, in memory, by zstd at level 1 as it lies and by byte planes "
        f"as the engine has them, of GiB of uncompressed bytes per second of one core; medians of {rounds}. "
        f"*Trained*: by {steps} AdamW steps of a small decoder. Every block is compared when it came back. "
        "`python -m native_bench.codecs` has other levels, too."
    ]
    target = Target("compression, ratio and rate", measured, REPORTED, None)
    return Section(text=text, tables=[Table(head=head, rows=cells)], targets=[target])


def _all(row: Row) -> str:
    return f"{row.compress[max(THREADS)] / GIB:.2f}"


def _cut(values: npt.NDArray[np.generic], nbytes: int) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8)[:nbytes].copy()


def _methods(name: str) -> list[tuple[str, int, int | None]]:
    """(name, size of the elements whose planes are taken or 1, level or None for that of the planes)."""
    size = 2 if name.startswith("bfloat16") else 4
    return [
        *((f"zstd {level}", 1, level) for level in LEVELS),
        *((f"planes, zstd {level}", size, level) for level in LEVELS),
        (PLANES, size, None),
    ]


class _Case:
    def __init__(
        self, data: str, block: npt.NDArray[np.uint8], method: str, size: int, level: int | None
    ) -> None:
        self._data, self._method = data, method
        self._block = memoryview(block)
        self._size, self._level = size, level
        # Each thread has memory of its own, made before anything is timed.
        self._memory = [memoryview(bytearray(block.nbytes)) for _ in range(2 * max(THREADS))]
        self._seconds: dict[tuple[str, int], list[float]] = {}
        self._core_seconds: dict[str, list[float]] = {}
        self._stored = bytes(self._pack(0))

    def run(self, threads: int) -> None:
        works: tuple[tuple[str, Callable[[int], object]], ...] = (
            ("compress", self._pack),
            ("decompress", self._unpack),
        )
        for doing, work in works:
            wall_s, core_s = _timed(work, threads)
            self._seconds.setdefault((doing, threads), []).append(wall_s)
            if threads == 1:
                self._core_seconds.setdefault(doing, []).append(core_s)
        for i in range(threads):
            if self._memory[2 * i + 1] != self._block:
                raise AssertionError(f"{self._data} by {self._method} came back as something else")

    def row(self) -> Row:
        nbytes = len(self._block)
        rates = {key: key[1] * nbytes / median(seconds) for key, seconds in self._seconds.items()}
        return Row(
            self._data,
            self._method,
            nbytes,
            nbytes / len(self._stored),
            {n: rates["compress", n] for n in THREADS},
            {n: rates["decompress", n] for n in THREADS},
            nbytes / median(self._core_seconds["compress"]),
            nbytes / median(self._core_seconds["decompress"]),
        )

    def _pack(self, i: int) -> memoryview:
        out, nbytes = self._memory[2 * i], len(self._block)
        pieces = [self._block] if self._size == 1 else planes.pieces(self._block, self._size)
        packed = zstd.compress_into(out, pieces, nbytes, self._level)
        return self._block if packed is None else out[:packed]

    def _unpack(self, i: int) -> None:
        out, stored = self._memory[2 * i + 1], self._stored
        if len(stored) == len(out):
            out[:] = stored
            return
        plain = zstd.decompress(stored, len(out))
        if self._size > 1:
            planes.join(plain, self._size, out)
        else:
            zstd.copy(plain, out)


def _timed(work: Callable[[int], object], threads: int) -> tuple[float, float]:
    """Wall seconds until all threads are through, and the seconds of a core they took together."""
    started = threading.Barrier(threads + 1)
    core_s = [0.0] * threads

    def run(i: int) -> None:
        started.wait()
        began = time.thread_time()
        work(i)
        core_s[i] = time.thread_time() - began

    running = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    started.wait()
    began = time.perf_counter()
    for thread in running:
        thread.join()
    return time.perf_counter() - began, sum(core_s)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m native_bench.codecs", description=__doc__)
    parser.add_argument("--mib", type=float, default=12, help="size of a block (default: 12)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each case (default: 5)")
    parser.add_argument("--steps", type=int, default=60, help="of training first; 0: none (default: 60)")
    parser.add_argument("--json", action="store_true", help="JSON instead of a Markdown table")
    given = parser.parse_args(arguments)
    nbytes = int(given.mib * MIB) // 4096 * 4096
    if nbytes <= 0 or given.rounds < 1 or given.steps < 0:
        parser.error("--mib and --rounds must be positive, --steps not negative")
    condition = condition_of(".")
    samples = drawn_weights(nbytes)
    if given.steps:
        samples |= trained_state(nbytes, given.steps)
    rows = measure(samples, given.rounds)
    if given.json:
        document = {"condition": condition.to_json(), "codecs": [asdict(row) for row in rows]}
        print(json.dumps(document, indent=2))
    else:
        print(condition.to_markdown(), to_markdown(rows), sep="\n", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
