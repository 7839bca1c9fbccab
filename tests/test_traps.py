"""What a training script may do, or have done to it, and a checkpoint must survive. Each test is a program of
its own; where NVRx alone loses the checkpoint, that is shown beside it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

import ckptengine as ck
from tests.helpers.scripts import Script

PROMPT_S = 25.0
"""From a moment that the script tells: far below any deadline of the engine; a busy machine needs a part of
it for the writer process to import torch."""

NO_CUDA = """
import torch
def _forbidden(*args, **kwargs):
    raise AssertionError("a CUDA call")
for _name in ("synchronize", "current_device", "set_device", "current_stream", "Stream", "_lazy_init"):
    setattr(torch.cuda, _name, _forbidden)
"""

STOCK = """
import os, sys, threading, time, torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
torch.cuda.synchronize = lambda *args: None
stock = TorchAsyncCheckpoint()
caller = stock._async_calls_queue._get_async_caller()
caller.rank = 0

def waits(seconds=3, blocked=None):
    # Whether NVRx still waits for the save to end after so long.
    blocked = blocked or (lambda: stock._async_calls_queue.maybe_finalize_async_calls(True, no_dist=True))
    waiter = threading.Thread(target=blocked, daemon=True)
    waiter.start()
    waiter.join(seconds)
    return waiter.is_alive()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def ok(script: Script, timeout_s: float = 60.0) -> str:
    assert script.ends(timeout_s) == 0, script.stdout + script.stderr
    return script.stdout


# --- the script ----------------------------------------------------------------------------------


def test_a_script_without_main_guard_process_group_or_cuda(tmp_path: Path, root: Path) -> None:
    """It runs once, what it changes after `async_save` is not in the checkpoint, and it leaves nothing."""
    path = tmp_path / "script.py"
    path.write_text(
        NO_CUDA
        + f"""
open({str(tmp_path / "lives")!r}, "a").write("x")
import numpy, ckptengine as ck

class Loader:
    def __init__(self, position): self.state = {{"position": position}}
    def state_dict(self): return self.state
    def load_state_dict(self, state): self.state = state

def made(value):
    return {{
        "tensor": torch.full((100_000,), value), "array": numpy.full(100_000, value), "list": [value],
        "dict": {{"a": [value]}}, "loader": Loader([value]),
    }}

with ck.Checkpointer({str(root)!r}) as ckpt:
    state = made(1)
    handle = ckpt.async_save(1, state)
    state["tensor"].fill_(2)
    state["array"][:] = 2
    for late in (state["list"], state["dict"]["a"], state["loader"].state["position"]):
        late.append(2)
    handle.result()
    target = made(3)
    ckpt.restore(target)
assert (target["tensor"] == 1).all() and (target["array"] == 1).all()
assert (target["list"], target["dict"], target["loader"].state) == ([1], {{"a": [1]}}, {{"position": [1]}})
"""
    )
    with Script(path) as script:
        ok(script)
        assert script.left() == []
    assert (tmp_path / "lives").read_text() == "x"


def test_a_script_that_does_not_close_ends_when_its_save_has(root: Path) -> None:
    with Script(
        f"""
        import torch, ckptengine as ck
        ckpt = ck.Checkpointer({str(root)!r})
        ckpt.async_save(1, {{"w": torch.ones(1000)}})
        print("saving", flush=True)
        """
    ) as script:
        script.says("saving")
        ok(script, PROMPT_S)
        assert script.left() == []
        assert "was not closed" in script.stderr
        assert "Traceback" not in script.stderr
    assert ck.verify(root, level="data").ok


def test_ctrl_c_ends_the_trainer_and_not_the_save(root: Path) -> None:
    """It reaches the whole process group, and the writer is still importing then."""
    with Script(
        f"""
        import time, torch, ckptengine as ck
        with ck.Checkpointer({str(root)!r}) as ckpt:
            ckpt.async_save(1, {{"w": torch.ones(1000)}})
            print("saving", flush=True)
            time.sleep(60)
        """
    ) as script:
        script.says("saving")
        script.interrupt()
        assert script.ends(PROMPT_S) == -signal.SIGINT
        assert script.stderr.count("Traceback") == 1, script.stderr
        assert script.left() == []
    assert ck.verify(root, level="data").ok


def test_a_second_ctrl_c_waits_for_nothing(root: Path) -> None:
    with Script(
        f"""
        import os, signal, time, torch, ckptengine as ck
        with ck.Checkpointer({str(root)!r}) as ckpt:
            ckpt.save(1, {{"w": torch.ones(1000)}})
            # Save 2 cannot end, so closing has to wait.
            os.kill(ckpt.writer_pid, signal.SIGSTOP)
            ckpt.async_save(2, {{"w": torch.ones(1000)}})
            print("saving", flush=True)
            time.sleep(60)
        """
    ) as script:
        script.says("saving")
        script.interrupt()
        time.sleep(1)
        assert script.process.poll() is None
        script.interrupt()
        assert script.ends(PROMPT_S) != 0
        assert script.left() == []
    assert ck.verify(root, level="data").step == 1


def test_a_forked_child_leaves_its_parents_writer_alone_and_a_vanished_parent_takes_it_along(
    root: Path,
) -> None:
    with Script(
        f"""
        import os, sys, torch, ckptengine as ck
        with ck.Checkpointer({str(root)!r}) as ckpt:
            ckpt.save(1, {{"w": torch.ones(1000)}})
            child = os.fork()
            if child == 0:
                sys.exit(7)
            assert os.waitpid(child, 0)[1] == 7 << 8
            pid = ckpt.writer_pid
            ckpt.save(2, {{"w": torch.ones(1000)}})
            assert ckpt.writer_pid == pid
            os._exit(0)
        """
    ) as script:
        ok(script)
        assert script.left() == []
    assert ck.verify(root, level="data").step == 2


def test_twenty_checkpointers_leave_nothing_behind(root: Path) -> None:
    """Descriptors, threads, processes and arenas; half of them were left by an exception in the middle of a
    save."""
    with Script(
        f"""
        import gc, os, threading, psutil, torch, ckptengine as ck
        from ckptengine import checkpointer
        checkpointer.ABNORMAL_CLOSE_TIMEOUT_S = 0.0

        def one(fail):
            with ck.Checkpointer({str(root)!r}) as ckpt:
                handle = ckpt.async_save(1, {{"w": torch.ones(1000)}})
                if fail:
                    raise ZeroDivisionError
                handle.result()

        def held():
            gc.collect()
            descriptors = len(os.listdir("/proc/self/fd"))
            maps = sum("ckptengine" in line for line in open("/proc/self/maps"))
            return descriptors, maps, threading.active_count(), len(psutil.Process().children())

        one(False)
        before = held()
        for number in range(20):
            try:
                one(fail=number % 10)
            except ZeroDivisionError:
                pass
        after = held()
        assert after == before, f"{{before}} became {{after}}"
        """
    ) as script:
        ok(script, 90)
        assert script.left() == []


# --- limits of the machine -----------------------------------------------------------------------


def test_fifty_thousand_tensors_with_256_descriptors(root: Path) -> None:
    """All of them travel in one memfd. NVRx sends a descriptor for each, in a thread whose error nobody
    sees."""
    with Script(
        STOCK
        + f"""
import resource, ckptengine as ck
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
values = torch.arange(50_000, dtype=torch.float32)
state = {{f"t{{i}}": values[i : i + 1].clone() for i in range(50_000)}}
with ck.Checkpointer({str(root)!r}) as ckpt:
    ckpt.save(1, state)
    target = {{name: torch.zeros(1) for name in state}}
    ckpt.restore(target)
assert torch.equal(torch.cat(list(target.values())), values)
print("ours is whole", flush=True)
stock.async_save(dict(list(state.items())[:1000]), {str(root / "stock.pt")!r})
print("stock waits:", waits(5), os.path.exists({str(root / "stock.pt")!r}))
caller.process.kill()
caller.process.join()
print("so does its destructor, for a dead worker:", waits(3, caller.__del__), flush=True)
os._exit(0)
"""
    ) as script:
        assert ok(script, 100).splitlines() == [
            "ours is whole",
            "stock waits: True False",
            "so does its destructor, for a dead worker: True",
        ]
        assert "Too many open files" in script.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_large_state_with_64_mib_of_dev_shm(root: Path) -> None:
    """As pods have it by default. NVRx shares tensors through files there: it drops the save, or dies of
    SIGBUS."""
    mount = 'mount -t tmpfs -o size=64m none /dev/shm || exit 99; exec "$@"'
    with Script(
        STOCK
        + f"""
import ckptengine as ck
state = {{"w": torch.arange(60 << 20, dtype=torch.int32)}}
with ck.Checkpointer({str(root)!r}) as ckpt:
    ckpt.save(1, state)
    target = {{"w": torch.zeros(60 << 20, dtype=torch.int32)}}
    ckpt.restore(target)
assert torch.equal(target["w"], state["w"])
print("ours is whole", flush=True)
stock.async_save(state, {str(root / "stock.pt")!r})
print("stock waits:", waits(5), os.path.exists({str(root / "stock.pt")!r}), flush=True)
os._exit(0)
""",
        before=["unshare", "--mount", "sh", "-c", mount, "sh"],
    ) as script:
        code = script.ends(90)
        if code in (1, 99) and not script.stdout:
            pytest.skip(f"cannot mount here: {script.stderr}")
        ours, *stock = script.stdout.splitlines() or [""]
        assert ours == "ours is whole", script.stderr
        assert stock == ["stock waits: True False"] or code == -signal.SIGBUS


# --- NVRx as it comes ----------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_stock_nvrx_cannot_save_without_cuda(tmp_path: Path) -> None:
    stock = TorchAsyncCheckpoint()
    try:
        with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
            stock.async_save({"w": torch.ones(3)}, tmp_path / "stock.pt")
    finally:
        TorchAsyncCheckpoint.async_fn = None


def test_stock_nvrx_tears_snapshots_drops_what_it_cannot_pickle_and_leaves_orphans(tmp_path: Path) -> None:
    with Script(
        STOCK
        + f"""
w = torch.zeros(1000)
stock.async_save({{"w": w}}, {str(tmp_path / "torn.pt")!r})
w.fill_(1)
while not stock._async_calls_queue.maybe_finalize_async_calls(blocking=False, no_dist=True):
    time.sleep(0.01)
print("torn:", bool(torch.load({str(tmp_path / "torn.pt")!r})["w"].all()))
stock.async_save({{"f": lambda: None}}, {str(tmp_path / "dropped.pt")!r})
print("waits for what was dropped:", waits(), os.path.exists({str(tmp_path / "dropped.pt")!r}), flush=True)
os._exit(0)
"""
    ) as script:
        assert ok(script).splitlines() == ["torn: True", "waits for what was dropped: True False"]
        time.sleep(1)
        assert len(script.writers()) == 1, "the orphan"


def test_a_script_whose_writer_is_dead_ends(root: Path) -> None:
    with Script(
        f"""
        import os, signal, torch, ckptengine as ck
        ckpt = ck.Checkpointer({str(root)!r})
        ckpt.async_save(1, {{"w": torch.ones(3)}})
        os.kill(ckpt.writer_pid, signal.SIGKILL)
        print("killed", flush=True)
        """
    ) as script:
        script.says("killed")
        assert script.ends(PROMPT_S) == 0
        # Killed before it had the task, the writer is replaced and the save goes on with the new one.
        assert "killed by SIGKILL" in script.stderr or ck.verify(root).ok
        assert script.left() == []
