"""Is what an overlapping save captures the state at the call, though training goes on at once?"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptengine as ck
from ckptengine import checkpointer as checkpointer_module
from ckptengine.adapters import guard
from tests.adapters.fake import same
from tests.helpers.gates import IN_TIME_S, Gate, held_copies
from tests.helpers.ranks import wait_until

SOON_S = 0.1
"""In which a thread that need not wait any longer would be done."""


@pytest.fixture(autouse=True)
def _one_writer(lent_writer: None) -> None:
    pass


def config(**options: Any) -> ck.Config:
    return ck.Config(**{"block_nbytes": 4096, "snapshot": "overlap", "commit_timeout_s": 60.0, **options})


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[ck.Checkpointer]:
    with ck.Checkpointer(tmp_path / "root", config=config()) as made:
        yield made
    assert not guard._active


@pytest.fixture
def gate() -> Iterator[Gate]:
    with held_copies() as made:
        yield made


class Job:
    """A model with statistics that change in forward, and its optimizer, some steps on."""

    def __init__(self, seed: int = 1, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **options)
        for _ in range(2):
            self.backward()
            self.optimizer.step()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 8)).square().sum().backward()

    @property
    def state(self) -> dict[str, Any]:
        return {"train": ck.training_state(self.model, self.optimizer)}

    def now(self) -> Any:
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])

    def restored(self, ckpt: ck.Checkpointer) -> Any:
        """What a job of another seed is after it has restored the newest step."""
        other = Job(99)
        assert not same(other.now(), self.now())
        ckpt.restore(other.state)
        return other.now()


@pytest.fixture
def job() -> Job:
    return Job()


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def waits(thread: threading.Thread) -> bool:
    """Does it come to wait for another thread, and go on doing so?"""
    wait_until(lambda: is_waiting(thread) or not thread.is_alive(), IN_TIME_S)
    thread.join(SOON_S)
    return thread.is_alive()


def is_waiting(thread: threading.Thread) -> bool:
    code = position(thread)[0]
    return code is not None and (code.co_filename, code.co_name) == (threading.__file__, "wait")


def position(thread: threading.Thread) -> tuple[CodeType | None, int | None]:
    """The function that it is in, and the line there."""
    frame = sys._current_frames().get(thread.ident or 0)
    return (None, None) if frame is None else (frame.f_code, frame.f_lineno)


def ends(thread: threading.Thread) -> bool:
    thread.join(IN_TIME_S)
    return not thread.is_alive()


# --- the state at the call -----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_waits_for_the_copy_and_nothing_else_does(
    ckpt: ck.Checkpointer, gate: Gate, options: dict[str, bool]
) -> None:
    job = Job(**options)
    expected = job.now()
    handle = ckpt.async_save(1, job.state)
    gate.wait_reached()
    job.backward()
    assert not handle.staged()
    step = in_thread(job.optimizer.step)
    assert waits(step)
    assert same(job.optimizer.state_dict(), expected[1])
    gate.open()
    assert ends(step)
    assert not same(job.optimizer.state_dict(), expected[1])
    info = handle.result()
    assert info.times.waited_s > 0
    assert info.stall_s >= info.times.waited_s
    assert same(job.restored(ckpt), expected)


def test_steps_go_on_while_it_is_written(ckpt: ck.Checkpointer, job: Job) -> None:
    """Several saves, each with steps that race with its copy."""
    expected = {}
    with held_copies(until_a_step_waits=True):
        for step in range(4):
            expected[step] = job.now()
            ckpt.async_save(step, job.state)
            for _ in range(2):
                job.backward()
                job.optimizer.step()
    ckpt.wait()
    for step, state in expected.items():
        other = Job(99)
        ckpt.restore(other.state, step=step)
        assert same(other.now(), state), step


def test_what_no_optimizer_holds_is_captured_in_the_call(ckpt: ck.Checkpointer, gate: Gate, job: Job) -> None:
    averaged = copy.deepcopy(job.model)
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 1)
    plain, frozen = torch.arange(40.0), nn.Parameter(torch.ones(30))
    array, values = np.arange(50.0), [1, "two"]
    state = {
        **job.state,
        "averaged": averaged,
        "schedule": schedule,
        "plain": plain,
        "columns": plain.view(5, 8)[:, ::2],
        "frozen": frozen,
        "array": array,
        "values": values,
        "rng": torch.get_rng_state(),
    }
    expected = copy.deepcopy([job.now(), averaged.state_dict(), schedule.state_dict()])
    handle = ckpt.async_save(1, state)
    gate.wait_reached()
    job.backward()  # batch statistics
    with torch.no_grad():
        for tensor in averaged.state_dict().values():
            tensor.zero_()
        plain.zero_(), frozen.zero_()
    array[:] = 0
    values.append(3)
    schedule.last_epoch = 77
    state["rng"].zero_()
    gate.open()
    handle.result()
    rng = torch.get_rng_state()
    ckpt.restore(state)
    assert same([job.now(), averaged.state_dict(), schedule.state_dict()], expected)
    assert same([plain, frozen.detach()], [torch.arange(40.0), torch.ones(30)])
    assert same(array, np.arange(50.0))
    assert state["values"] == [1, "two"]
    assert not same(state["rng"], torch.zeros_like(rng))


def test_state_dicts_of_an_optimizer_that_steps_are_copied_late(
    job: Job, ckpt: ck.Checkpointer, gate: Gate
) -> None:
    """The optimizer, made before the Checkpointer, is not in the state: it is known by its steps."""

    def state() -> dict[str, Any]:
        return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}

    handle = ckpt.async_save(1, state())
    gate.wait_reached()
    # Not known yet: what was copied late is nothing, and nothing waits.
    step = in_thread(lambda: (job.backward(), job.optimizer.step()))
    assert ends(step)
    gate.open()
    handle.result()
    with held_copies() as again:
        job.backward()
        expected = job.now()
        handle = ckpt.async_save(2, state())
        again.wait_reached()
        step = in_thread(job.optimizer.step)
        assert waits(step)
        again.open()
        assert ends(step)
        handle.result()
    assert not same(job.now(), expected)
    target = state()
    ckpt.restore(target)
    assert same([target["model"], target["optimizer"]], expected)


def test_a_tensor_that_is_replaced_is_kept_until_it_is_copied(
    ckpt: ck.Checkpointer, gate: Gate, job: Job
) -> None:
    expected = job.now()
    handle = ckpt.async_save(1, job.state)
    gate.wait_reached()
    for parameter in job.model.parameters():
        parameter.data = torch.zeros_like(parameter)
    job.optimizer.load_state_dict(copy.deepcopy(expected[1]))
    gate.open()
    handle.result()
    assert same(job.restored(ckpt), expected)


def test_much_that_no_optimizer_holds_goes_to_the_arena_at_once(
    ckpt: ck.Checkpointer, gate: Gate, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptengine.saver.EARLY_NBYTES", 1000)
    expected, plain = job.now(), torch.arange(1000.0)
    state = {**job.state, "plain": plain}
    handle = ckpt.async_save(1, state)
    gate.wait_reached()
    plain.zero_()
    step = in_thread(job.optimizer.step)
    assert waits(step)
    gate.open()
    assert ends(step)
    handle.result()
    ckpt.restore(state)
    assert same([job.now(), plain], [expected, torch.arange(1000.0)])


# --- what would tear it --------------------------------------------------------------------------


def averaging(job: Job) -> None:
    with torch.no_grad():
        job.model[2].weight.mul_(0.5)


def averaging_on_the_side(job: Job) -> None:
    job.model[2].weight.detach()[1:2].zero_()


def loading(job: Job) -> None:
    job.model.load_state_dict({name: value * 2 for name, value in job.model.state_dict().items()})


def writing_into_data(job: Job) -> None:
    job.model[2].weight.data.mul_(0.5)


def changing_the_optimizers_state(job: Job) -> None:
    job.optimizer.state[job.model[2].weight]["exp_avg"].add_(1)


def stepping_past_the_hook(job: Job) -> None:
    job.backward()
    type(job.optimizer).step.__wrapped__(job.optimizer)  # type: ignore[attr-defined]


def giving_memory_away(job: Job) -> None:
    job.model[2].weight.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("change", "fqn"),
    [
        (averaging, "train.model.2.weight"),
        (averaging_on_the_side, "train.model.2.weight"),
        (loading, "train.model.0.weight"),
        (writing_into_data, "train.model.2.weight"),
        (changing_the_optimizers_state, "train.optimizer.state.2.weight.exp_avg"),
        (stepping_past_the_hook, None),
    ],
)
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_change_by_something_else_than_a_step_fails_the_save(
    ckpt: ck.Checkpointer, change: Callable[[Job], None], fqn: str | None, fused: bool
) -> None:
    job = Job(fused=fused)
    assert ckpt.save(1, {"before": 1}).step == 1
    with held_copies() as gate:
        handle = ckpt.async_save(2, job.state)
        gate.wait_reached()
        change(job)
    with pytest.raises(ck.SaveFailedError, match="while it was being copied") as caught:
        handle.result(IN_TIME_S)
    assert caught.value.rank == 0
    assert caught.value.fqn == fqn or fqn is None
    assert not handle.staged()
    with pytest.raises(ck.SaveFailedError):
        handle.wait_staged()
    assert ckpt.latest == 1
    expected = job.now()
    assert ckpt.save(3, job.state).step == 3
    assert same(job.restored(ckpt), expected)


def test_a_tensor_exchanged_for_another_is_not_told_as_operations(ckpt: ck.Checkpointer, job: Job) -> None:
    """Whichever of the two has seen more operations."""
    weight, other = job.model[2].weight, nn.Parameter(torch.zeros_like(job.model[2].weight))
    for operations in (0, weight._version + 9):
        with torch.no_grad():
            for _ in range(operations):
                other.add_(1)
        with held_copies() as held:
            handle = ckpt.async_save(1, job.state)
            held.wait_reached()
            torch.utils.swap_tensors(weight, other)
        with pytest.raises(ck.SaveFailedError, match="exchanged for another one"):
            handle.result(IN_TIME_S)
        torch.utils.swap_tensors(weight, other)


def test_operations_are_counted(ckpt: ck.Checkpointer, job: Job) -> None:
    for count, told in ((1, "step: an in-place operation ["), (3, "step: 3 in-place operations [")):
        with held_copies() as held:
            handle = ckpt.async_save(1, job.state)
            held.wait_reached()
            for _ in range(count):
                averaging(job)
        with pytest.raises(ck.SaveFailedError) as caught:
            handle.result(IN_TIME_S)
        assert told in str(caught.value)


def test_a_change_is_found_by_the_step_that_follows_it(ckpt: ck.Checkpointer, gate: Gate, job: Job) -> None:
    """Afterwards the counters say nothing any more."""
    handle = ckpt.async_save(2, job.state)
    gate.wait_reached()
    job.backward()
    step = in_thread(job.optimizer.step)
    assert waits(step)
    averaging(job)
    gate.open()
    assert ends(step)
    with pytest.raises(ck.SaveFailedError, match=r"2\.weight"):
        handle.result(IN_TIME_S)


def test_memory_that_is_gone_is_not_copied(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LATE_NBYTES", 1)
    from ckptengine.adapters.state import flatten

    flat = flatten(job.state)
    watched = guard.Guard(flat.items, flat.optimizers)
    try:
        giving_memory_away(job)
        with pytest.raises(ck.SaveFailedError, match="freed or resized"):
            watched.copy([], [], memoryview(bytearray(1)), None, lambda: None, lambda nbytes: None)
    finally:
        watched.release()


def test_changes_after_the_copy_are_nobodys_affair(ckpt: ck.Checkpointer, job: Job) -> None:
    expected = job.now()
    with held_copies() as gate:
        gate.open()
        handle = ckpt.async_save(1, job.state)
        handle.wait_staged(IN_TIME_S)
        averaging(job), writing_into_data(job)
        handle.result()
    assert same(job.restored(ckpt), expected)


def test_an_operation_in_flight_is_waited_for(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    """A kernel raises the counters when it is done, and the copy may be done before."""
    monkeypatch.setattr(guard, "LATE_NBYTES", 1)
    from ckptengine.adapters.state import flatten

    read_end, write_end = os.pipe()
    made, ended = threading.Event(), threading.Event()
    watched: list[guard.Guard] = []
    in_read: list[int] = []

    def trainer() -> None:
        flat = flatten(job.state)
        watched.append(guard.Guard(flat.items, flat.optimizers))
        made.set()
        in_read.append(sys._getframe().f_lineno + 1)
        os.read(read_end, 1)  # like a kernel: no Python runs meanwhile
        ended.wait(IN_TIME_S)

    thread = in_thread(trainer)
    try:
        assert made.wait(IN_TIME_S)
        wait_until(lambda: position(thread) == (trainer.__code__, *in_read))
        settling = in_thread(watched[0]._settle)
        wait_until(lambda: position(settling)[0] in (guard.Guard._settle.__code__, None))
        settling.join(SOON_S)
        assert settling.is_alive()
        os.write(write_end, b"x")
        assert ends(settling)
        # And one that waits for another thread is in no operation.
        wait_until(lambda: is_waiting(thread))
        assert ends(in_thread(watched[0]._settle))
    finally:
        os.write(write_end, b"x")
        ended.set()
        thread.join()
        watched[0].release()
        os.close(read_end), os.close(write_end)


# --- whatever else happens meanwhile -------------------------------------------------------------


def test_an_error_in_the_copy_fails_the_save_and_lets_training_go_on(
    ckpt: ck.Checkpointer, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise OSError("no more")

    expected = job.now()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "copy_items", broken)
        patch.setattr(guard, "LATE_NBYTES", 1)
        handle = ckpt.async_save(1, job.state)
        with pytest.raises(ck.SaveFailedError, match="no more"):
            handle.result(IN_TIME_S)
    job.optimizer.step()
    assert not same(job.now(), expected)
    held = ckpt._saver._pool.nbytes
    for step in range(2, 6):
        ckpt.save(step, job.state)
    assert ckpt._saver._pool.nbytes <= 2 * held


def test_restore_waits_for_the_copy_even_of_another_checkpointer(
    ckpt: ck.Checkpointer, gate: Gate, job: Job, tmp_path: Path
) -> None:
    gate.open()
    ckpt.save(1, job.state)
    job.backward(), job.optimizer.step()
    expected = job.now()
    with held_copies() as again, ck.Checkpointer(tmp_path / "other", config=config()) as other:
        handle = other.async_save(1, job.state)
        again.wait_reached()
        restoring = in_thread(lambda: ckpt.restore(job.state))
        assert waits(restoring)
        assert same(job.now(), expected)
        again.open()
        assert ends(restoring)
        assert not same(job.now(), expected)
        handle.result()
        assert same(job.restored(other), expected)


def test_the_next_save_waits_for_the_copy(ckpt: ck.Checkpointer, gate: Gate, job: Job) -> None:
    first = ckpt.async_save(1, job.state)
    gate.wait_reached()
    saving = in_thread(lambda: ckpt.async_save(2, job.state))
    assert waits(saving)
    gate.open()
    assert ends(saving)
    ckpt.wait()
    assert first.committed()
    assert ckpt.steps() == [1, 2]


def test_wait_staged_waits_no_longer_than_it_is_told(ckpt: ck.Checkpointer, gate: Gate, job: Job) -> None:
    handle = ckpt.async_save(1, job.state)
    with pytest.raises(ck.CommitTimeoutError, match="not staged"):
        handle.wait_staged(0.01)
    gate.open()
    handle.wait_staged(IN_TIME_S)
    assert handle.staged()
    handle.result()


def test_a_copy_that_takes_longer_than_the_deadline_fails_the_save(tmp_path: Path, job: Job) -> None:
    with held_copies() as gate:
        with ck.Checkpointer(tmp_path, config=config(on_error="warn", commit_timeout_s=3.0)) as ckpt:
            handle = ckpt.async_save(1, job.state)
            gate.wait_reached()
            step = in_thread(job.optimizer.step)
            with pytest.raises(ck.CommitTimeoutError, match="still being copied"):
                handle.result(IN_TIME_S)
            assert ends(step)
            assert not gate.is_open


def test_leaving_by_an_exception_ends_the_copy(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer_module, "ABNORMAL_CLOSE_TIMEOUT_S", 0.1)
    with held_copies() as gate:
        ckpt = ck.Checkpointer(tmp_path, config=config())
        handle = ckpt.async_save(1, job.state)
        gate.wait_reached()
        ckpt.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        assert not gate.is_open
        with pytest.raises(ck.SaveFailedError, match="left by ZeroDivisionError"):
            handle.result(IN_TIME_S)
    job.optimizer.step()
    assert not guard._active
    assert ckpt._saver._pool.nbytes == 0


def test_nothing_keeps_a_state_once_it_is_copied(ckpt: ck.Checkpointer) -> None:
    job = Job()
    weight = weakref.ref(job.model[0].weight)
    ckpt.save(1, job.state)
    del job
    gc.collect()
    assert weight() is None


def test_the_thread_that_copies_ends_with_its_checkpointer(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with ck.Checkpointer(tmp_path / "root", config=config()):
        started = [thread for thread in threading.enumerate() if thread.name == "ckpt-snapshot"]
        started = [thread for thread in started if thread not in before]
        assert started
    for thread in started:
        thread.join(IN_TIME_S)
        assert not thread.is_alive()


def test_close_waits_for_the_copy(tmp_path: Path, job: Job) -> None:
    expected = job.now()
    with held_copies() as gate:
        ckpt = ck.Checkpointer(tmp_path, config=config())
        ckpt.async_save(1, job.state)
        gate.wait_reached()
        closing = in_thread(ckpt.close)
        assert waits(closing)
        gate.open()
        assert ends(closing)
    with ck.Checkpointer(tmp_path, config=config()) as again:
        assert same(job.restored(again), expected)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_steps_without_waiting(ckpt: ck.Checkpointer, gate: Gate, job: Job) -> None:
    """Its copy of the copying thread does not exist."""
    handle = ckpt.async_save(1, job.state)
    gate.wait_reached()
    child = os.fork()
    if child == 0:
        # OpenMP's threads are not in the child: had an earlier test started them, torch would wait for them.
        torch.set_num_threads(1)
        job.optimizer.step()
        os._exit(7)
    deadline = time.monotonic() + IN_TIME_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 7
    gate.open()
    handle.result()


LEAVES = """
import sys, threading, time, torch, ckptengine as ck
from ckptengine.adapters import guard

leaving, copy_items = threading.Event(), guard.copy_items

def copy_when_it_leaves(*args, **options):
    leaving.wait()
    time.sleep(0.2)
    copy_items(*args, **options)

guard.copy_items = copy_when_it_leaves

model = torch.nn.Linear(1024, 4096)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = ck.Checkpointer(sys.argv[1], config=ck.Config(snapshot="overlap"))
torch.nn.init.constant_(model.weight, 2.0)
ckpt.async_save(1, {"model": model, "optimizer": optimizer})
assert guard._active
leaving.set()
"""


def test_a_script_that_ends_during_the_copy_has_saved(tmp_path: Path) -> None:
    """The interpreter is ending: an executor would take no more work."""
    command = [sys.executable, "-W", "ignore", "-c", LEAVES, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    assert "was not closed" in run.stderr
    with ck.open_checkpoint(tmp_path) as opened:
        assert same(opened.get_tensor("model.weight"), torch.full((4096, 1024), 2.0))


def test_the_hook_is_gone_with_the_last_checkpointer(tmp_path: Path) -> None:
    from torch.optim import optimizer

    before = dict(optimizer._global_optimizer_pre_hooks)
    with ck.Checkpointer(tmp_path / "a", config=config()):
        with ck.Checkpointer(tmp_path / "b", config=config()):
            assert len(optimizer._global_optimizer_pre_hooks) == len(before) + 1
        assert len(optimizer._global_optimizer_pre_hooks) == len(before) + 1
    assert optimizer._global_optimizer_pre_hooks == before
