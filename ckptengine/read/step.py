"""How is a committed step kept from being deleted while it is read?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ckptengine.catalog.catalog import read_manifest
from ckptengine.errors import CheckpointNotFoundError, NotCommittedError
from ckptengine.format.manifest import Manifest
from ckptengine.storage.store import Store

LOCK_WAIT_S = 60.0
"""For retention to remove an attempt of thousands of shards from a step that stays."""
_LOCK_POLL_S = 0.005


@contextmanager
def held_manifest(store: Store, step_path: str) -> Iterator[Manifest]:
    """The step's manifest; retention leaves the step alone until the context ends.

    Raises what `read_manifest` raises, and CheckpointNotFoundError for a step that is being removed just now,
    or that stays and is locked for longer than `LOCK_WAIT_S`. Where the file system has no locks nothing is
    held, and a step that goes meanwhile shows as missing files.
    """
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        with ExitStack() as stack:
            try:
                held = stack.enter_context(store.lock_shared(step_path))
            except FileNotFoundError:
                read_manifest(store, step_path)  # raises, with the message for what is missing
                raise
            if held:
                yield read_manifest(store, step_path)
                return
        # Retention also holds a step that stays, right after its commit, while it removes an attempt that was
        # replaced. One that goes loses its manifest first.
        try:
            read_manifest(store, step_path)
        except (NotCommittedError, CheckpointNotFoundError):
            raise CheckpointNotFoundError(
                "the step is being removed", path=step_path, hint="open a newer one; `ckpt list` shows them"
            ) from None
        if time.monotonic() > deadline:
            raise CheckpointNotFoundError(
                f"the step is committed, and another process has kept it locked for {LOCK_WAIT_S:g} s",
                path=step_path,
                hint="it may be removing an attempt that was replaced, or hang: try again",
            )
        time.sleep(_LOCK_POLL_S)
