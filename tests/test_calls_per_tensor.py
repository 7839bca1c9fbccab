"""How many calls, of Python and of C functions, does each further tensor cost?

Small tensors are bound by what is done for each of them. Calls can be counted, the same on every machine and
under every load, where microseconds cannot; bounds leave one for callbacks that others give the collector.
Each count is of what `more` tensors add, so that it also tells whether the work grows with their number and
no faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckptengine as ck
from ckptengine.adapters.restore import RestoreTarget
from ckptengine.adapters.stage import copy_items
from ckptengine.adapters.state import flatten
from ckptengine.format.shard import decode_header, encode_header, seal_header
from ckptengine.read.plan import Destination, plan_reads
from tests.adapters.fake import header_of

Make = Callable[[int], Any]
"""A state of a number of tensors."""


def flat(count: int) -> Any:
    return {f"layers.{i}.weight": torch.ones(3, 4) for i in range(count)}


def nested(count: int) -> Any:
    """A model and its optimizer's state, as their state dicts have it."""
    params = range(count // 4)
    moments = {
        i: {"step": torch.ones(()), "exp_avg": torch.ones(7), "exp_avg_sq": torch.ones(7)} for i in params
    }
    return {
        "model": {f"layers.{i}.weight": torch.ones(7) for i in params},
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "params": [*params]}]},
    }


def untrained(count: int) -> Any:
    model = nn.Sequential(*[nn.Linear(2, 3) for _ in range(count // 8)])
    return ck.training_state(model, torch.optim.Adam(model.parameters()))


def trained(count: int) -> Any:
    model = nn.Sequential(*[nn.Linear(2, 3) for _ in range(count // 8)])
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return ck.training_state(model, optimizer)


def calls_of(work: Callable[[], object]) -> int:
    counted = 0

    def count(frame: object, event: str, what: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counted


def calls_per_tensor(prepare: Callable[[int], Callable[[], object]], more: int = 400) -> float:
    """prepare: gives the work for so many tensors."""
    prepare(more)()  # whatever is only done once
    counts = [calls_of(prepare(more * times)) for times in (1, 2, 4)]
    first, then = (counts[1] - counts[0]) / more, (counts[2] - counts[1]) / (2 * more)
    assert then <= first * 1.05 + 0.1, f"{first:.1f} calls for a tensor, then {then:.1f}"
    return then


@pytest.mark.parametrize(("state", "most"), [(flat, 29), (nested, 39), (trained, 48)])
def test_taking_a_state_apart(state: Make, most: float) -> None:
    def prepare(count: int) -> Callable[[], object]:
        made = state(count)
        return lambda: flatten(made)

    assert calls_per_tensor(prepare) <= most


@pytest.mark.parametrize(("state", "most"), [(flat, 4), (nested, 4)])
def test_copying_into_the_arena(state: Make, most: float) -> None:
    def prepare(count: int) -> Callable[[], object]:
        items = flatten(state(count)).items
        payload = memoryview(bytearray(64 * count))
        return lambda: copy_items(items, [64 * i for i in range(len(items))], payload, threads=1)

    assert calls_per_tensor(prepare) <= most


@pytest.mark.parametrize(("state", "encode_most", "decode_most"), [(flat, 10, 12), (nested, 12, 14)])
def test_encoding_and_decoding_a_header(state: Make, encode_most: float, decode_most: float) -> None:
    def encode(count: int) -> Callable[[], object]:
        header = header_of(flatten(state(count)))
        return lambda: encode_header(header)

    def decode(count: int) -> Callable[[], object]:
        template = encode_header(header_of(flatten(state(count))))
        data = seal_header(template, [bytes(16)] * template.n_blocks)
        return lambda: decode_header(data, path="shard")

    assert calls_per_tensor(encode) <= encode_most
    assert calls_per_tensor(decode) <= decode_most


@pytest.mark.parametrize(
    ("saved", "target", "most"),
    [(flat, flat, 21), (nested, nested, 33), (trained, trained, 66), (trained, untrained, 66)],
)
def test_matching_a_target(saved: Make, target: Make, most: float) -> None:
    def prepare(count: int) -> Callable[[], object]:
        header, state = header_of(flatten(saved(count))), target(count)
        return lambda: RestoreTarget(state).match(header)

    assert calls_per_tensor(prepare) <= most


@pytest.mark.parametrize(("saved", "target", "most"), [(flat, flat, 2), (trained, untrained, 23)])
def test_putting_values_in_place(saved: Make, target: Make, most: float) -> None:
    def prepare(count: int) -> Callable[[], object]:
        match = RestoreTarget(target(count)).match(header_of(flatten(saved(count))))
        return match.apply

    assert calls_per_tensor(prepare) <= most


def test_planning_the_read() -> None:
    def prepare(count: int) -> Callable[[], object]:
        header = header_of(flatten(flat(count)))
        wanted = [Destination(t.start, t.stop, 1 << 20 | i << 10) for i, t in enumerate(header.tensors)]
        return lambda: plan_reads(header.blocks, wanted)

    assert calls_per_tensor(prepare) <= 6
