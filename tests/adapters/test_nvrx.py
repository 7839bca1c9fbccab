"""The writer process on NVRx's queue, in the cases that NVRx itself waits on for ever. Real processes
throughout."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

from ckptengine.adapters import worker
from ckptengine.adapters.nvrx import WriterProcess
from tests.helpers import writer_functions

START_S = 60.0


def wait_for(condition: object, timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def writers() -> Iterator[list[WriterProcess]]:
    made: list[WriterProcess] = []
    yield made
    for writer in made:
        writer.kill()


def make(writers: list[WriterProcess], fn: object, rank: int = 0) -> WriterProcess:
    writer = WriterProcess(rank, fn, worker.warm_up)  # type: ignore[arg-type]
    writers.append(writer)
    return writer


def test_it_extends_nvrx_and_leaves_other_users_of_nvrx_alone(writers: list[WriterProcess]) -> None:
    before = TorchAsyncCheckpoint.async_fn = lambda: None
    try:
        assert isinstance(make(writers, writer_functions.touch), TorchAsyncCheckpoint)
        assert TorchAsyncCheckpoint.async_fn is before
    finally:
        TorchAsyncCheckpoint.async_fn = None


def test_tasks_run_in_another_process_without_a_process_group_or_device(
    writers: list[WriterProcess], tmp_path: Path
) -> None:
    writer = make(writers, writer_functions.touch, rank=5)
    for name in ("a", "b"):
        writer.async_save(str(tmp_path / name).encode())
        wait_for((tmp_path / name).exists)
        writer.finalize_async_save()
    pids = {(tmp_path / name).read_text().split()[0] for name in ("a", "b")}
    assert pids == {str(writer.pid)}
    assert writer.pid != os.getpid()
    assert writer.exitcode is None


def test_close_lets_the_queued_tasks_finish(writers: list[WriterProcess], tmp_path: Path) -> None:
    writer = make(writers, writer_functions.touch)
    for i in range(5):
        writer.async_save(str(tmp_path / str(i)).encode())
    writer.close(timeout_s=START_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == list("01234")
    assert writer.exitcode == 0


@pytest.mark.parametrize(("fn", "exitcode"), [(writer_functions.raise_error, 1), (writer_functions.die, -9)])
def test_a_writer_that_raises_or_is_killed_is_seen_by_its_exit_code_and_finalize_returns(
    writers: list[WriterProcess], fn: object, exitcode: int
) -> None:
    writer = make(writers, fn)
    writer.async_save(b"")
    wait_for(lambda: writer.exitcode is not None)
    assert writer.exitcode == exitcode
    # Stock: `finalize_async_save(blocking=True)` polls for ever here.
    writer.finalize_async_save(blocking=True)
    writer.close()


def test_a_writer_that_hangs_is_killed_after_the_timeout(writers: list[WriterProcess]) -> None:
    writer = make(writers, writer_functions.hang)
    writer.async_save(b"")
    writer.close(timeout_s=0.5)
    assert writer.exitcode == -9


def test_the_stock_queue_polls_for_ever_when_its_writer_dies() -> None:
    """The trap this package works around; when this fails, NVRx has changed and the adapter may shrink."""
    queue = AsyncCallsQueue(persistent=True)
    caller = queue._get_async_caller()
    caller.rank = 0
    try:
        queue.schedule_async_request(AsyncRequest(writer_functions.die, (b"",), [], {}))
        wait_for(lambda: not caller.process.is_alive())
        assert queue.maybe_finalize_async_calls(blocking=False, no_dist=True) == []
        assert queue.get_num_unfinalized_calls() == 1
    finally:
        caller.process.join()
        caller.process = None
        queue.async_calls.clear()
        for q in (caller.queue, caller.preload_q, caller.comp_q):
            q.cancel_join_thread()
            q.close()


def run_script(body: str, *, timeout_s: float = 60.0, kill: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=Path(__file__).parents[2],
        check=False,
    )


def test_a_trainer_that_is_killed_takes_its_idle_writer_with_it(tmp_path: Path) -> None:
    result = run_script(
        f"""
        import os, signal, time
        from ckptengine.adapters import worker
        from ckptengine.adapters.nvrx import WriterProcess
        from tests.helpers import writer_functions
        writer = WriterProcess(0, writer_functions.touch, worker.warm_up)
        writer.async_save({str(tmp_path / "ran")!r}.encode())
        while not os.path.exists({str(tmp_path / "ran")!r}):
            time.sleep(0.01)
        print(writer.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert result.returncode == -9, result.stderr
    pid = int(result.stdout)
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 10.0)


def test_a_script_without_a_main_guard_does_not_run_again_in_the_writer(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parents[2])!r})
            open({str(tmp_path / "lives")!r}, "a").write("x")
            from ckptengine.adapters import worker
            from ckptengine.adapters.nvrx import WriterProcess
            from tests.helpers import writer_functions
            writer = WriterProcess(0, writer_functions.touch, worker.warm_up)
            writer.async_save({str(tmp_path / "ran")!r}.encode())
            writer.close(timeout_s=60)
            """
        )
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "lives").read_text() == "x"
    assert (tmp_path / "ran").read_text().endswith("/ckptengine/adapters/lifeline.py")
