"""Checkpoint systems that go wrong on purpose. The runner imports them by `module:Class`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

from native_bench.peers.base import SaveSeconds, Sync, Tensors, Traits
from native_bench.peers.engine import Engine
from native_bench.peers.torch_save import TorchSave


class Wrong(TorchSave):
    """One byte of one tensor comes back wrong."""

    traits = Traits(name="wrong", title="wrong", how="")

    def restore(self, directory: str, target: Tensors) -> None:
        import torch

        super().restore(directory, target)
        last = list(target.values())[-1]
        last.view(torch.uint8)[-1] ^= 1


class Lazy(TorchSave):
    """Restores nothing at all, and would be right if the target still held what an earlier restore left
    there."""

    traits = Traits(name="lazy", title="lazy", how="")
    restored = False

    def restore(self, directory: str, target: Tensors) -> None:
        if not self.restored:
            super().restore(directory, target)
        self.restored = True


class Slow(TorchSave):
    traits = Traits(name="slow", title="slow", how="")


class LikeTorch(TorchSave):
    traits = Traits(name="like-torch", title="like torch", how="", restores_like="torch")


class SlowToo(Slow):
    traits = Traits(name="slow-too", title="slow, too", how="")


class SlowReader(TorchSave):
    traits = Traits(name="slow-reader", title="slow reader", how="", saves_like="torch")


class WrongLikeTorch(Wrong):
    traits = Traits(name="wrong-like-torch", title="wrong like torch", how="", restores_like="torch")


class Hanging(Sync):
    traits = Traits(name="hanging", title="hanging", how="")

    def write(self, directory: str, step: int, state: Tensors) -> None:
        time.sleep(3600)


class Dying(Sync):
    traits = Traits(name="dying", title="dying", how="")

    def write(self, directory: str, step: int, state: Tensors) -> None:
        os.write(2, b"about to die\n")
        os._exit(7)


class Killed(Sync):
    """As the kernel ends a process for want of memory."""

    traits = Traits(name="killed", title="killed", how="")

    def write(self, directory: str, step: int, state: Tensors) -> None:
        os.write(2, b"too much\n")
        os.kill(os.getpid(), signal.SIGKILL)


class DyingOnRank1(TorchSave):
    traits = Traits(name="dying-on-rank-1", title="dying", how="")

    def write(self, directory: str, step: int, state: Tensors) -> None:
        if self.place.rank == 1:
            os._exit(7)
        import torch.distributed as dist

        dist.barrier()


class Absent(Sync):
    traits = Traits(name="absent", title="absent", how="")

    def missing(self) -> str | None:
        return "not installed (of_all_things)"


class Greedy(Sync):
    traits = Traits(name="greedy", title="greedy", how="", descriptors=10**9)


class Littering(TorchSave):
    """Leaves a helper process behind."""

    traits = Traits(name="littering", title="littering", how="")

    def write(self, directory: str, step: int, state: Tensors) -> None:
        import subprocess

        self.helper = subprocess.Popen(["sleep", "3600"])
        with open(os.path.join(directory, "pid"), "w") as file:
            file.write(str(self.helper.pid))


class Deaf(TorchSave):
    """Has a helper that holds a semaphore, and does not listen."""

    traits = Traits(name="deaf", title="deaf", how="")

    def write(self, directory: str, step: int, state: Tensors) -> None:
        import subprocess
        import sys

        script = (
            "import multiprocessing, signal, time;"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            "made = multiprocessing.get_context('spawn').Semaphore();"
            "print(made._semlock.name, flush=True);"
            "time.sleep(3600)"
        )
        self.helper = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert self.helper.stdout is not None
        with open(os.path.join(directory, "semaphore"), "w") as file:
            file.write(self.helper.stdout.readline().strip())


class DeafAndHanging(Deaf):
    traits = Traits(name="deaf-and-hanging", title="deaf and hanging", how="")

    def write(self, directory: str, step: int, state: Tensors) -> None:
        super().write(directory, step, state)
        time.sleep(3600)


class SlowedEngine(Engine):
    """As the engine would be after a change that makes each of its calls longer by far."""

    traits = Traits(name="slowed-engine", title="slowed engine", how="", fsyncs=True, holds=1)
    by_s = 1.5

    def save(self, directory: str, step: int, state: Tensors) -> SaveSeconds:
        found = super().save(directory, step, state)
        return SaveSeconds(found.stall_s + self.by_s, found.done_s + self.by_s, found.extra)

    def restore(self, directory: str, target: Tensors) -> Mapping[str, float]:
        found = super().restore(directory, target)
        time.sleep(self.by_s)
        return found
