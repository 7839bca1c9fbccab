"""How soon does training go on, if it begins while its state is still being read?

Mixed precision as it is mostly done: parameters in bfloat16, and with the optimizer, in float32, the master
weights and two moments. A process that has its model reads one and the same checkpoint from a cold cache:
whole and then a forward, or streaming. What each came to is compared at the end.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import ckptengine as ck
from native_bench.page_cache import drop_caches
from native_bench.sections import Section, Table
from native_bench.targets import REPORTED, Target

MIB = 1 << 20
FORWARD_SHARE = 0.35
ROUNDS = 5
TITLES = {"full": "full restore, then a step", "streaming": "streaming"}


@dataclass(frozen=True, slots=True)
class Size:
    width: int
    layers: int
    rounds: int
    tokens: int = 1
    """Of a step. Few, as a CPU takes longer to compute with a weight than to read it, and a GPU does not."""


def section(directory: Path, quick: bool) -> Section:
    size = Size(512, 4, 1) if quick else Size(2048, 16, ROUNDS)
    root = Path(tempfile.mkdtemp(prefix="native-bench-streaming-", dir=directory))
    samples: dict[str, list[float]] = {}
    try:
        training = Training(size, seed=1)
        training.step()
        with ck.Checkpointer(root, config=ck.Config(keep_last=1)) as ckpt:
            ckpt.save(1, training.state)
            wanted = [training.step(), training.step()]
            for number in range(size.rounds + 1):
                for mode in list(TITLES)[:: 1 if number % 2 else -1]:
                    training.forget()
                    cold = drop_caches([root]) != "none"
                    figures, losses = _timed(ckpt, training, streaming=mode == "streaming")
                    assert losses == wanted, f"{mode}: losses {losses}, uninterrupted {wanted}"
                    if number or size.rounds == 1:  # the first allocates what torch keeps
                        for figure, seconds in figures.items():
                            samples.setdefault(f"{mode}.{figure}", []).append(seconds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return _section(training, samples, cold=cold)


class Training:
    """A network of linear layers in bfloat16, whose optimizer has the weights in float32."""

    def __init__(self, size: Size, seed: int) -> None:
        torch.manual_seed(seed)
        blocks = [
            nn.Sequential(nn.Linear(size.width, size.width, bias=False), nn.GELU())
            for _ in range(size.layers)
        ]
        self._model = nn.Sequential(*blocks).to(torch.bfloat16)
        self._masters = [nn.Parameter(one.detach().float()) for one in self._model.parameters()]
        self._optimizer = torch.optim.AdamW(self._masters, lr=1e-4)
        self._inputs = torch.randn(size.tokens, size.width, dtype=torch.bfloat16)
        self.model_nbytes = sum(one.nbytes for one in self._model.parameters())
        self.nbytes = self.model_nbytes + 3 * sum(one.nbytes for one in self._masters)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self._model, "masters": self._masters, "optimizer": self._optimizer}

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = self._model(self._inputs).float().square().mean()
        return found

    def finish(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        for master, parameter in zip(self._masters, self._model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        self._optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._model.parameters(), strict=True):
                parameter.copy_(master)
                master.grad = None

    def step(self) -> float:
        loss = self.loss()
        self.finish(loss)
        return loss.item()

    def forget(self) -> None:
        """Everything is to come from the checkpoint."""
        with torch.no_grad():
            for tensor in (*self._model.parameters(), *self._masters):
                tensor.fill_(float("nan"))
            for state in self._optimizer.state.values():
                for value in state.values():
                    value.fill_(float("nan"))


def _timed(ckpt: ck.Checkpointer, training: Training, *, streaming: bool) -> tuple[dict[str, float], Any]:
    began = time.perf_counter()
    figures = {}
    if streaming:
        handle = ckpt.restore(training.state, streaming=True)
        figures["call_s"] = time.perf_counter() - began
    else:
        ckpt.restore(training.state)
        figures["restore_s"] = time.perf_counter() - began
    loss = training.loss()
    figures["forward_s"] = time.perf_counter() - began
    training.finish(loss)
    figures["step_s"] = time.perf_counter() - began
    if streaming:
        handle.result()
    again = time.perf_counter()
    second = training.loss()
    if not streaming:
        figures["alone_s"] = time.perf_counter() - again
    training.finish(second)
    return figures, [loss.item(), second.item()]


def _section(training: Training, samples: dict[str, list[float]], *, cold: bool) -> Section:
    middle = {name: median(values) for name, values in samples.items()}
    restore, full_step = middle["full.restore_s"], middle["full.step_s"]
    forward, step = middle["streaming.forward_s"], middle["streaming.step_s"]
    rows = [
        [
            TITLES[mode],
            f"{middle[f'{mode}.{call}']:.3f}",
            f"{middle[f'{mode}.forward_s']:.3f}",
            f"{middle[f'{mode}.forward_s'] / restore:.2f}",
            f"{middle[f'{mode}.step_s']:.3f}",
            f"{middle[f'{mode}.step_s'] / full_step:.2f}",
            str(len(samples[f"{mode}.step_s"])),
        ]
        for mode, call in (("full", "restore_s"), ("streaming", "call_s"))
    ]
    head = ["", "call s", "first forward s", "× the full restore", "first step s", "× full and step", "n"]
    share = training.model_nbytes / training.nbytes
    text = [
        f"{training.nbytes / MIB:,.0f} MiB, of which the parameters, in bfloat16, are {share:.0%}; the rest "
        "are float32 master weights and AdamW's moments. Read from "
        f"{'a cold cache' if cold else 'the page cache, which could not be emptied'} by a process that has "
        "its model and its optimizer already, and then trained for two steps, whose losses are those of the "
        "uninterrupted run. *First forward* and *first step*: from the call of restore to their end. All are "
        "medians of rounds that alternate. A "
        f"forward alone takes {middle['full.alone_s']:.3f} s."
    ]
    small = training.nbytes < 512 * MIB  # where the forward itself is what takes the time
    told = f"{forward:.3f} s, {forward / restore:.2f} × the full restore ({restore:.3f} s)"
    targets = [
        Target(
            "first forward of a streaming restore",
            told,
            REPORTED if small else f"≤ {FORWARD_SHARE:g} × the full restore",
            None if small else forward <= FORWARD_SHARE * restore,
        ),
        Target(
            "first step of a streaming restore",
            f"{step:.3f} s, {step / full_step:.2f} × full restore and step ({full_step:.3f} s)",
            REPORTED if small else "not later than a full restore + step",
            None if small else step <= full_step,
        ),
    ]
    return Section(text=text, tables=[Table(head=head, rows=rows)], targets=targets, samples=samples)
