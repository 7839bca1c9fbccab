"""How fast is a restore into another layout, beside one into the layout that was saved, and beside DCP's?

Groups of processes save, then others restore in rotated order: what they saved themselves, and what was saved
in another layout. Every restored element is compared with what it should be.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptengine as ck
from ckptengine.adapters.fsdp import TrainingState
from native_bench import page_cache
from native_bench.rank_group import run_group
from native_bench.sections import Section, Table
from native_bench.targets import REPORTED, Target

MIB = 1 << 20
ROUNDS = 5
DEADLINE_S = 250

# What is restored by how many ranks: what it is called, who saved it, as what, and into what.
RESTORES: dict[int, list[tuple[str, str, str, str]]] = {
    2: [
        ("2 → 2, same layout", "by2", "rows", "rows"),
        ("4 → 2", "by4", "rows", "rows"),
        ("4 → 2, DCP", "by4", "dcp", "rows"),
        ("2 → 2, Shard(1) → Shard(0)", "by2", "columns", "rows"),
        ("FSDP2 → FSDP2, same layout", "by2", "fsdp2", "fsdp2"),
        ("FSDP1 → FSDP2", "by2", "fsdp1", "fsdp2"),
    ],
    4: [
        ("4 → 4, same layout", "by4", "rows", "rows"),
        ("2 → 4", "by2", "rows", "rows"),
        ("2 → 4, DCP", "by2", "dcp", "rows"),
    ],
}
BESIDE = {
    "4 → 2": "2 → 2, same layout",
    "2 → 4": "4 → 4, same layout",
    "2 → 2, Shard(1) → Shard(0)": "2 → 2, same layout",
    "FSDP1 → FSDP2": "FSDP2 → FSDP2, same layout",
}
"""What each restore into another layout is held against."""


_GROUPS = (("save", 4), ("save", 2), ("restore", 2), ("restore", 4))


def section(directory: Path, quick: bool) -> Section:
    work = Path(tempfile.mkdtemp(prefix="native-bench-reshard-", dir=directory))
    samples: dict[str, list[float]] = {}
    try:
        # Most of a small run is the start of its processes.
        groups = (("save", 2), ("restore", 2)) if quick else _GROUPS
        for task, world in groups:
            samples |= _group(work, task, world, quick)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _section(samples, quick)


def _group(work: Path, task: str, world: int, quick: bool) -> dict[str, list[float]]:
    """Let `world` processes do it. Returns their figures."""
    arguments, results = [str(work), task, str(world)], work / f"{task}-{world}.json"
    return run_group("native_bench.reshard", arguments, world, quick, results, DEADLINE_S)


# --- in a rank -----------------------------------------------------------------------------------


class Rank:
    """One process of a group."""

    def __init__(self, work: Path, world: int, quick: bool) -> None:
        self._work = work
        self.world = world
        self._count, self._rows, self._layers, self._width = (4, 64, 2, 64) if quick else (64, 2048, 32, 2048)
        self.rounds = 1 if quick else ROUNDS
        self._mesh: DeviceMesh = init_device_mesh("cpu", (world,))

    def full(self, number: int) -> torch.Tensor:
        """The same on every rank."""
        generator = torch.Generator().manual_seed(number)
        return torch.rand(self._rows, 2048 if self._rows > 64 else 64, generator=generator)

    def tensors(self, dim: int, value: Callable[[int], torch.Tensor]) -> dict[str, DTensor]:
        return {
            f"layer.{i}.weight": distribute_tensor(value(i), self._mesh, [Shard(dim)], src_data_rank=None)
            for i in range(self._count)
        }

    def trained(self, kind: str, seed: int) -> tuple[nn.Module, TrainingState]:
        torch.manual_seed(seed)
        width = self._width
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(self._layers)))
        module: nn.Module = model
        if kind == "fsdp1":
            module = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
        else:
            fully_shard(model)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        module(torch.ones(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return module, ck.training_state(module, optimizer)

    def path(self, by: str, what: str) -> str:
        return str(self._work / by / what)

    def save(self) -> None:
        by = f"by{self.world}"
        for what, dim in (("rows", 0), ("columns", 1)):
            if not any((by, what) == case[1:3] for cases in RESTORES.values() for case in cases):
                continue
            with ck.Checkpointer(self.path(by, what)) as ckpt:
                ckpt.save(1, self.tensors(dim, self.full))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self.tensors(0, self.full), checkpoint_id=self.path(by, "dcp"))
        if self.world == 2:
            for kind in ("fsdp1", "fsdp2"):
                _, state = self.trained(kind, 1)
                with ck.Checkpointer(self.path(by, kind)) as ckpt:
                    ckpt.save(1, {"train": state})
        if dist.get_rank() == 0:
            os.sync()
        dist.barrier()

    def restore(self) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {}
        empty = self.tensors(0, lambda i: torch.full_like(self.full(i), -1.0))
        expected = {name: tensor.to_local() for name, tensor in self.tensors(0, self.full).items()}
        trained = {seed: self.trained("fsdp2", seed)[1] for seed in (1, 2)} if self.world == 2 else {}
        cases = [case for case in RESTORES[self.world] if (self._work / case[1]).exists()]
        for number in range(self.rounds + 1):
            for cold in (False, True):
                for i in range(len(cases)):
                    name, by, what, into = cases[(i + number) % len(cases)]
                    target: Any = empty if into == "rows" else {"train": trained[2]}
                    _spoil(target)
                    seconds = self._timed(self.path(by, what), what, target, cold)
                    if into == "rows":
                        wrong = [n for n, t in empty.items() if not torch.equal(t.to_local(), expected[n])]
                    else:
                        wrong = _differences(trained[1].state_dict(), trained[2].state_dict())
                    assert not wrong, f"{name}: {wrong[:3]}"
                    if number:
                        samples.setdefault(f"{name}.{'cold' if cold else 'hot'}_s", []).append(seconds)
        return samples

    def _timed(self, path: str, what: str, target: Any, cold: bool) -> float:
        with ck.Checkpointer(path) if what != "dcp" else _Nothing() as ckpt:
            if dist.get_rank() == 0:
                # Direct reads leave nothing in the page cache.
                (page_cache.evict if cold else page_cache.fill)([path])
            dist.barrier()
            began = time.perf_counter()
            if ckpt is None:
                dcp.load(target, checkpoint_id=path)
            else:
                ckpt.restore(target)
            seconds = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        pass


def _local_tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, DTensor):
        return [state.to_local()]
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _local_tensors(value)]
    return _local_tensors(state.state_dict()) if isinstance(state, TrainingState) else []


def _spoil(state: Any) -> None:
    """Nothing of an earlier restore may be taken for this one's."""
    for tensor in _local_tensors(state):
        tensor.detach().fill_(-1)


def _differences(one: Any, other: Any) -> list[int]:
    pairs = zip(_local_tensors(one), _local_tensors(other), strict=True)
    return [i for i, (a, b) in enumerate(pairs) if not torch.allclose(a, b, atol=1e-6)]


def main(work: str, task: str, world: int, rank: int, quick: bool) -> None:
    init = f"file://{work}/group-{task}-{world}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    one = Rank(Path(work), world, quick)
    if task == "save":
        one.save()
    else:
        samples = one.restore()
        if rank == 0:
            Path(work, f"{task}-{world}.json").write_text(json.dumps(samples))
    dist.barrier()
    dist.destroy_process_group()


# --- the report ----------------------------------------------------------------------------------


def _section(samples: dict[str, list[float]], quick: bool) -> Section:
    middle = {name: median(values) for name, values in samples.items()}
    rows, targets = [], []
    for name in (case[0] for cases in RESTORES.values() for case in cases):
        if f"{name}.cold_s" not in middle:
            continue
        row = [name]
        for state in ("cold", "hot"):
            seconds = middle[f"{name}.{state}_s"]
            row.append(f"{seconds:.3f}")
            beside = BESIDE.get(name)
            row.append("–" if beside is None else f"{_rate(samples, name, beside, state):.2f}")
        rows.append([*row, str(len(samples[f"{name}.cold_s"]))])
    for name, beside in BESIDE.items():
        if f"{name}.cold_s" not in middle:
            continue
        rate = _rate(samples, name, beside, "cold")
        bound, met = (REPORTED, None) if "Shard(1)" in name else ("≥ 0.8 ×", rate >= 0.8)
        targets.append(Target(f"resharding, {name}", f"{rate:.2f} × the same layout's rate", bound, met))
    for name in ("4 → 2", "2 → 4"):
        if f"{name}.cold_s" not in middle:
            continue
        times = _rate(samples, name, f"{name}, DCP", "cold")
        told = f"{times:.1f} × DCP's rate"
        most = _rate(samples, BESIDE[name], f"{name}, DCP", "cold")
        note = "" if times >= 3 else f"the same layout's restore itself is {most:.1f} × DCP's"
        targets.append(Target(f"resharding, {name}, beside DCP", told, "≥ 3 ×", times >= 3, note))
    what = "DTensors of float32 in rows over the ranks" + ("" if quick else ", 64 of 16 MiB")
    text = [
        f"{what}, and a model of linear layers with AdamW, restored into the layout they were saved in and "
        "into another. Seconds of the slowest rank, medians; *rate*: beside that of the restore into the "
        "layout that was saved, in the same round, median of the ratios. Every element is compared."
    ]
    head = ["", "cold s", "× rate", "hot s", "× rate", "n"]
    return Section(text=text, tables=[Table(head=head, rows=rows)], targets=targets, samples=samples)


def _rate(samples: dict[str, list[float]], name: str, beside: str, state: str) -> float:
    pairs = zip(samples[f"{beside}.{state}_s"], samples[f"{name}.{state}_s"], strict=True)
    return median(one / other for one, other in pairs)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "1")
