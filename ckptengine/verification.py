"""Is a checkpoint on disk what was committed?

Three levels, each including the weaker: **sizes** < **structure** < **data**.

- `sizes`: the manifest is whole, and every file it names is there with the right size. One stat per file.
- `structure`: every shard's header and the INDEX have their digests, and the shards of all ranks fit
  together: the chunks of each tensor cover it, views and replicas lead somewhere.
- `data`: every block of every shard has its digest, padding included. Reads everything.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from ckptengine.catalog.catalog import resolve
from ckptengine.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, StorageError
from ckptengine.format.digest import hexdigest
from ckptengine.format.index import decode_index
from ckptengine.format.limits import MAX_INDEX_NBYTES
from ckptengine.format.manifest import Manifest, ShardRef
from ckptengine.format.names import INDEX_NAME, MANIFEST_NAME, RAW_SUFFIX, ZSTD_SUFFIX
from ckptengine.format.shard import ShardHeader
from ckptengine.read.damage import Damage
from ckptengine.read.reader import find_damage
from ckptengine.read.shards import check_size, read_header, shard_path
from ckptengine.read.step import held_manifest
from ckptengine.read.world import inconsistencies
from ckptengine.storage.failures import translated
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import Store
from ckptengine.storage.threads import in_threads

Level = Literal["sizes", "structure", "data"]
LEVELS: tuple[Level, ...] = get_args(Level)

Progress = Callable[[int, int], None]
"""Called with the bytes checked so far and the bytes to check in all, never by two threads at once."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found.

    path: of the step. damages: every damaged place, in rank and file order; a damage's `file` is relative to
    the step. notes: what a person may want to know but no reader is hurt by. shards: how many the manifest
    names. nbytes: how much was read and checked. fingerprint: of the manifest; None with `step`, `world_size`
    and `attempt` where it cannot be read.
    """

    path: str
    level: Level
    seconds: float
    step: int | None = None
    attempt: str | None = None
    world_size: int | None = None
    fingerprint: str | None = None
    shards: int = 0
    nbytes: int = 0
    damages: tuple[Damage, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.damages

    @property
    def restorable(self) -> bool:
        """Is everything whole that a restore reads? The INDEX only repeats what the headers say."""
        return all(damage.file == INDEX_NAME for damage in self.damages)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {"ok": self.ok, **asdict(self)}


def verify(
    path: str | os.PathLike[str],
    level: Level = "data",
    *,
    progress: Progress | None = None,
    threads: int = 4,
    store: Store | None = None,
) -> VerifyReport:
    """Checks one checkpoint and reports all damage; writes nothing.

    path: a root (its newest committed step), a step directory, or a manifest. level: "sizes" (the files are
    there, with their sizes), "structure" (and headers and INDEX are intact and agree) or "data" (and every
    block), else ValueError. progress: called with the bytes checked and those to check. threads: parallel
    block reads.

    Raises CheckpointNotFoundError,
    NotCommittedError or UnsupportedFormatError where there is no checkpoint to check, and StorageError where
    the step or its manifest cannot be read at all, or any file of it for lack of a permission, of file
    descriptors or of memory: that says nothing about the file. Damage is never raised: it is in the report.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, not {level!r}")
    began = time.monotonic()
    store = PosixStore() if store is None else store
    _refuse_shard(os.fspath(path))
    _, step_path = resolve(store, os.fspath(path))
    with ExitStack() as stack:
        try:
            manifest = stack.enter_context(held_manifest(store, step_path))
        except CorruptCheckpointError as error:
            return VerifyReport(
                path=step_path,
                level=level,
                seconds=time.monotonic() - began,
                damages=(_damage(error, MANIFEST_NAME, None),),
            )
        check = _Check(store, step_path, manifest, threads, progress)
        check.run(level)
    return VerifyReport(
        path=step_path,
        level=level,
        seconds=time.monotonic() - began,
        step=manifest.step,
        attempt=manifest.attempt,
        world_size=manifest.world_size,
        fingerprint=manifest.fingerprint,
        shards=len(manifest.shards),
        nbytes=check.nbytes_checked,
        damages=tuple(sorted(check.damages, key=_order)),
        notes=tuple(check.notes),
    )


def _refuse_shard(path: str) -> None:
    """A shard alone is not a checkpoint: its digests are vouched for by the manifest of its step."""
    if not path.endswith((RAW_SUFFIX, ZSTD_SUFFIX)) or not os.path.isfile(path):
        return
    step_path = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    known = os.path.isfile(os.path.join(step_path, MANIFEST_NAME))
    raise CheckpointNotFoundError(
        "it is a single shard, not a checkpoint",
        path=path,
        hint=f"give its step: {step_path}" if known else "give the directory of the step it is of",
    )


class _Check:
    """One verification under way: what was found so far."""

    def __init__(
        self, store: Store, step_path: str, manifest: Manifest, threads: int, progress: Progress | None
    ) -> None:
        self.damages: list[Damage] = []
        self.notes: list[str] = []
        self.nbytes_checked = 0
        self._store = store
        self._step_path = step_path
        self._manifest = manifest
        self._threads = threads
        self._progress = progress
        self._nbytes_total = 0
        self._lock = threading.Lock()

    def run(self, level: Level) -> None:
        present = [ref for ref in self._manifest.shards if self._check_file(ref)]
        self._check_index(level)
        self._note_strangers()
        if level == "sizes":
            return
        self._nbytes_total = sum(ref.size if level == "data" else ref.header_nbytes for ref in present)
        headers: dict[int, ShardHeader] = {}
        in_threads(present, self._threads, lambda: None, lambda ref, _: self._check_header(ref, headers))
        self.damages += inconsistencies(headers, self._manifest.world_size, self._manifest.attempt)
        if level == "data":
            for ref in present:
                if ref.rank in headers:
                    self._check_data(ref, headers[ref.rank])

    def _check_file(self, ref: ShardRef) -> bool:
        """Checks a shard's place and size. Is there a file to look into, whatever its size?"""
        try:
            path = shard_path(self._step_path, ref)
            nbytes = self._store.size(path)
        except FileNotFoundError:
            self.damages.append(Damage(ref.path, "the shard file is missing", ref.rank))
            return False
        except CheckpointError as error:
            self.damages.append(_damage(error, ref.path, ref.rank))
            return False
        try:
            check_size(path, ref, nbytes)
        except CorruptCheckpointError as error:
            self.damages.append(_damage(error, ref.path, ref.rank))
        return True

    def _check_header(self, ref: ShardRef, headers: dict[int, ShardHeader]) -> None:
        path = shard_path(self._step_path, ref)
        try:
            with translated(path, "read"), self._store.open(path) as file:
                headers[ref.rank] = read_header(file, path, ref, self._manifest)
        except FileNotFoundError:
            self.damages.append(Damage(ref.path, "the shard file is missing", ref.rank))
        except (CorruptCheckpointError, StorageError) as error:
            damage = _damage(error, ref.path, ref.rank)
            reason = f"{damage.reason}; nothing in this file can be checked without its header"
            self.damages.append(replace(damage, offset=0, nbytes=ref.header_nbytes, reason=reason))
        with self._lock:
            self._advance(ref.header_nbytes)

    def _check_data(self, ref: ShardRef, header: ShardHeader) -> None:
        path = shard_path(self._step_path, ref)
        try:
            with translated(path, "read"):
                found = find_damage(self._store, path, header, threads=self._threads, progress=self._advance)
        except (CorruptCheckpointError, StorageError) as error:
            self.damages.append(_damage(error, ref.path, ref.rank))
        else:
            self.damages += (replace(damage, file=ref.path) for damage in found)

    def _check_index(self, level: Level) -> None:
        ref = self._manifest.index
        path = os.path.join(self._step_path, INDEX_NAME)
        try:
            if ref is not None and level == "sizes" and self._store.size(path) == ref.size:
                return
            data = self._store.read(path, limit=MAX_INDEX_NBYTES)
        except FileNotFoundError:
            if ref is not None:
                self.damages.append(
                    Damage(INDEX_NAME, "it is missing; it can be rebuilt from the shard headers")
                )
            return
        except CheckpointError as error:
            self.damages.append(_damage(error, INDEX_NAME, None))
            return
        intact = ref is not None and len(data) == ref.size and hexdigest(data) == ref.digest
        try:
            attempt = decode_index(data, path=path).attempt
        except CheckpointError as error:
            self.damages.append(_damage(error, INDEX_NAME, None))
            return
        if ref is None:
            self.notes.append(f"{INDEX_NAME} is not named by the manifest; readers ignore it")
        elif not intact and attempt != self._manifest.attempt:
            # Left by a save that ended between publishing its INDEX and its manifest.
            self.notes.append(
                f"{INDEX_NAME} is stale: it is of attempt {attempt}. Readers ignore it; it can be rebuilt"
            )
        elif not intact or attempt != self._manifest.attempt:
            reason = "it is not the one the manifest names; it can be rebuilt from the shard headers"
            self.damages.append(Damage(INDEX_NAME, reason))

    def _note_strangers(self) -> None:
        attempt = self._manifest.attempt
        known = {ref.path for ref in self._manifest.shards}
        try:
            # Not through a link: what it leads to is no part of the checkpoint.
            if not any(entry.name == attempt and entry.is_dir for entry in self._store.list(self._step_path)):
                return
            entries = self._store.list(os.path.join(self._step_path, attempt))
        except (FileNotFoundError, CheckpointError):
            return  # the shards' own checks say what is wrong
        strangers = (f"{attempt}/{entry.name}" for entry in entries)
        self.notes += (f"{path} is not named by the manifest" for path in strangers if path not in known)

    def _advance(self, nbytes: int) -> None:
        self.nbytes_checked += nbytes
        if self._progress is not None:
            self._progress(self.nbytes_checked, self._nbytes_total)


def _damage(error: CheckpointError, file: str, rank: int | None) -> Damage:
    """An error as a damage; what it expected and found belongs to the reason, where it was is in the
    fields. Raises one that is about this process and not about the file."""
    if isinstance(error, StorageError) and error.is_local:
        if error.rank is None:
            error.rank = rank
        raise error
    reason = error.message
    if error.expected is not None:
        reason = f"{reason} (expected {error.expected}, found {error.actual})"
    return Damage(file, reason, rank, error.offset)


def _order(damage: Damage) -> tuple[int, str, int]:
    return (
        -1 if damage.rank is None else damage.rank,
        damage.file,
        -1 if damage.offset is None else damage.offset,
    )
