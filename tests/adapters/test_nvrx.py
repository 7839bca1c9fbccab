"""The writer process on NVRx's queue, in the cases that NVRx itself waits on for ever. Real processes
throughout."""

from __future__ import annotations

import errno
import gc
import inspect
import logging
import multiprocessing.process
import multiprocessing.spawn
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt import core
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

import ckptengine as ck
from ckptengine.adapters import nvrx, worker
from ckptengine.adapters.nvrx import WriterProcess
from tests.helpers import writer_functions
from tests.helpers.ranks import lives
from tests.helpers.scripts import Script

START_S = 60.0

can_abort = pytest.mark.skipif(
    not hasattr(core, "abort_nvrx_checkpoint"), reason="this NVRx has no abort (0.5 and later have)"
)
can_warm_up = pytest.mark.skipif(
    not hasattr(AsyncCallsQueue, "warmup_persistent_caller"),
    reason="this NVRx starts no worker ahead (0.6 and later do)",
)


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


def test_a_writer_that_still_works_is_waited_for(
    writers: list[WriterProcess], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine that is only busy is no reason for an alarm, nor for an end in the middle."""
    writer = make(writers, writer_functions.work_for_a_while)
    writer.async_save(str(tmp_path / "begun").encode())
    wait_for((tmp_path / "begun").exists)
    with caplog.at_level(logging.INFO, nvrx.__name__):
        writer.close(timeout_s=1.0, busy_timeout_s=START_S)
    assert writer.exitcode == 0
    assert "still works after" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}


@pytest.mark.parametrize(
    ("fn", "busy_timeout_s", "reason"),
    [(writer_functions.work, 2.0, "still works after"), (writer_functions.hang, START_S, "has done nothing")],
)
def test_a_writer_that_is_killed_in_the_end_is_said_to_hang_or_to_be_slow(
    writers: list[WriterProcess],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fn: object,
    busy_timeout_s: float,
    reason: str,
) -> None:
    writer = make(writers, fn)
    writer.async_save(str(tmp_path / "begun").encode())
    wait_for((tmp_path / "begun").exists)
    writer.close(timeout_s=2.0, busy_timeout_s=busy_timeout_s)
    assert writer.exitcode == -9
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert reason in record.getMessage()


def test_it_is_warm_once_it_could_work(writers: list[WriterProcess], tmp_path: Path) -> None:
    writer = make(writers, writer_functions.touch)
    assert not writer.warm
    writer.async_save(str(tmp_path / "ran").encode())
    wait_for((tmp_path / "ran").exists)
    wait_for(lambda: writer.warm)  # its word takes another way than what it does


def test_a_process_that_cannot_be_started_leaves_nothing_that_waits(
    writers: list[WriterProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.process.BaseProcess, "start", start)
        with pytest.raises(OSError, match="temporarily unavailable"):
            WriterProcess(0, writer_functions.touch, worker.warm_up).start()
        # Stock: NVRx's destructor waits for ever for the process that is not there.
        collected = threading.Thread(target=gc.collect)
        collected.start()
        collected.join(10)
        assert not collected.is_alive()
        with ck.Checkpointer(tmp_path) as ckpt:
            with pytest.raises(ck.SaveFailedError, match=r"cannot be started.*temporarily unavailable"):
                ckpt.save(1, {"w": torch.ones(3)})
            patch.undo()
            ckpt.save(2, {"w": torch.ones(3)})
            assert ckpt.steps() == [2]


def test_only_the_thread_that_starts_a_writer_hides_its_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def look(who: str) -> None:
        data = multiprocessing.spawn.get_preparation_data("p")
        seen[who] = data.get("init_main_from_name", data.get("init_main_from_path"))

    look("before")
    with nvrx._lifeline_as_main_module():
        look("here")
        other = threading.Thread(target=look, args=("there",))
        other.start()
        other.join()
    look("after")
    assert seen["here"] == "ckptengine.adapters.lifeline"
    assert seen["before"] == seen["there"] == seen["after"] != seen["here"]


# --- what others do with NVRx in the same process ------------------------------------------------


@can_warm_up
def test_a_worker_that_another_user_has_started_ahead_stays_theirs(writers: list[WriterProcess]) -> None:
    options = {"cpu_shm_mode": True}
    AsyncCallsQueue.warmup_persistent_caller(0, **options)
    theirs = AsyncCallsQueue._warmup_persistent_caller
    try:
        writer = make(writers, writer_functions.touch)
        writer.start()
        writer.kill()
        del writer
        writers.clear()
        gc.collect()
        assert AsyncCallsQueue._warmup_persistent_caller is theirs
        assert theirs.process.is_alive()
    finally:
        AsyncCallsQueue._warmup_persistent_caller = None
        theirs.process.kill()
        theirs.process.join()
        theirs.process = None


def test_other_writers_of_nvrx_do_not_drain_ours(writers: list[WriterProcess]) -> None:
    filesystem_async = pytest.importorskip(
        "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async", exc_type=ImportError
    )
    writer_class = filesystem_async.FileSystemWriterAsync
    if not hasattr(writer_class, "_shm_drain_callback"):
        pytest.skip("this NVRx has no such callback (0.6 and later have)")
    before = writer_class._shm_drain_callback = lambda: None
    try:
        writer = make(writers, writer_functions.touch)
        writer.start()
        assert writer_class._shm_drain_callback is before
        writer.kill()
        assert writer_class._shm_drain_callback is before
    finally:
        writer_class._shm_drain_callback = None


@can_abort
def test_an_abort_in_the_middle_of_a_save_fails_it_at_once_and_the_next_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *args: 0)
    config = ck.Config(codec="zstd", zstd_level=19, block_nbytes=1 << 18, io_threads=1)
    with ck.Checkpointer(tmp_path, config=config) as ckpt:
        handle = ckpt.async_save(1, {"w": torch.randn(2_000_000)})
        wait_for(lambda: list(tmp_path.glob("step-*/*/shard-*")))
        started = time.monotonic()
        core.abort_nvrx_checkpoint()
        with pytest.raises(ck.SaveFailedError, match="the writer process ended"):
            handle.result(20)
        assert time.monotonic() - started < 10
        ckpt.save(2, {"w": torch.ones(3)})
        assert ckpt.steps() == [2]


@can_abort
def test_the_stock_queue_finalizes_an_aborted_save_as_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *args: 0)
    known = inspect.signature(AsyncCallsQueue.__init__).parameters
    queue = AsyncCallsQueue(persistent=True, **({"cpu_shm_mode": True} if "cpu_shm_mode" in known else {}))
    queue._get_async_caller().rank = 0
    finalized: list[str] = []
    path = str(tmp_path / "never").encode()
    queue.schedule_async_request(
        AsyncRequest(writer_functions.touch, (path,), [lambda: finalized.append("!")], {})
    )
    queue.close(abort=True)
    queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
    assert finalized == ["!"]
    assert not (tmp_path / "never").exists()


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
    wait_for(lambda: not lives(pid))


def test_a_trainer_killed_before_the_first_task_is_under_way_leaves_no_writer() -> None:
    """Nothing that the writer waits for would ever tell it: it holds both ends of its queue."""
    with Script(
        """
        import os, signal
        from ckptengine.adapters import worker
        from ckptengine.adapters.nvrx import WriterProcess
        from tests.helpers import writer_functions
        writer = WriterProcess(0, writer_functions.touch, worker.warm_up)
        writer._caller.queue.put = lambda task: os.kill(os.getpid(), signal.SIGKILL)
        writer.start()
        """
    ) as script:
        assert script.ends() == -9
        assert script.left() == []


def test_a_trainer_that_does_not_close_ends_all_the_same() -> None:
    """A worker of 0.4.1 is no daemon: multiprocessing waits for it at exit, and it for tasks."""
    with Script(
        """
        from ckptengine.adapters import worker
        from ckptengine.adapters.nvrx import WriterProcess
        from tests.helpers import writer_functions
        writer = WriterProcess(0, writer_functions.touch, worker.warm_up)
        writer.start()
        """
    ) as script:
        assert script.ends() == 0
        assert script.left() == []


def test_a_save_and_a_restore_from_end_to_end(tmp_path: Path) -> None:
    with ck.Checkpointer(tmp_path) as ckpt:
        state = {"w": torch.arange(100_000), "step": 1}
        handle = ckpt.async_save(1, state)
        state["w"].zero_()
        assert handle.result(60).step == 1
        target = {"w": torch.zeros(100_000, dtype=torch.int64), "step": 0}
        assert ckpt.restore(target).step == 1
    assert torch.equal(target["w"], torch.arange(100_000))
    assert target["step"] == 1


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
