"""What has been copied is written while the rest is still being copied, and counts only when all of it is."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ck
from ckptengine import snapshot
from ckptengine.adapters import guard
from ckptengine.adapters.stage import copy_items
from ckptengine.format.names import AttemptId
from ckptengine.snapshot import Staging
from ckptengine.staging.arena import Arena
from tests.adapters.fake import same
from tests.helpers.gates import IN_TIME_S, Gate, held_copies
from tests.helpers.scripts import Script
from tests.write.test_save import staged

BLOCK = 4096


@pytest.fixture(autouse=True)
def _one_writer(lent_writer: None) -> None:
    pass


def config(**options: Any) -> ck.Config:
    return ck.Config(block_nbytes=BLOCK, commit_timeout_s=60.0, io_threads=2, **options)


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[ck.Checkpointer]:
    with ck.Checkpointer(tmp_path / "root", config=config()) as made:
        yield made


@pytest.fixture
def overlapping(tmp_path: Path) -> Iterator[ck.Checkpointer]:
    with ck.Checkpointer(tmp_path / "root", config=config(snapshot="overlap")) as made:
        yield made


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds copies in the call."""
    made = Gate()
    monkeypatch.setattr(snapshot, "copy_items", made.copy)
    yield made
    made.open()


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"t{i}": torch.randint(0, 256, (BLOCK,), dtype=torch.uint8) for i in range(20)}


def training(seed: int = 0) -> tuple[torch.nn.ParameterList, dict[str, Any]]:
    """Parameters of a block each, and a state that is copied behind their training."""
    torch.manual_seed(seed)
    model = torch.nn.ParameterList(torch.randn(BLOCK // 4) for _ in range(20))
    return model, {"train": ck.training_state(model, torch.optim.SGD(model.parameters(), lr=0.1))}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


class Saving(threading.Thread):
    """A save in a thread of its own, since the call is held."""

    def __init__(self, ckpt: ck.Checkpointer, step: int, state: Any) -> None:
        super().__init__(daemon=True)
        self._save = lambda: ckpt.save(step, state)
        self.info: ck.CommitInfo | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.info = self._save()
        except BaseException as error:
            self.error = error


def shard_of(root: str | Path, step: int) -> bytes:
    """As far as it is written."""
    found = sorted(Path(root).glob(f"step-*{step}/a*/shard-*"))
    return found[-1].read_bytes() if found else b""


def wait_for_blocks(root: str | Path, step: int, blocks: list[bytes]) -> bytes:
    deadline = time.monotonic() + IN_TIME_S
    while not all(block in (written := shard_of(root, step)) for block in blocks):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return written


def test_what_is_copied_is_written_before_the_rest_is(ckpt: ck.Checkpointer, gate: Gate) -> None:
    tensors = state()
    blocks = [bytes_of(tensor) for tensor in tensors.values()]
    saving = Saving(ckpt, 1, tensors)
    gate.wait_reached()
    written = wait_for_blocks(ckpt.root, 1, blocks[:10])
    assert not any(block in written for block in blocks[10:])
    # Neither the header, nor a commit: to any reader this is an unfinished file.
    assert written[:8] == bytes(8)
    assert (ckpt.latest, saving.info) == (None, None)
    gate.open()
    saving.join(IN_TIME_S)
    info = saving.info
    assert info is not None
    assert 0 < info.stall_s < IN_TIME_S
    assert 0 < info.times.staged <= info.times.written <= info.times.durable <= info.times.committed
    again = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    ckpt.restore(again)
    assert same(again, tensors)
    assert ck.verify(ckpt.root).ok


def test_a_call_that_returns_with_the_copy_is_not_slowed_by_writing(
    ckpt: ck.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []

    def watched(items: Any, offsets: Any, payload: memoryview, **options: Any) -> None:
        copy_items(items, offsets, payload, **options)
        (pending,) = ckpt._saver._monitor._pending
        assert pending.staging is not None
        begun.append(pending.staging.begun.is_set())

    monkeypatch.setattr(snapshot, "copy_items", watched)
    ckpt.async_save(1, state()).result(IN_TIME_S)
    ckpt.save(2, state())
    assert begun == [False, True]


@pytest.mark.parametrize("call", ["save", "async_save"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_copy_that_fails_half_way_is_nothing_at_all(
    ckpt: ck.Checkpointer, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], call: str
) -> None:
    ckpt.save(1, state(1))

    def failing(items: Any, offsets: Any, payload: memoryview, **options: Any) -> None:
        copy_items(items[:10], offsets[:10], payload)
        options["on_staged"](offsets[10])
        if call == "save":
            wait_for_blocks(ckpt.root, 2, [bytes_of(items[9].source)])
        raise kind("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "copy_items", failing)
        with pytest.raises(kind, match="the device is gone"):
            getattr(ckpt, call)(2, state(2))
    ckpt.wait()
    assert ckpt.steps() == [1]
    assert shard_of(ckpt.root, 2) == b""
    held = ckpt._saver._pool.nbytes
    for step in range(3, 7):
        ckpt.save(step, state(step))
    assert ckpt._saver._pool.nbytes == held
    again = state(9)
    assert ckpt.restore(again).step == 6
    assert same(again, state(6))


def test_a_writer_killed_meanwhile_fails_the_save(ckpt: ck.Checkpointer, gate: Gate) -> None:
    saving = Saving(ckpt, 2, state(2))
    gate.wait_reached()
    wait_for_blocks(ckpt.root, 2, [bytes_of(state(2)["t0"])])
    assert ckpt.writer_pid is not None
    os.kill(ckpt.writer_pid, signal.SIGKILL)
    time.sleep(0.1)
    gate.open()
    saving.join(IN_TIME_S)
    assert isinstance(saving.error, ck.SaveFailedError)
    assert "SIGKILL" in str(saving.error)
    assert ckpt.steps() == []
    ckpt.save(3, state(3))
    again = state(4)
    assert ckpt.restore(again).step == 3
    assert same(again, state(3))


def test_a_retry_waits_for_the_same_copy(tmp_path: Path, gate: Gate) -> None:
    with ck.Checkpointer(tmp_path / "root", config=config(retries=1)) as ckpt:
        saving = Saving(ckpt, 1, state())
        gate.wait_reached()
        first = [bytes_of(state()["t0"])]
        wait_for_blocks(ckpt.root, 1, first)
        assert ckpt.writer_pid is not None
        killed = ckpt.writer_pid
        os.kill(killed, signal.SIGKILL)
        deadline = time.monotonic() + IN_TIME_S
        while len(list(Path(ckpt.root).glob("step-*1/a*/shard-*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        wait_for_blocks(ckpt.root, 1, first)
        assert (ckpt.writer_pid != killed, ckpt.latest) == (True, None)
        gate.open()
        saving.join(IN_TIME_S)
        assert saving.info is not None
        assert AttemptId.parse(saving.info.attempt).retry == 1
        again = state(4)
        ckpt.restore(again)
        assert same(again, state())
        assert ck.verify(ckpt.root).ok


def test_a_snapshot_that_turns_out_torn_after_its_blocks_were_written_is_nothing_at_all(
    overlapping: ck.Checkpointer,
) -> None:
    ckpt = overlapping
    model, tensors = training()
    ckpt.save(1, tensors)
    with torch.no_grad():
        model[0].add_(1)
    with held_copies() as gate:
        handle = ckpt.async_save(2, tensors)
        gate.wait_reached()
        wait_for_blocks(ckpt.root, 2, [bytes_of(model[0])])
        with torch.no_grad():
            model[0].mul_(2)
    with pytest.raises(ck.SaveFailedError, match="while it was being copied") as caught:
        handle.result(IN_TIME_S)
    assert (caught.value.rank, caught.value.fqn) == (0, "train.model.0")
    assert (ckpt.steps(), shard_of(ckpt.root, 2)) == ([1], b"")
    ckpt.save(3, tensors)
    other, target = training(5)
    assert ckpt.restore(target).step == 3
    assert same(other.state_dict(), model.state_dict())


def test_a_copy_behind_the_training_that_fails_half_way_is_nothing_at_all(
    overlapping: ck.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = overlapping
    model, tensors = training()

    def failing(items: Any, offsets: Any, payload: memoryview, **options: Any) -> None:
        half = len(items) // 2
        copy_items(items[:half], offsets[:half], payload)
        options["on_staged"](min(offsets[half:]))
        wait_for_blocks(ckpt.root, 1, [bytes_of(model[0])])
        raise OSError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(guard, "copy_items", failing)
        patch.setattr(guard, "LATE_NBYTES", 1)
        handle = ckpt.async_save(1, tensors)
        with pytest.raises(ck.SaveFailedError, match="the device is gone"):
            handle.result(IN_TIME_S)
    assert (ckpt.steps(), shard_of(ckpt.root, 1), handle.staged()) == ([], b"", False)
    held = ckpt._saver._pool.nbytes
    for step in range(2, 6):
        ckpt.save(step, tensors)
    assert ckpt._saver._pool.nbytes == held


def test_a_trainer_killed_while_it_copies_leaves_the_commit_before(tmp_path: Path) -> None:
    root = tmp_path / "root"
    script = f"""
        import sys, time, torch, ckptengine as ck
        from ckptengine import snapshot
        from ckptengine.adapters.stage import copy_items
        from tests.test_pipelining import config, state

        def half(items, offsets, payload, **options):
            copy_items(items[:10], offsets[:10], payload)
            options["on_staged"](offsets[10])
            print("half", flush=True)
            time.sleep(600)

        with ck.Checkpointer({str(root)!r}, config=config()) as ckpt:
            ckpt.save(1, state(1))
            snapshot.copy_items = half
            ckpt.save(2, state(2))
        """
    with Script(script) as trainer:
        trainer.says("half")
        wait_for_blocks(root, 2, [bytes_of(tensor) for tensor in list(state(2).values())[:10]])
        trainer.process.kill()
        assert trainer.left() == []
    report = ck.verify(root, level="data")
    assert report.ok
    with ck.Checkpointer(root, config=config()) as ckpt:
        again = state(3)
        assert (ckpt.restore(again).step, ckpt.steps()) == (1, [1])
        assert same(again, state(1))
        ckpt.save(2, state(2))
        assert (ckpt.restore(again).step, same(again, state(2))) == (2, True)


def test_what_is_given_up_before_it_begins_never_does() -> None:
    staging = Staging(0)
    staging.cancel(ck.SaveFailedError("given up"))
    assert staging.begun.is_set()
    assert str(staging.error).startswith("given up")
    with Arena(1) as arena, pytest.raises(ck.SaveFailedError, match="given up"):
        staging.begin(arena, staged("/nowhere", 1, 0, 1, ranks=1)[0])
    assert (staging.arena, staging.task) == (None, None)
