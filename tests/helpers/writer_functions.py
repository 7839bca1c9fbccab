"""Functions for a writer process to run; a module of their own, since that process looks them up by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


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


def hang(_: bytes) -> None:
    time.sleep(600)


def publish_and_die(task: bytes) -> None:
    """The engine's own task, in a process that is killed when it has published and not yet said so."""
    from ckptengine.adapters import worker
    from ckptengine.write import save

    save._committed = lambda manifest: die(b"")  # type: ignore[assignment,return-value]
    worker.run(task)


def on_fuse_as_lustre(task: bytes) -> None:
    """The engine's own task, in a process that takes FUSE for Lustre."""
    from ckptengine.adapters import worker
    from tests.helpers import fuse_lustre

    fuse_lustre.pretend()
    worker.run(task)
