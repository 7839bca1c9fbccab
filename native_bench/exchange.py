"""What does a DDP restore cost when each byte is read once, beside one in which every rank reads all?

Groups of 2 and 4 processes restore a model that was saved by as many, cold, in turn: exchanging through
shared memory, as `Config(exchange="auto")` does on one host; over gloo, as between hosts; and each for
itself. What was read from the storage is the kernel's count of each process, not the engine's. Every element
is compared.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptengine as ck
from ckptengine import read_once
from native_bench import page_cache
from native_bench.rank_group import run_group
from native_bench.sections import Section, Table
from native_bench.targets import REPORTED, Target

MIB = 1 << 20
ROUNDS = 5
DEADLINE_S = 200
MODES = {"auto": "exchange, shared memory", "gloo": "exchange, gloo", "off": "every rank reads"}
TENSOR_NBYTES = 16 * MIB
READ_SHARE = 1.05
"""Of the checkpoint's unique bytes, what may be read."""


def section(directory: Path, quick: bool) -> Section:
    work = Path(tempfile.mkdtemp(prefix="native-bench-exchange-", dir=directory))
    worlds = (2,) if quick else (2, 4)
    samples: dict[str, list[float]] = {}
    try:
        for world in worlds:
            samples |= _group(work, world, quick)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _section(samples, worlds)


def _group(work: Path, world: int, quick: bool) -> dict[str, list[float]]:
    """Let `world` processes save and restore. Returns their figures."""
    arguments, results = [str(work), str(world)], work / f"{world}.json"
    return run_group("native_bench.exchange", arguments, world, quick, results, DEADLINE_S)


# --- in a rank -----------------------------------------------------------------------------------


class _Model(nn.Module):
    def __init__(self, tensors: int, nelem: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.parts = nn.ParameterList(
            nn.Parameter(torch.rand(nelem, generator=generator)) for _ in range(tensors)
        )


def _read_from_storage() -> int:
    """By this process so far, as the kernel has counted it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _rank(work: Path, world: int, rank: int, quick: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work}/group-{world}", rank=rank, world_size=world)
    tensors, nelem, rounds = (6, MIB // 2, 1) if quick else (32, TENSOR_NBYTES // 4, ROUNDS)
    model = _Model(tensors, nelem)
    state = {"model": DistributedDataParallel(model)}
    want = [part.detach().clone() for part in model.parts]
    unique = sum(part.nbytes for part in want)
    root = work / f"ddp-{world}"
    config = {"block_nbytes": MIB} if quick else {}
    with ck.Checkpointer(root, config=ck.Config(**config)) as ckpt:  # type: ignore[arg-type]
        ckpt.save(1, state)
    samples: dict[str, list[float]] = {}
    host = read_once.host_id
    for number in range(rounds + 1):
        for i in range(len(MODES)):
            mode = list(MODES)[(i + number) % len(MODES)]
            with torch.no_grad():
                for part in model.parts:
                    part.fill_(-1)
            read_once.host_id = (lambda: bytes([rank]) * 8) if mode == "gloo" else host
            # So little is not worth it by itself.
            exchange = {"auto": "on" if quick else "auto", "gloo": "on", "off": "off"}[mode]
            with ck.Checkpointer(root, config=ck.Config(exchange=exchange)) as ckpt:  # type: ignore[arg-type]
                if rank == 0:
                    page_cache.evict([root])
                dist.barrier()
                before, began = _read_from_storage(), time.perf_counter()
                info = ckpt.restore(state)
                seconds = time.perf_counter() - began
            read = _read_from_storage() - before
            assert all(torch.equal(a, b) for a, b in zip(model.parts, want, strict=True)), mode
            assert info.exchange.used == (mode != "off"), info.exchange
            slowest, total = torch.tensor([seconds]), torch.tensor([float(read)], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(total)
            if number:
                samples.setdefault(f"{world}.{mode}_s", []).append(slowest.item())
                samples.setdefault(f"{world}.{mode}_read", []).append(total.item() / unique)
    if rank == 0:
        (work / f"{world}.json").write_text(json.dumps(samples))
    dist.barrier()
    dist.destroy_process_group()


# --- the report ----------------------------------------------------------------------------------


def _section(samples: dict[str, list[float]], worlds: tuple[int, ...]) -> Section:
    rows, targets = [], []
    for world in worlds:
        for mode, title in MODES.items():
            seconds, off = samples[f"{world}.{mode}_s"], samples[f"{world}.off_s"]
            ratio = median(one / other for one, other in zip(seconds, off, strict=True))
            share = max(samples[f"{world}.{mode}_read"])
            beside = "–" if mode == "off" else f"{ratio:.2f}"
            rows.append(
                [f"{world} ranks, {title}", f"{median(seconds):.3f}", beside, f"{share:.3f}", str(len(off))]
            )
            if mode == "auto":
                # Nothing counts where the storage is memory.
                told = f"{share:.3f} × the unique bytes" if share else "nothing was read from a device"
                met = share <= READ_SHARE if share else None
                targets.append(
                    Target(f"DDP restore by {world} ranks, bytes read", told, f"≤ {READ_SHARE} ×", met)
                )
                told = f"{ratio:.2f} × every rank reads"
                targets.append(Target(f"DDP restore by {world} ranks, time", told, "≤ 1 ×", ratio <= 1))
            elif mode == "gloo":
                told = f"{ratio:.2f} × every rank reads"
                targets.append(Target(f"DDP restore by {world} ranks over gloo, time", told, REPORTED, None))
    text = [
        "A model of equal parameters under DDP, saved and restored cold by as many ranks of this machine. "
        "Seconds of the slowest rank, medians; × *every rank reads*: median of the ratios within a round; "
        "*read*: what all ranks together have read from the storage, as the kernel counts it, in parts of "
        "the model's bytes, the largest of the rounds. Every element is compared."
    ]
    head = ["", "s", "× every rank reads", "read", "n"]
    return Section(text=text, tables=[Table(head=head, rows=rows)], targets=targets, samples=samples)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
