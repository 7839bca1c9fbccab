"""Is a compressed save ever slower than a raw one, where the device is slower than the codec?

The engine's own writer writes one shard of weights and Adam's moments through a store whose files take so
many bytes a second, one write after the other, as a device would. At each rate raw, zstd and auto take turns,
and each is read back and compared once. How fast the codec itself is, a store that keeps nothing tells.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ckptengine.format import dtypes
from ckptengine.format.blocks import AS_IT_IS
from ckptengine.format.entries import ShardHeader, TensorEntry
from ckptengine.format.layout import PAD_PREFIX, lay_out
from ckptengine.format.shard import PREFIX_NBYTES, decode_header, encode_header, header_nbytes
from ckptengine.read.plan import Destination
from ckptengine.read.reader import read_shard
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import BlockWriter
from ckptengine.write.methods import History
from ckptengine.write.shard_writer import Compression, write_shard
from native_bench import cases
from native_bench.cases import MIB, Case
from native_bench.sections import Section, Table
from native_bench.targets import Target

RATES = (100 * MIB, 200 * MIB, 400 * MIB, 800 * MIB)
CODECS = ("raw", "zstd", "auto")
ROUNDS = 5
BLOCK_NBYTES = 4 * MIB
THREADS = 4
ALLOWED = 1.0
"""Of the time of a raw save."""


class Device:
    """A `Store` whose files take `rate` bytes per second; None: all at once, and nothing is kept."""

    def __init__(self, rate: float | None) -> None:
        self._inner = PosixStore()
        self._rate = rate
        self._turn = threading.Lock()
        self._free_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, path: str, *, nbytes: int) -> BlockWriter:
        writer: Any = _Writer(self, self._inner.create(path, nbytes=nbytes))
        return writer  # type: ignore[no-any-return]

    def write(self, nbytes: int, do: Callable[[], None]) -> None:
        """`do` it, which is to take the device as long as so many bytes need, after what came before."""
        if self._rate is None:
            return
        # A queue, not a lock that is passed on: a device needs no thread to be woken for its next write.
        with self._turn:
            ends = self._free_at = max(time.monotonic(), self._free_at) + nbytes / self._rate
        do()
        time.sleep(max(0.0, ends - time.monotonic()))


class _Writer:
    def __init__(self, device: Device, inner: BlockWriter) -> None:
        self._device, self._inner = device, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def direct(self) -> bool:
        return True  # the rate is this device's, whatever file system is below it

    def pwrite(self, offset: int, data: memoryview) -> None:
        self._device.write(len(data), lambda: self._inner.pwrite(offset, data))


class Shard:
    """One rank's state as it is staged: its header but for the codec, and the bytes of its data section."""

    def __init__(self, nbytes: int) -> None:
        case = Case(name="shard", title="", kind="model", nbytes=nbytes, count=117)
        layout = cases.layout(case, 0)
        source = np.zeros(layout.extent, np.uint8)
        cases.fill(case, 0, memoryview(source))
        placed, size = lay_out([(t.name, t.nbytes, dtypes.alignment(t.dtype)) for t in layout.tensors])
        spans = [span for span in placed if not span[0].startswith(PAD_PREFIX)]
        self.data = np.zeros(size, np.uint8)
        self._tensors = []
        for tensor, (name, start, stop) in zip(layout.tensors, spans, strict=True):
            self.data[start:stop] = source[tensor.offset : tensor.offset + tensor.nbytes]
            self._tensors.append(TensorEntry(name, tensor.dtype, tensor.shape, start, stop))

    def header(self, codec: str) -> ShardHeader:
        run = "a000001-000000000000-00000000"
        return ShardHeader(
            run=run,
            attempt=f"{run}-000001.0",
            step=1,
            rank=0,
            world_size=1,
            codec="raw" if codec == "raw" else "zstd",
            block_nbytes=BLOCK_NBYTES,
            data_nbytes=len(self.data),
            tensors=tuple(self._tensors),
        )

    def write(self, device: Device, path: Path, codec: str, history: History) -> float:
        """Seconds until it is durable."""
        template = encode_header(self.header(codec))
        compression = None if codec == "raw" else Compression(1, codec == "auto", history)
        began = time.perf_counter()
        write_shard(
            device,
            str(path),
            template=template,
            data=memoryview(self.data),
            block_nbytes=BLOCK_NBYTES,
            compression=compression,
            threads=THREADS,
        )
        return time.perf_counter() - began

    def check(self, path: Path) -> tuple[float, float]:
        """Compare what lies there. Returns the share of its blocks that are compressed, and the ratio."""
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(PREFIX_NBYTES)
            whole = prefix + file.read(header_nbytes(prefix, str(path)) - len(prefix))
        header = decode_header(whole, path=str(path), file_nbytes=size)
        out = np.zeros(len(self.data), np.uint8)
        read_shard(PosixStore(), str(path), header, [Destination(0, len(out), out.ctypes.data)])
        if not np.array_equal(out, self.data):
            raise AssertionError(f"{path} came back as something else")
        methods = header.methods or ""
        packed = sum(method != AS_IT_IS for method in methods)
        return (packed / len(methods) if methods else 0.0), len(self.data) / size


def section(directory: Path, quick: bool) -> Section:
    nbytes, rates, rounds = (8 * MIB, RATES[:1], 1) if quick else (128 * MIB, RATES, ROUNDS)
    shard = Shard(nbytes)
    root = Path(tempfile.mkdtemp(prefix="native-bench-device-", dir=directory))
    try:
        path = root / "shard"
        codec_rate = _codec_rate(shard, path, rounds)
        samples: dict[str, list[float]] = {}
        kept: dict[tuple[float, str], tuple[float, float]] = {}
        for rate in rates:
            history = {codec: History() for codec in CODECS}
            for number in range(rounds + 1):  # the first finds out how fast the device is
                for i in range(len(CODECS)):
                    codec = CODECS[(i + number) % len(CODECS)]
                    seconds = shard.write(Device(rate), path, codec, history[codec])
                    if number:
                        samples.setdefault(f"{codec}.{rate // MIB}_mib_s", []).append(seconds)
                    if number == rounds:
                        kept[rate, codec] = shard.check(path)
                    os.unlink(path)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return _section(len(shard.data), codec_rate, rates, rounds, samples, kept)


def _codec_rate(shard: Shard, path: Path, rounds: int) -> float:
    """Bytes per second of a compressed save to a device that takes no time."""
    seconds = []
    for _ in range(rounds):
        seconds.append(shard.write(Device(None), path, "zstd", History()))
        os.unlink(path)
    return len(shard.data) / median(seconds)


def _section(
    nbytes: int,
    codec_rate: float,
    rates: tuple[int, ...],
    rounds: int,
    samples: dict[str, list[float]],
    kept: dict[tuple[float, str], tuple[float, float]],
) -> Section:
    rows = []
    worst: dict[str, tuple[float, int]] = {}
    for rate in rates:
        middle = {codec: median(samples[f"{codec}.{rate // MIB}_mib_s"]) for codec in CODECS}
        gains = {codec: middle["raw"] / middle[codec] for codec in ("zstd", "auto")}
        packed, ratio = kept[rate, "auto"]
        rows.append(
            [
                f"{rate // MIB} MiB/s",
                *(f"{middle[codec]:.2f}" for codec in CODECS),
                *(f"{gains[codec]:.2f} ×" for codec in ("zstd", "auto")),
                f"{packed:.0%} of the blocks, ratio {ratio:.2f}",
                str(rounds),
            ]
        )
        for codec, gain in gains.items():
            if rate < codec_rate:
                worst[codec] = min(worst.get(codec, (gain, rate)), (gain, rate))
    targets = []
    for codec in ("zstd", "auto"):
        figure = f'save, `codec="{codec}"`, on devices slower than the codec, beside raw'
        if codec in worst:
            gain, rate = worst[codec]
            told = f"{gain:.2f} × raw at worst (at {rate // MIB} MiB/s)"
            targets.append(Target(figure, told, f"≥ {ALLOWED:g} ×", round(gain, 2) >= ALLOWED))
        else:
            targets.append(Target(figure, "no device was slower", f"≥ {ALLOWED:g} ×", None))
    text = [
        f"One shard of {nbytes / MIB:.0f} MiB, bfloat16 weights with Adam's moments in float32, written by "
        "the engine's own writer through a store that takes so many bytes a second, one write at a time, "
        f"as a device would; on a device that takes no time zstd comes to {codec_rate / MIB:,.0f} MiB/s on "
        "all cores. Seconds are medians until the shard is durable; the first save, in which auto finds "
        "out how fast the device is, is not counted; what was written is read back and compared."
    ]
    head = ["device", "raw s", "zstd s", "auto s", "zstd is", "auto is", "auto compressed", "n"]
    return Section(text=text, tables=[Table(head=head, rows=rows)], targets=targets, samples=samples)
