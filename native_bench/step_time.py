"""How much longer do training steps take while a save is under way? A decoder trains for real, on all cores.

Blocks of a few steps, without a save, with one that copies first, and with one that overlaps, in rotated
order. A save is requested before the first step of its block. What it costs is the call, and what the steps
that begin before it is committed take longer than the block's others: the machine's moods last longer than a
block.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

import ckptengine as ck
from native_bench.sections import Section, Table
from native_bench.targets import REPORTED, Target
from trainer.config import ModelConfig
from trainer.data import Loader, read_corpus
from trainer.model import ByteLlama

MIB = 1 << 20
MODES = ("none", "copy", "overlap")
STEPS = 4
"""Of a block: the save of the first one is committed before the last."""
ROUNDS = 7
TITLES = {"none": "no save", "copy": "copied snapshot", "overlap": "overlap"}


def section(directory: Path, quick: bool) -> Section:
    if quick:
        model, batch, rounds = ModelConfig(dim=64, n_layers=2, ffn_dim=128), 1, 1
    else:
        model = ModelConfig(dim=768, n_layers=8, n_heads=8, n_kv_heads=8, ffn_dim=2112)
        batch, rounds = 1, ROUNDS
    training = Training(model, batch)
    samples: dict[str, list[float]] = {}
    root = Path(tempfile.mkdtemp(prefix="native-bench-steps-", dir=directory))
    try:
        with ck.Checkpointer(root / "copy", config=ck.Config(keep_last=1)) as copying:
            with ck.Checkpointer(
                root / "overlap", config=ck.Config(keep_last=1, snapshot="overlap")
            ) as overlapping:
                savers = {"none": None, "copy": copying, "overlap": overlapping}
                for number in range(rounds + 1):
                    for i in range(len(MODES)):
                        mode = MODES[(i + number) % len(MODES)]
                        figures = _block(training, savers[mode], number)
                        if number:  # the first makes arenas, writers, and what torch allocates once
                            for figure, value in figures.items():
                                samples.setdefault(f"{mode}.{figure}", []).extend(value)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return _section(training, samples, rounds)


class Training:
    """`step` is one step of the optimizer on one batch."""

    def __init__(self, config: ModelConfig, batch: int) -> None:
        torch.manual_seed(0)
        self._model = ByteLlama(config)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._loader = Loader(read_corpus(4 * MIB), seq_len=config.seq_len, batch_size=batch)
        self.tokens = batch * config.seq_len
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self.step()  # makes the moments
        self.state: dict[str, Any] = {"train": ck.training_state(self._model, self._optimizer)}
        self.nbytes = 3 * sum(parameter.nbytes for parameter in self._model.parameters())

    def step(self) -> None:
        inputs, targets = self._loader.next_batch()
        F.cross_entropy(self._model(inputs).flatten(0, 1), targets.flatten()).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()


def _block(training: Training, saver: ck.Checkpointer | None, number: int) -> dict[str, list[float]]:
    began = time.perf_counter()
    handle = saver.async_save(number, training.state) if saver is not None else None
    call_s = time.perf_counter() - began
    beside: list[float] = []
    apart: list[float] = []
    for _ in range(STEPS):
        busy = handle is not None and not handle.done()
        (beside if busy else apart).append(_timed(training.step))
    if handle is None:
        return {"step_s": apart}
    handle.result()
    if not apart:  # a storage so slow that all steps were beside the save
        apart.append(_timed(training.step))
    times, alone = handle.times, median(apart)
    return {
        "call_s": [call_s],
        "step_s": beside,
        "slower": [median(beside) / alone] if beside else [],
        "added_s": [call_s + sum(beside) - alone * len(beside)],
        "waited_s": [times.waited_s],
        "save_s": [times.committed - times.requested],
    }


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _section(training: Training, samples: dict[str, list[float]], rounds: int) -> Section:
    middle = {name: median(values) for name, values in samples.items() if values}
    alone = middle["none.step_s"]
    rows = [[TITLES["none"], "–", f"{alone:.3f}", "1.00", "–", "–", "–", str(len(samples["none.step_s"]))]]
    targets = []
    for mode in ("copy", "overlap"):
        # A save so short that it was over before the first step began slows none down.
        step, slower = middle.get(f"{mode}.step_s"), middle.get(f"{mode}.slower", 1.0)
        added = middle[f"{mode}.added_s"]
        rows.append(
            [
                TITLES[mode],
                f"{1e3 * middle[f'{mode}.call_s']:.1f}",
                "–" if step is None else f"{step:.3f}",
                f"{slower:.2f}",
                f"{1e3 * middle[f'{mode}.waited_s']:.1f}",
                f"{added:.3f}",
                f"{middle[f'{mode}.save_s']:.2f}",
                str(rounds),
            ]
        )
        told = f"{slower:.2f} × a step without; {added:.2f} s more per save"
        targets.append(Target(f"step time beside a save, {TITLES[mode]}", told, REPORTED, None))
    head = [
        "",
        "call ms",
        "step s",
        "× a step without",
        "optimizer waited ms",
        "a save adds s",
        "save s",
        "n",
    ]
    text = [
        f"A decoder with {training.parameters / 1e6:.0f} million parameters and AdamW "
        f"({training.nbytes / MIB:,.0f} MiB of float32) trains on {training.tokens} tokens a step, on all "
        "cores, which the writer has to share. Saves go to the same file system as in the comparison. "
        "*Step*: one that begins while a save is in flight, beside those of the same few steps that do not; "
        "*a save adds*: the call, and what such steps take longer; *save*: from the request to the commit. "
        "All are medians."
    ]
    return Section(text=text, tables=[Table(head=head, rows=rows)], targets=targets, samples=samples)
