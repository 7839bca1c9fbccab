"""Which steps does a restore try, in which order, and what is told to the ranks of each?"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, islice

import msgspec

from ckptengine.catalog.catalog import StepEntry, ignored_entries, list_steps, newest_first
from ckptengine.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotCommittedError,
    StorageError,
)
from ckptengine.format.manifest import Manifest, ShardRef
from ckptengine.format.names import step_dirname
from ckptengine.read.step import held_manifest
from ckptengine.step_shards import Assignment
from ckptengine.storage.store import Store

logger = logging.getLogger(__name__)

_TOLD = 5
"""Steps that are named where the one that was asked for is none."""

# What damage looks like: the next older commit may be whole. Anything else would fail there too, or is the
# caller's to fix.
DAMAGE = (CorruptCheckpointError, StorageError)


def is_damage(error: CheckpointError) -> bool:
    """Is it the checkpoint's fault, or this process's alone?"""
    return not (isinstance(error, StorageError) and error.is_local)


class Candidates:
    """The steps the coordinator offers one after the other, newest first."""

    def __init__(self, root: str, step: int | None, store: Store, world_size: int, held: ExitStack) -> None:
        self._root = root
        self._step = step
        self._store = store
        self._world_size = world_size
        self._held = held
        self._entries: Iterator[StepEntry] | None = None
        self._rejected: list[str] = []

    def reject(self, step: int, reason: str) -> None:
        """A step that was offered turned out to be damaged; for the error if no step is left."""
        self._rejected.append(f"step {step}: {reason}")

    def next(self) -> list[bytes]:
        """The next committed step's assignments, one for each rank.

        Raises `CheckpointNotFoundError` if no save ever committed, `CorruptCheckpointError` when every commit
        has been tried.
        """
        skipped: list[tuple[int, str]] = []
        if self._entries is None:
            self._entries = self._find()
        for entry in self._entries:
            try:
                # Held until the restore ends: retention, in whatever process, leaves the step alone.
                manifest = self._held.enter_context(held_manifest(self._store, entry.path))
            except (*DAMAGE, CheckpointNotFoundError, NotCommittedError) as error:
                if self._step is not None and isinstance(error, CheckpointNotFoundError | NotCommittedError):
                    self._tell_others(error)
                if self._step is not None or not is_damage(error):
                    raise
                logger.warning("step %d cannot be used: %s", entry.step, error)
                skipped.append((entry.step, str(error)))
                self.reject(entry.step, str(error))
                continue
            if manifest.world_size == self._world_size:
                return [_assignment(manifest, entry.path, ref, skipped) for ref in manifest.shards]
            return [_assignment(manifest, entry.path, manifest.shards[0], skipped)] * self._world_size
        raise CorruptCheckpointError(
            f"no committed checkpoint could be restored ({'; '.join(self._rejected)})",
            path=self._root,
            hint="run `ckpt verify` on each step; training was not restarted from scratch",
        )

    def _tell_others(self, error: CheckpointError) -> None:
        """Have the error say which steps there are instead."""
        try:
            newest = newest_first(self._store, self._root)
            steps = [str(entry.step) for entry in islice(newest, _TOLD + 1)]
        except (*DAMAGE, CheckpointNotFoundError):
            return
        few = ", ".join(steps[:_TOLD]) + (", …" if len(steps) > _TOLD else "")
        error.hint = (
            f"steps that can be restored, newest first: {few}" if few else "no step was ever committed"
        )

    def _find(self) -> Iterator[StepEntry]:
        if self._step is not None:
            return iter([StepEntry(self._step, f"{self._root}/{step_dirname(self._step)}", True)])
        newest = newest_first(self._store, self._root)
        first = next(newest, None)
        ignored = ignored_entries(self._store, self._root)
        for one in ignored:
            logger.warning("%s is ignored: %s", one.path, one.reason)
        if first is None:
            # Also where saves were begun: a first save that was cut short left nothing that could be lost.
            entries = list_steps(self._store, self._root, committed_only=False)
            begun = f": {len(entries)} saves were begun, none was committed" if entries else ""
            taken_for_steps = "; ".join(f"{one.path} is ignored: {one.reason}" for one in ignored[:3])
            raise CheckpointNotFoundError(
                f"there is no checkpoint here{begun}", path=self._root, hint=taken_for_steps or None
            )
        return chain([first], newest)


def _assignment(manifest: Manifest, path: str, ref: ShardRef, skipped: list[tuple[int, str]]) -> bytes:
    return msgspec.msgpack.encode(
        Assignment(
            step=manifest.step,
            step_path=path,
            attempt=manifest.attempt,
            run=manifest.run,
            world_size=manifest.world_size,
            codec=manifest.codec,
            block_nbytes=manifest.block_nbytes,
            created=manifest.created,
            fingerprint=manifest.fingerprint,
            shard={
                "rank": ref.rank,
                "path": ref.path,
                "size": ref.size,
                "header_nbytes": ref.header_nbytes,
                "header_digest": ref.header_digest,
            },
            skipped=skipped,
        )
    )
