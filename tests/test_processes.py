"""A Checkpointer among processes: forks of its own, daemons, and a process at its limit of open files."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ck
from ckptengine.storage.failures import HINTS


def in_fork(work: Callable[[], Any]) -> str:
    """What `work` raises in a fork of this process, as text; "nothing" if it does not."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            text = "nothing"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writable, text.encode()[:4000])
        os._exit(0)
    os.close(writable)
    os.waitpid(pid, 0)
    with os.fdopen(readable, "rb") as pipe:
        return pipe.read().decode()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_is_refused_and_leaves_the_parents_saves_alone(tmp_path: Path) -> None:
    state = {"w": torch.full((1000,), 1.0)}
    with ck.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state)
        handle = ckpt.async_save(2, state)
        other = {"w": torch.full((1000,), 7.0)}
        for work in (
            lambda: ckpt.async_save(2, other),
            lambda: ckpt.save(3, other),
            lambda: ckpt.restore(other),
            lambda: ckpt.wait(),
            lambda: handle.done() or handle.result(),
        ):
            assert in_fork(work).startswith("CheckpointError: this ") or handle.done()
        assert in_fork(lambda: ckpt.steps() and ckpt.latest) == "nothing"
        assert in_fork(ckpt.close) == "nothing"
        handle.result()
        ckpt.save(3, state)
        target = {"w": torch.zeros(1000)}
        for step in (1, 2, 3):
            ckpt.restore(target, step=step)
            assert torch.equal(target["w"], state["w"])


def save_in_a_daemon(root: str, answer: Any) -> None:
    try:
        with ck.Checkpointer(root) as ckpt:
            ckpt.save(1, {"a": 1})
    except ck.SaveFailedError as error:
        answer.send(str(error))


def test_a_daemonic_process_is_told_that_it_cannot_save(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=save_in_a_daemon, args=(str(tmp_path), theirs), daemon=True)
    process.start()
    theirs.close()
    assert "daemon=False" in mine.recv()
    process.join(60)
    assert process.exitcode == 0
    mine.close()


def test_too_many_open_files_is_an_error_and_no_damage(tmp_path: Path) -> None:
    with ck.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": torch.full((100_000,), float(step))})
        target = {"w": torch.zeros(100_000)}
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        fillers = [os.open(os.devnull, os.O_RDONLY)]
        while fillers[-1] <= highest:
            fillers.append(os.open(os.devnull, os.O_RDONLY))
        outcomes = []
        for limit in range(fillers[-1] + 1, fillers[-1] + 8):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            try:
                info = ckpt.restore(target)
                outcomes.append((info.step, info.fell_back_from))
            except ck.StorageError as error:
                outcomes.append(error.errno)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
        assert outcomes[0] == errno.EMFILE
        assert outcomes[-1] == (2, ())
        assert set(outcomes) == {errno.EMFILE, (2, ())}


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Only so many files can be opened meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(highest + 40, hard), hard))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("snapshot", ["copy", "overlap"])
def test_a_save_that_finds_no_descriptor_says_which_limit_to_raise(tmp_path: Path, snapshot: Any) -> None:
    """Whatever it is for: the directory, the arena, the pipes to the writer process, its start."""
    state = {"w": torch.zeros(10)}
    with ck.Checkpointer(tmp_path / "warm") as ckpt:
        ckpt.save(1, state)  # what is imported and opened once
    saved, told = [], {}
    for left in range(20):
        root = tmp_path / str(left)
        with ck.Checkpointer(root, config=ck.Config(snapshot=snapshot, on_error="warn")) as ckpt:
            try:
                with descriptors_left(left):
                    handle = ckpt.async_save(1, state)
                    handle.wait_staged(60)
            except ck.CheckpointError as error:
                told[left] = str(error)
                continue
            handle.result(60)
            saved.append(left)
            break
    assert saved
    assert len(told) > 2
    assert {left: text for left, text in told.items() if HINTS[errno.EMFILE] not in text} == {}


def test_a_config_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"ckptengine\.Config"):
        ck.Checkpointer(tmp_path, config={"keep_last": 2})  # type: ignore[arg-type]


def test_a_root_may_be_bytes(tmp_path: Path) -> None:
    with ck.Checkpointer(os.fsencode(tmp_path)) as ckpt:  # type: ignore[arg-type]
        assert ckpt.root == str(tmp_path)
