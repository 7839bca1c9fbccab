"""Functions for a writer process to run; a module of their own, since that process looks them up by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def touch(path: bytes) -> None:
    """Say who ran the task, and what `__main__` is there."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    target = Path(path.decode())
    target.with_suffix(".tmp").write_text(f"{os.getpid()} {main}")
    target.with_suffix(".tmp").rename(target)


def raise_error(message: bytes) -> None:
    raise RuntimeError(message.decode())


def die(_: bytes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(begun: bytes) -> None:
    if begun:
        touch(begun)
    time.sleep(600)


def work(begun: bytes) -> None:
    """Keep a processor busy, for good; `begun`: where to say that it has begun."""
    touch(begun)
    while True:
        pass


def work_for_a_while(begun: bytes) -> None:
    touch(begun)
    until = time.process_time() + 3.0
    while time.process_time() < until:
        pass


def publish_and_die(task: bytes) -> None:
    """The engine's own task, in a process that is killed when it has published and not yet said so."""
    from ckptengine.adapters import worker
    from ckptengine.write import save

    save.committed_as = lambda manifest: die(b"")  # type: ignore[assignment,return-value]
    worker.run(task)


def on_fuse_as_lustre(task: bytes) -> None:
    """The engine's own task, in a process that takes FUSE for Lustre."""
    from ckptengine.adapters import worker
    from tests.helpers import fuse_lustre

    fuse_lustre.pretend()
    worker.run(task)


def stop_when_it_waits_for_the_outcome(task: bytes) -> None:
    """The engine's own task, in a process that SIGSTOP stops once its shard is durable and reported."""
    from ckptengine.adapters import worker
    from ckptengine.write import save

    original = save.wait_for_key

    def wait_for_key(transport: Any, task: Any, beat: Any, key: str, *args: Any, **options: Any) -> bytes:
        if key.endswith("outcome"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(transport, task, beat, key, *args, **options)

    save.wait_for_key = wait_for_key
    worker.run(task)


def stop_once_in_the_middle(task: bytes) -> None:
    """The engine's own task, in a process that SIGSTOP stops before it finishes its shard, this once. If its
    trainer ends meanwhile, it does not come to finish it: it would be a race with its end."""
    from ckptengine.adapters import worker
    from ckptengine.storage.blockio import PosixWriter

    finish, trainer = PosixWriter.finish, os.getppid()

    def stop(self: PosixWriter, nbytes: int | None = None) -> int:
        PosixWriter.finish = finish  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGSTOP)
        if os.getppid() != trainer:
            time.sleep(600)
        return finish(self, nbytes)

    PosixWriter.finish = stop  # type: ignore[method-assign]
    worker.run(task)


STOP_AT = "CKPT_TEST_STOP_AT"
"""Environment: the operation of the store at which `stop_at` stops, and how the path ends."""


def stop_at(task: bytes) -> None:
    """The engine's own task, in a process that SIGSTOP stops before an operation."""
    from ckptengine.adapters import worker
    from ckptengine.storage.blockio import PosixWriter
    from ckptengine.storage.posix import PosixStore

    name, _, end = os.environ[STOP_AT].partition(" ")
    kind: Any = PosixStore if hasattr(PosixStore, name) else PosixWriter
    original = getattr(kind, name)

    def stop(self: Any, *args: Any, **options: Any) -> Any:
        if not end or args[0].endswith(end):
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(self, *args, **options)

    setattr(kind, name, stop)
    worker.run(task)
