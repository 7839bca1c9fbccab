"""Does training that begins while its state is still being read compute what it would have computed?"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import ckptengine as ck
from ckptengine.adapters import delivery, rounds
from ckptengine.format.shard import ShardHeader, decode_header
from tests.helpers.checkpoints import flip, read_manifest
from tests.helpers.held_blocks import IN_TIME_S, held_blocks
from tests.helpers.ranks import wait_until

SMALL = ck.Config(block_nbytes=4096, io_threads=2)
WIDTH = 48  # A layer's weight is more than two blocks.
LAYERS = 6
LATE = "optimizer.state.5"
"""Far from the blocks that hold parameters."""


@pytest.fixture(autouse=True)
def _one_writer(lent_writer: None) -> None:
    pass


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[ck.Checkpointer]:
    with ck.Checkpointer(tmp_path / "root", config=SMALL) as made:
        yield made


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


class Job:
    """A model, its optimizer, and a generator that its steps take their noise from."""

    def __init__(self, seed: int, make: Callable[[int], nn.Module] = layers, **options: Any) -> None:
        self.model = make(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **{"lr": 1e-2 * seed, **options})
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.rng = Generator(seed)
        self.steps = 0

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "rng": self.rng,
            "at": {"steps": self.steps, "array": np.full(9000, self.steps)},
        }

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(4, WIDTH, generator=self.rng.generator)).square().sum()

    def step(self) -> float:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.item()

    def bits(self) -> dict[str, bytes]:
        state: dict[str, Any] = {"model": self.model.state_dict()}
        state["optimizer"] = self.optimizer.state_dict()["state"]
        return {name: t.numpy().tobytes() for name, t in flat(state)}


def flat(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from flat(one, f"{name}.{key}")


class Generator:
    """Keeps a generator's state as a tensor, and has to be told of one."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"])


@pytest.fixture
def saved(ckpt: ck.Checkpointer) -> Job:
    """What step 2 was saved of; step 1 is of the same job, earlier."""
    job = Job(1)
    for number in (1, 2):
        job.step()
        job.steps = number
        ckpt.save(number, job.state)
    return job


def ends(work: Callable[[], object]) -> threading.Event:
    """Set when `work`, which goes on in a thread, has ended well."""
    ended = threading.Event()

    def run() -> None:
        work()
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    return ended


def hooks_of(module: nn.Module) -> int:
    return sum(
        len(one._forward_pre_hooks)
        + len(one._state_dict_pre_hooks)
        + len(one._load_state_dict_pre_hooks)
        + len(one.__dict__.keys() & {"_apply", "__reduce_ex__"})
        for one in module.modules()
    )


def shard_of(ckpt: ck.Checkpointer, step: int) -> Path:
    (path,) = Path(ckpt.root).glob(f"step-{step:010d}/*/shard-*")
    return path


def header_of(ckpt: ck.Checkpointer, step: int) -> ShardHeader:
    path = shard_of(ckpt, step)
    (ref,) = read_manifest(path.parents[1]).shards
    return decode_header(path.read_bytes()[: ref.header_nbytes], path=str(path))


def damage(ckpt: ck.Checkpointer, step: int, name: str) -> None:
    """Flips a bit in the middle of a tensor, or a large value."""
    header = header_of(ckpt, step)
    (entry,) = (entry for entry in header.tensors if entry.name == name)
    flip(shard_of(ckpt, step), header.header_nbytes + (entry.start + entry.stop) // 2)


# --- what is there when ---------------------------------------------------------------------------


def test_a_layer_waits_for_its_own_tensors_and_for_no_others(ckpt: ck.Checkpointer, saved: Job) -> None:
    job = Job(2)
    x = torch.ones(1, WIDTH)
    # A block may hold the end of one layer and the beginning of the next, so there is one between these.
    with held_blocks("model.2", "model.4", LATE) as gate:
        handle = ckpt.restore(job.state, streaming=True)
        assert torch.equal(job.model[0](x), saved.model[0](x))
        third = ends(lambda: job.model[2](x))
        assert not third.wait(0.1)
        gate.release("model.2")
        assert third.wait(IN_TIME_S)
        assert torch.equal(job.model[2](x), saved.model[2](x))
        fifth = ends(lambda: job.model(x))
        assert not fifth.wait(0.1)
        assert not torch.equal(job.model[4].weight, saved.model[4].weight)
        gate.release("model.4")
        assert fifth.wait(IN_TIME_S)
        assert torch.equal(job.model(x), saved.model(x))
        assert hooks_of(job.model) == 0
        assert not handle.done()
        gate.open()
        handle.result(IN_TIME_S)
    assert handle.done()


def test_a_step_waits_for_all_and_nothing_before_it_does(ckpt: ck.Checkpointer, saved: Job) -> None:
    whole, job = Job(3), Job(2)
    ckpt.restore(whole.state)
    with held_blocks(LATE) as gate:
        handle = ckpt.restore(job.state, streaming=True)
        loss = job.loss()
        job.optimizer.zero_grad()
        loss.backward()
        assert job.model[0].weight.grad is not None
        step = ends(job.optimizer.step)
        assert not step.wait(0.1)
        gate.open()
        assert step.wait(IN_TIME_S)
    whole.loss().backward()
    whole.optimizer.step()
    assert job.bits() == whole.bits()
    info = handle.result()
    assert info.step == 2
    assert info.nbytes > 3 * LAYERS * WIDTH * WIDTH * 4
    assert info.phases.read.nbytes >= info.nbytes


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("pair", [False, True])
def test_losses_are_those_after_a_full_restore(tmp_path: Path, codec: str, pair: bool) -> None:
    def state(job: Job) -> dict[str, Any]:
        if not pair:
            return job.state
        of_job = job.state
        del of_job["model"], of_job["optimizer"]
        return {**of_job, "train": [ck.training_state(job.model, job.optimizer)]}

    with ck.Checkpointer(tmp_path, config=ck.Config(block_nbytes=4096, codec=codec)) as ckpt:  # type: ignore[arg-type]
        job = Job(1)
        for _ in range(3):
            job.step()
        ckpt.save(3, state(job))
        wanted = [job.step() for _ in range(4)]
        whole, streamed = Job(2), Job(3)
        ckpt.restore(state(whole))
        handle = ckpt.restore(state(streamed), streaming=True)
        assert [whole.step() for _ in range(4)] == wanted
        assert [streamed.step() for _ in range(4)] == wanted
        assert streamed.bits() == whole.bits() == job.bits()
        assert handle.result().nbytes == ckpt.restore(state(whole)).nbytes


def test_values_objects_and_options_are_there_when_the_call_returns(
    ckpt: ck.Checkpointer, saved: Job
) -> None:
    job = Job(2)
    state = job.state
    with held_blocks("model", LATE) as gate:
        ckpt.restore(state, streaming=True)
        assert state["at"]["steps"] == 2
        np.testing.assert_array_equal(state["at"]["array"], np.full(9000, 2))
        assert torch.equal(job.rng.generator.get_state(), saved.rng.generator.get_state())
        assert job.schedule.last_epoch == saved.schedule.last_epoch == 2
        assert job.optimizer.param_groups[0]["lr"] == saved.optimizer.param_groups[0]["lr"] == 5e-3
        assert job.optimizer.param_groups[0]["initial_lr"] == 1e-2
        gate.open()


def test_options_that_were_set_meanwhile_are_kept(ckpt: ck.Checkpointer, saved: Job) -> None:
    job = Job(2)
    ckpt.restore(job.state, streaming=True)
    for group in job.optimizer.param_groups:
        group["lr"] = 0.125
    job.loss().backward()
    job.optimizer.step()
    assert job.optimizer.param_groups[0]["lr"] == 0.125
    assert job.optimizer.state[job.model[0].weight]["step"] == 3


@pytest.mark.parametrize(
    ("model", "optimizer", "late"),
    [("model", "optimizer", LATE), ("net", "opt", "optimizer.state")],
    ids=["the same names", "other names"],
)
def test_options_that_are_tensors_come_early(tmp_path: Path, model: str, optimizer: str, late: str) -> None:
    with ck.Checkpointer(tmp_path, config=SMALL) as ckpt:
        job = Job(1, lr=torch.tensor(0.25))
        job.step()
        ckpt.save(1, {"model": job.model, "optimizer": job.optimizer})
        other = Job(2, lr=torch.tensor(0.5))
        rename = None if model == "model" else {model: "model", optimizer: "optimizer"}
        with held_blocks("model", late) as gate:
            ckpt.restore({model: other.model, optimizer: other.optimizer}, streaming=True, rename=rename)
            assert other.optimizer.param_groups[0]["lr"] == torch.tensor(0.25)
            gate.open()


def test_the_callers_priority_is_followed(ckpt: ck.Checkpointer, saved: Job) -> None:
    job = Job(2)

    def number(name: str) -> float:
        return -float(name.split(".")[1]) if name.startswith("model.") else 99.0

    for priority, wanted in (
        (["model.3", "*.1.weight"], ["model.3.weight", "model.1.weight", "model.0.weight"]),
        (number, ["model.3.weight", "model.2.weight", "model.1.weight"]),
        (None, ["model.0.weight", "model.1.weight", "model.2.weight"]),
    ):
        with held_blocks() as gate, one_thread():
            ckpt.restore(job.state, streaming=True, priority=priority).result()
        first = {name: i for i, names in reversed([*enumerate(gate.read)]) for name in names}
        order = [first[name] for name in wanted]
        assert order == sorted(order), priority
        assert order[-1] < first["optimizer.state.3.exp_avg"]


def test_a_priority_is_asked_about_each_name_once_in_the_order_of_the_state(ckpt: ck.Checkpointer) -> None:
    ones = torch.ones(5000)
    saved = {"z": ones, "rows": np.arange(5000), "list": [ones, ones.clone()], "none": ones[:0], "a": ones}
    ckpt.save(1, saved)
    memory = torch.zeros(20000)
    parts = [memory[start : start + 5000] for start in range(15000, -1, -5000)]  # the last is the first
    target = {
        "z": parts[0],
        "rows": np.zeros(5000, int),
        "list": parts[1:3],
        "none": torch.empty(0),
        "a": parts[0],
    }
    asked: list[str] = []

    def number(name: str) -> float:
        asked.append(name)
        return 0.0

    ckpt.restore(target, streaming=True, priority=number).result()
    assert asked == ["z", "rows", "list.0", "list.1", "a"]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptengine.read.reader.ShardReader.threads_for", lambda self, blocks, threads: 1)
        yield


def test_no_block_is_read_twice(ckpt: ck.Checkpointer, saved: Job) -> None:
    with held_blocks() as gate:
        ckpt.restore(Job(2).state, streaming=True).result()
    assert len(gate.read) == header_of(ckpt, 2).blocks.count


# --- tensors of all kinds -------------------------------------------------------------------------


def test_a_state_of_plain_tensors_is_waited_for_by_name(ckpt: ck.Checkpointer) -> None:
    state = {"a": torch.arange(5000.0), "b": {"c": torch.arange(7000.0), "none": torch.empty(0)}}
    ckpt.save(1, state)
    target = {"a": torch.zeros(5000), "b": {"c": torch.zeros(7000), "none": torch.empty(0)}}
    with held_blocks("b.c") as gate:
        handle = ckpt.restore(target, streaming=True, priority=["a"])
        handle.wait("b.none")
        with pytest.raises(ck.CommitTimeoutError):
            handle.wait("b.*", timeout=0.05)
        with pytest.raises(ValueError, match=r"nothing that is restored is called 'c'"):
            handle.wait("c")
        with pytest.raises(ck.CommitTimeoutError, match="step 1 is not restored after"):
            handle.result(0.05)
        gate.open()
        handle.wait(["a", "b"])
        assert torch.equal(target["b"]["c"], state["b"]["c"])  # type: ignore[index]
    handle.wait()
    assert handle.result().nbytes == 48000


def test_a_module_is_waited_for(ckpt: ck.Checkpointer, saved: Job) -> None:
    job = Job(2)
    with held_blocks(LATE) as gate:
        handle = ckpt.restore(job.state, streaming=True)
        handle.wait(job.model)
        assert hooks_of(job.model) == 0
        assert torch.equal(job.model[3].weight, saved.model[3].weight)
        gate.open()
        handle.result()
        handle.wait(job.model)


class Tied(nn.Module):
    """Two modules with one weight, the second of which is called first."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.filler = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.embed.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.filler(self.embed(x)))


def test_every_module_of_a_tied_weight_waits_for_it(ckpt: ck.Checkpointer) -> None:
    job = Job(1, Tied)
    ckpt.save(1, {"model": job.model})
    other = Job(2, Tied)
    with held_blocks("model.head", "model.embed") as gate:
        ckpt.restore({"model": other.model}, streaming=True)
        for module in (other.model.embed, other.model.head):
            waits = ends(lambda module=module: module(torch.ones(1, WIDTH)))
            assert not waits.wait(0.05)
        gate.open()
        other.model(torch.ones(1, WIDTH))
    assert torch.equal(other.model.embed.weight, job.model.head.weight)


def test_attention_waits_for_a_child_that_it_does_not_call(ckpt: ck.Checkpointer) -> None:
    torch.manual_seed(1)
    model, other = (nn.MultiheadAttention(WIDTH, 2) for _ in range(2))
    ckpt.save(1, {"model": model})
    x = torch.ones(2, 1, WIDTH)
    with held_blocks("model.out_proj") as gate:
        ckpt.restore({"model": other}, streaming=True)
        waits = ends(lambda: other(x, x, x))
        assert not waits.wait(0.05)
        gate.open()
    assert torch.equal(other(x, x, x)[0], model(x, x, x)[0])


@pytest.mark.parametrize("room", [1 << 12, 48 << 20])
def test_tensors_that_cannot_be_read_into(
    ckpt: ck.Checkpointer, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """They are copied from a buffer, which has room for all, or for one at a time."""
    monkeypatch.setattr(delivery, "BUFFER_NBYTES", room)
    monkeypatch.setattr(rounds, "PIECE_NBYTES", 2048)
    stored = {f"t{i}": torch.randn(30, 40) for i in range(5)}
    ckpt.save(1, stored)
    target = {
        name: torch.zeros(40, 30).t() if i % 2 else torch.zeros(30, 40) for i, name in enumerate(stored)
    }
    ckpt.restore(target, streaming=True, priority=["t3"]).result()
    assert all(torch.equal(target[name], stored[name]) for name in stored)


def test_a_part_in_another_dtype_and_by_another_name(ckpt: ck.Checkpointer, saved: Job) -> None:
    job = Job(2)
    job.model.to(torch.float64)
    state = {"net": job.model, "opt": job.optimizer}
    ckpt.restore(state, streaming=True, include="net", rename={"net": "model"}, cast=True)
    x = torch.ones(1, WIDTH, dtype=torch.float64)
    assert torch.equal(job.model(x), copy.deepcopy(saved.model).double()(x))
    assert not job.optimizer.state


def test_shared_memory_for_different_values_is_an_error_at_the_end(ckpt: ck.Checkpointer) -> None:
    ckpt.save(1, {"a": torch.zeros(1000), "b": torch.ones(1000)})
    one = torch.full((1000,), 2.0)
    handle = ckpt.restore({"a": one, "b": one}, streaming=True)
    with pytest.raises(ck.StateMismatchError, match="share memory"):
        handle.result()


# --- who else comes along -------------------------------------------------------------------------


@pytest.mark.parametrize("save", ["save", "async_save"])
def test_a_save_waits_for_the_restore(ckpt: ck.Checkpointer, saved: Job, save: str) -> None:
    job = Job(2)
    with held_blocks(LATE) as gate:
        ckpt.restore(job.state, streaming=True)
        ended = ends(lambda: getattr(ckpt, save)(3, job.state))
        assert not ended.wait(0.1)
        gate.open()
        assert ended.wait(IN_TIME_S)
    ckpt.wait()
    again = Job(3)
    assert ckpt.restore(again.state).step == 3
    whole = Job(4)
    ckpt.restore(whole.state, step=2)
    assert again.bits() == whole.bits()


def test_a_restore_waits_for_the_one_before(ckpt: ck.Checkpointer, saved: Job) -> None:
    job, other = Job(2), Job(3)
    with held_blocks(LATE) as gate:
        first = ckpt.restore(job.state, streaming=True)
        gate.release(LATE)
        second = ckpt.restore(other.state, streaming=True)
        assert first.done()
    second.result()
    assert other.bits() == job.bits()


def test_close_waits_for_the_restore(tmp_path: Path, ckpt: ck.Checkpointer, saved: Job) -> None:
    whole = Job(3)
    ckpt.restore(whole.state)
    job = Job(2)
    with ck.Checkpointer(ckpt.root, config=SMALL) as other:
        handle = other.restore(job.state, streaming=True)
    assert handle.done()
    assert job.bits() == whole.bits()


def test_leaving_by_an_error_gives_the_restore_up(ckpt: ck.Checkpointer, saved: Job) -> None:
    job = Job(2)
    handles: list[ck.RestoreHandle] = []

    def leave() -> None:
        with ck.Checkpointer(ckpt.root, config=SMALL) as other:
            handles.append(other.restore(job.state, streaming=True))
            threading.Thread(target=open_when_given_up).start()
            raise KeyError("enough")

    def open_when_given_up() -> None:
        wait_until(handles[0].exception)
        gate.open()

    with held_blocks(LATE) as gate, pytest.raises(KeyError):
        leave()
    assert hooks_of(job.model) == 0
    assert isinstance(handles[0].exception(), ck.CheckpointError)
    with pytest.raises(ck.CheckpointError, match="given up"):
        handles[0].result()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("ckptengine-stream", "ckptengine-work"))]


@pytest.mark.parametrize("how", ["swap", "data", "new"])
def test_an_exchange_of_a_tensor_is_an_error(ckpt: ck.Checkpointer, saved: Job, how: str) -> None:
    job = Job(2)
    with held_blocks("model.3", LATE) as gate:
        handle = ckpt.restore(job.state, streaming=True)
        weight = job.model[3].weight
        if how == "swap":
            torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(WIDTH, WIDTH)))
        elif how == "data":
            weight.data = torch.zeros(WIDTH, WIDTH)
        else:
            job.model[3].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        gate.open()
        with pytest.raises(ck.CheckpointError, match="a Linear were exchanged"):
            job.loss()
        with pytest.raises(ck.CheckpointError, match="a Linear were exchanged"):
            handle.result()
    job = Job(2)
    assert ckpt.restore(job.state).step == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_module_is_not_copied_half(ckpt: ck.Checkpointer, saved: Job, copied: Any) -> None:
    job = Job(2)
    with held_blocks("model") as gate:
        handle = ckpt.restore(job.state, streaming=True)
        with pytest.raises(ck.CheckpointError, match=r"handle\.wait"):
            copied(job.model)
        gate.open()
        handle.wait(job.model)
        copied(job.model)
        handle.result()


def test_what_is_used_before_it_is_there_fails_the_backward(ckpt: ck.Checkpointer, saved: Job) -> None:
    """A parameter that is used outside of its module's forward: nothing waits."""
    job = Job(2)
    x = torch.ones(1, WIDTH, requires_grad=True)
    with held_blocks("model.3") as gate:
        handle = ckpt.restore(job.state, streaming=True)
        loss = nn.functional.linear(x, job.model[3].weight).sum()
        gate.open()
        handle.wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("how", ["wrapped", "wrapper", "in place", "after", "before"])
def test_compiled_modules_compute_with_what_was_restored(ckpt: ck.Checkpointer, saved: Job, how: str) -> None:
    torch.compiler.reset()
    job = Job(2)
    x = torch.ones(4, WIDTH)
    given: nn.Module = job.model
    run: Callable[[torch.Tensor], torch.Tensor] = job.model
    if how in ("wrapped", "wrapper"):
        run = torch.compile(job.model, backend="eager")
        given = run if how == "wrapper" else job.model  # type: ignore[assignment]
        run(x)
    elif how == "in place":
        job.model.compile(backend="eager")
        job.model(x)
    elif how == "before":
        run = torch.compile(lambda x: job.model(x), backend="eager")
        run(x)
    stored = {"model": given if how == "wrapper" else job.model}
    if how == "wrapper":
        ckpt.save(3, {"model": torch.compile(saved.model, backend="eager")})
    else:
        ckpt.save(3, {"model": saved.model})
    with held_blocks("model.3", "model._orig_mod.3") as gate:
        threading.Timer(0.1, gate.open).start()
        handle = ckpt.restore(stored, streaming=True)
        if how == "after":
            run = torch.compile(lambda x: job.model(x), backend="eager")
        assert torch.equal(run(x), saved.model(x))
        handle.result()
    assert hooks_of(job.model) == 0
    assert torch.equal(run(x), saved.model(x))
    torch.compiler.reset()


# --- what else takes or changes what is restored --------------------------------------------------


def test_a_copy_of_a_modules_state_waits_for_it(ckpt: ck.Checkpointer, saved: Job) -> None:
    job = Job(2)
    copies: list[dict[str, torch.Tensor]] = []
    with held_blocks("model.3", LATE) as gate:
        handle = ckpt.restore(job.state, streaming=True)
        waits = ends(lambda: copies.append(copy.deepcopy(job.model.state_dict())))
        assert not waits.wait(0.1)
        gate.release("model.3")
        assert waits.wait(IN_TIME_S)
        assert not handle.done()
        copied = copy.deepcopy(job.model)
        assert hooks_of(job.model) == hooks_of(copied) == 0
        gate.open()
        handle.result()
    for name, tensor in saved.model.state_dict().items():
        assert torch.equal(copies[0][name], tensor)
        assert torch.equal(copied.state_dict()[name], tensor)


def test_a_compiled_modules_parts_wait_for_their_states_too(ckpt: ck.Checkpointer, saved: Job) -> None:
    torch.compiler.reset()
    job = Job(2)
    job.model.compile(backend="eager")
    with held_blocks("model") as gate:
        handle = ckpt.restore(job.state, streaming=True)
        threading.Timer(0.1, gate.open).start()
        taken = {name: value.clone() for name, value in job.model[3].state_dict().items()}
        handle.result()
    assert torch.equal(taken["weight"], saved.model[3].weight)
    assert hooks_of(job.model) == 0
    torch.compiler.reset()


@pytest.mark.parametrize("assign", [False, True])
def test_what_is_loaded_into_a_module_meanwhile_stays(
    ckpt: ck.Checkpointer, saved: Job, assign: bool
) -> None:
    job, own = Job(2), layers(7).state_dict()
    with held_blocks("model") as gate:
        handle = ckpt.restore(job.state, streaming=True)
        threading.Timer(0.1, gate.open).start()
        job.model.load_state_dict(own, assign=assign)
        handle.result()
    assert hooks_of(job.model) == 0
    assert all(torch.equal(value, own[name]) for name, value in job.model.state_dict().items())


@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.share_memory])
def test_a_modules_memory_is_exchanged_once_it_is_there(
    ckpt: ck.Checkpointer, saved: Job, change: Callable[[nn.Module], nn.Module]
) -> None:
    """Its old memory, which `share_memory` gives back, would be written to."""
    job = Job(2)
    with held_blocks("model", LATE) as gate:
        handle = ckpt.restore(job.state, streaming=True)
        waits = ends(lambda: change(job.model))
        assert not waits.wait(0.1)
        gate.open()
        assert waits.wait(IN_TIME_S)
        handle.result()
    assert hooks_of(job.model) == 0
    for own, wanted in zip(job.model.parameters(), saved.model.parameters(), strict=True):
        assert torch.equal(own, wanted.to(own.dtype))
        assert own.is_shared() == (change is nn.Module.share_memory)


class Shared(nn.Module):
    """Two modules have a parameter in common, and a buffer; each has one of its own too. Two more parameters
    share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.filler, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second.weight = self.first.weight
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.weight = nn.Parameter(self.first.weight.data)
        for module in (self.first, self.second):
            module.register_buffer("seen", torch.ones(9000))
        self.second.seen = self.first.seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.filler(self.first(x)))) + self.second.seen[:WIDTH]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.bfloat16, nn.Module.share_memory])
def test_what_modules_share_is_exchanged_with_one_of_them(
    ckpt: ck.Checkpointer, change: Callable[[nn.Module], nn.Module], compiled: bool
) -> None:
    """Before the other one's own tensors are there."""
    torch.manual_seed(1)
    stored = Shared()
    ckpt.save(1, {"model": stored})
    torch.manual_seed(2)
    model = Shared()
    if compiled:
        model.compile(backend="eager")
    priority = ["model.first", "model.filler", "model.second"]
    with held_blocks("model.second.bias") as gate:
        handle = ckpt.restore({"model": model}, streaming=True, priority=priority)
        waits = ends(lambda: change(model))
        assert not waits.wait(0.1)
        gate.open()
        assert waits.wait(IN_TIME_S)
        x = torch.ones(1, WIDTH, dtype=model.first.weight.dtype)
        assert torch.equal(model(x), change(stored)(x))
        handle.result()
    assert hooks_of(model) == 0
    torch.compiler.reset()


def test_what_modules_share_is_still_looked_after_in_all_of_them(ckpt: ck.Checkpointer) -> None:
    ckpt.save(1, {"model": Shared()})
    model = Shared()
    with held_blocks("model.first.weight") as gate:
        handle = ckpt.restore({"model": model}, streaming=True)
        model.second.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        gate.open()
        with pytest.raises(ck.CheckpointError, match="a Linear were exchanged"):
            model.double()
        with pytest.raises(ck.CheckpointError, match="a Linear were exchanged"):
            handle.result()


def test_a_module_is_refused_for_sharing_before_its_memory_is_touched(
    ckpt: ck.Checkpointer, saved: Job
) -> None:
    """Other processes get a module by a pickle that moves its tensors to shared memory on the way."""
    job = Job(2)
    with held_blocks("model") as gate:
        handle = ckpt.restore(job.state, streaming=True)
        with pytest.raises(ck.CheckpointError, match=r"handle\.wait"):
            ForkingPickler.dumps(job.model)
        assert not any(parameter.is_shared() for parameter in job.model.parameters())
        gate.open()
        handle.result()


def test_an_optimizers_state_is_taken_once_it_is_there(ckpt: ck.Checkpointer, saved: Job) -> None:
    job = Job(2)
    with held_blocks(LATE) as gate:
        handle = ckpt.restore(job.state, streaming=True)
        with pytest.raises(ck.CheckpointError, match=r"an optimizer cannot be copied.*handle\.result"):
            copy.deepcopy(job.optimizer)
        threading.Timer(0.1, gate.open).start()
        taken = job.optimizer.state_dict()["state"]
    assert handle.done()
    assert dict(flat(taken)).keys() == dict(flat(saved.optimizer.state_dict()["state"])).keys()
    assert "state_dict" not in job.optimizer.__dict__
    copy.deepcopy(job.optimizer)


@pytest.mark.parametrize("pair", [False, True])
def test_what_is_loaded_into_an_optimizer_meanwhile_stays(
    ckpt: ck.Checkpointer, saved: Job, pair: bool
) -> None:
    def state(job: Job) -> dict[str, Any]:
        if pair:
            return {"train": ck.training_state(job.model, job.optimizer)}
        return {"model": job.model, "optimizer": job.optimizer}

    ckpt.save(3, state(saved))
    job, own = Job(2), Job(5)
    for _ in range(4):
        own.step()
    handle = ckpt.restore(state(job), streaming=True)
    job.optimizer.load_state_dict(own.optimizer.state_dict())
    handle.result()
    wanted = dict(flat(own.optimizer.state_dict()["state"]))
    assert all(
        torch.equal(tensor, wanted[name]) for name, tensor in flat(job.optimizer.state_dict()["state"])
    )
    assert not job.optimizer.__dict__.keys() & {"state_dict", "load_state_dict", "__reduce_ex__"}


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("hooked", [False, True], ids=["options early", "all late"])
def test_other_parameter_groups_are_an_error_that_names_the_optimizer(
    ckpt: ck.Checkpointer, saved: Job, pair: bool, hooked: bool
) -> None:
    def state(job: Job) -> dict[str, Any]:
        if pair:
            return {"train": ck.training_state(job.model, job.optimizer)}
        return {"optimizer": job.optimizer}

    ckpt.save(3, state(saved))
    job = Job(2)
    if hooked:
        job.optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: None)
    handle = ckpt.restore(state(job), streaming=True)
    job.optimizer.add_param_group({"params": nn.Linear(4, 4).parameters()})
    name = "train.optimizer" if pair else "optimizer"
    for use in (job.optimizer.step, handle.result):
        with pytest.raises(
            ck.CheckpointError, match=rf"of '{name}' \(AdamW\).*: \[12, 2\].*\[12\]"
        ) as caught:
            use()
        assert "add_param_group" in str(caught.value)
    assert not job.optimizer.state


def test_a_module_that_was_replaced_meanwhile_is_an_error(ckpt: ck.Checkpointer, saved: Job) -> None:
    saved.model = nn.Sequential(nn.Sequential(saved.model[0], nn.Tanh()), saved.model[1])
    ckpt.save(3, {"model": saved.model})
    for name, change in {
        "0.0": lambda model: model[0].__setitem__(0, nn.Linear(WIDTH, WIDTH)),
        "0": lambda model: model.__setitem__(0, nn.Linear(WIDTH, WIDTH)),
    }.items():
        model = copy.deepcopy(saved.model)
        handle = ckpt.restore({"model": model}, streaming=True)
        change(model)
        with pytest.raises(ck.CheckpointError, match=rf"modules of the state were replaced.*: {name};"):
            handle.result()


def test_a_module_that_leaves_nothing_unrestored_may_be_replaced(ckpt: ck.Checkpointer, saved: Job) -> None:
    ckpt.save(3, {"model": saved.model})
    model = layers(2)
    handle = ckpt.restore({"model": model}, streaming=True, exclude="model.4")
    model[0] = nn.Sequential(model[0], nn.Linear(WIDTH, WIDTH))  # wrapped, with something new
    model[1] = nn.Identity()
    del model[5]
    model[2], model[3] = model[3], model[2]
    model[4] = nn.Linear(WIDTH, WIDTH)  # what was excluded
    handle.result()
    assert torch.equal(model[0][0].weight, saved.model[0].weight)
    assert torch.equal(model[2].weight, saved.model[3].weight)
    assert hooks_of(model) == 0


@pytest.mark.parametrize(
    ("priority", "error", "said"),
    [
        (3, TypeError, "priority is a pattern of names, or several, not 3"),
        (["model", 3], TypeError, "priority is a pattern of names, or several, not"),
        (
            lambda name: "first",
            TypeError,
            r"priority gave 'first' for 'model\.0\.weight', not a number",
        ),
        (lambda name: float("nan"), ValueError, r"priority gave nan for 'model\.0\.weight'"),
    ],
)
def test_a_priority_that_is_none(
    ckpt: ck.Checkpointer, saved: Job, priority: Any, error: type[Exception], said: str
) -> None:
    job = Job(2)
    with pytest.raises(error, match=said):
        ckpt.restore({"model": job.model}, streaming=True, priority=priority, include="model.0")
    assert hooks_of(job.model) == 0


def test_a_priority_is_refused_without_streaming(ckpt: ck.Checkpointer, saved: Job) -> None:
    job = Job(2)
    before = job.bits()
    with pytest.raises(ValueError, match="streaming=True"):
        ckpt.restore(job.state, priority=["model"])  # type: ignore[call-overload]
    assert job.bits() == before


def test_a_module_of_another_state_is_not_waited_for(ckpt: ck.Checkpointer, saved: Job) -> None:
    model = nn.Sequential(*layers(2), nn.ReLU())
    ckpt.save(3, {"model": model})
    with held_blocks("model.3") as gate:
        handle = ckpt.restore({"model": model}, streaming=True, exclude="model.5")
        with pytest.raises(ValueError, match="nothing is restored to this Linear"):
            handle.wait(nn.Linear(2, 2))
        with pytest.raises(TypeError, match="what to wait for is a pattern of names, or several, not 3"):
            handle.wait(3)
        handle.wait(model[5])
        handle.wait(model[6])
        with pytest.raises(ck.CommitTimeoutError):
            handle.wait(nn.Sequential(nn.Linear(2, 2), model), timeout=0.05)
        gate.open()
        handle.result()


# --- damage ---------------------------------------------------------------------------------------


def test_damage_to_a_parameter_surfaces_where_its_module_waits(ckpt: ck.Checkpointer, saved: Job) -> None:
    damage(ckpt, 2, "model.2.weight")
    job = Job(2)
    handle = ckpt.restore(job.state, streaming=True)
    with pytest.raises(ck.CorruptCheckpointError, match=r"model\.2\.weight") as caught:
        job.loss()
    assert caught.value.rank == 0
    assert caught.value.path == str(shard_of(ckpt, 2))
    assert "restore again without streaming" in str(caught.value)
    for attempt in (job.loss, job.optimizer.step, handle.result, lambda: ckpt.save(3, job.state)):
        with pytest.raises(ck.CorruptCheckpointError, match=r"model\.2\.weight"):
            attempt()
    assert handle.exception() is caught.value
    info = ckpt.restore(job.state)
    assert info.step == 1
    assert [one.step for one in info.fell_back_from] == [2]
    assert hooks_of(job.model) == 0
    job.step()
    ckpt.save(3, job.state)


def test_damage_to_the_optimizers_state_surfaces_at_its_step(ckpt: ck.Checkpointer, saved: Job) -> None:
    damage(ckpt, 2, "optimizer.state.6.exp_avg_sq")
    job = Job(2)
    with held_blocks("optimizer.state.6") as gate:
        ckpt.restore(job.state, streaming=True)
        job.loss().backward()
        before = [parameter.detach().clone() for parameter in job.model.parameters()]
        gate.open()
        for use in (job.optimizer.step, job.optimizer.state_dict):
            with pytest.raises(ck.CorruptCheckpointError, match=r"optimizer\.state\.6\.exp_avg_sq"):
                use()
    assert all(map(torch.equal, job.model.parameters(), before))
    assert not job.optimizer.state
    assert ckpt.restore(job.state).step == 1


@pytest.mark.parametrize("what", ["rng.state", "at.array", "file"])
def test_damage_before_anything_was_handed_out_falls_back(
    ckpt: ck.Checkpointer, saved: Job, what: str
) -> None:
    if what == "file":
        os.truncate(shard_of(ckpt, 2), shard_of(ckpt, 2).stat().st_size - 4096)
    else:
        damage(ckpt, 2, what)
    job = Job(2)
    state = job.state
    handle = ckpt.restore(state, streaming=True)
    assert handle.step == 1
    assert state["at"]["steps"] == 1
    info = handle.result()
    assert [one.step for one in info.fell_back_from] == [2]


def test_a_file_that_ends_while_it_is_read(ckpt: ck.Checkpointer, saved: Job) -> None:
    job = Job(2)
    header = header_of(ckpt, 2)
    late = min(entry.start for entry in header.tensors if entry.name.startswith(LATE))
    with held_blocks(LATE) as gate:
        handle = ckpt.restore(job.state, streaming=True)
        os.truncate(shard_of(ckpt, 2), header.header_nbytes + late)
        gate.open()
        with pytest.raises((ck.CorruptCheckpointError, ck.StorageError)):
            handle.result()
    assert ckpt.restore(job.state).step == 1


def test_a_mismatch_leaves_everything_as_it_was(ckpt: ck.Checkpointer, saved: Job) -> None:
    job = Job(2)
    before = job.bits()
    with pytest.raises(ck.StateMismatchError):
        ckpt.restore({**job.state, "more": torch.zeros(3)}, streaming=True)

    def broken(name: str) -> float:
        raise ZeroDivisionError(name)

    with pytest.raises(ZeroDivisionError):
        ckpt.restore(job.state, streaming=True, priority=broken)
    assert job.bits() == before
    assert hooks_of(job.model) == 0


# --- nothing is left ------------------------------------------------------------------------------


def test_fifty_restores_leave_nothing(ckpt: ck.Checkpointer, saved: Job) -> None:
    job = Job(2)
    process = psutil.Process()
    ckpt.restore(job.state, streaming=True).result()
    hooks = len(_global_optimizer_pre_hooks)
    threads, files = threading.active_count(), process.num_fds()
    for number in range(50):
        handle = ckpt.restore(job.state, streaming=True)
        if number % 3 == 0:
            handle.result()
        else:
            job.step()
            if number % 3 == 1:
                job.loss()
                assert len(_global_optimizer_pre_hooks) == hooks
    handle.result()
    assert hooks_of(job.model) == 0
    assert len(_global_optimizer_pre_hooks) == hooks
    # Threads that have nothing left to do end by themselves; what earlier tests left may have been collected.
    wait_until(lambda: threading.active_count() <= threads and process.num_fds() <= files)


@pytest.mark.parametrize("kept", [False, True], ids=["handle dropped", "handle kept"])
@pytest.mark.parametrize("end", ["result", "step", "step and forward", "given up"])
def test_nothing_of_the_state_is_kept_after_the_end(
    ckpt: ck.Checkpointer, saved: Job, end: str, kept: bool
) -> None:
    job = Job(2)
    handle: Any = ckpt.restore(job.state, streaming=True)
    if end == "result":
        handle.result()
    elif end == "given up":
        handle._abandon()
    else:
        job.step()
        if end == "step and forward":
            job.loss()
    parts = [weakref.ref(one) for one in (job.model, job.model[0], job.model[0].weight, job.optimizer)]
    if not kept:
        del handle
    del job
    gc.collect()
    assert [one() for one in parts] == [None] * len(parts)


EXITS = """
import sys, torch
import ckptengine as ck
from tests.helpers.held_blocks import held_blocks
from tests.test_streaming import LATE, SMALL, Job
with held_blocks(LATE) as gate:
    ckpt = ck.Checkpointer(sys.argv[1], config=SMALL)
    ckpt.restore(Job(2).state, streaming=True)
    gate.open()
print("over", flush=True)
"""


def test_a_process_that_exits_meanwhile_exits(ckpt: ck.Checkpointer, saved: Job) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EXITS, ckpt.root],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "over\n"
