"""How is a committed step kept from being deleted while it is read?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ckptengine.catalog.catalog import read_manifest
from ckptengine.errors import CheckpointNotFoundError
from ckptengine.format.manifest import Manifest
from ckptengine.storage.store import Store


@contextmanager
def held_manifest(store: Store, step_path: str) -> Iterator[Manifest]:
    """The step's manifest; retention leaves the step alone until the context ends.

    Raises what `read_manifest` raises, and CheckpointNotFoundError for a step that is being removed just now.
    Where the file system has no locks nothing is held, and a step that goes meanwhile shows as missing files.
    """
    with ExitStack() as stack:
        try:
            held = stack.enter_context(store.lock_shared(step_path))
        except FileNotFoundError:
            read_manifest(store, step_path)  # raises, with the message for what is missing
            raise
        if not held:
            raise CheckpointNotFoundError(
                "the step is being removed", path=step_path, hint="open a newer one; `ckpt list` shows them"
            )
        yield read_manifest(store, step_path)
