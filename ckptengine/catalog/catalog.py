"""Which checkpoints are there, and which is the newest?

The answer is always read from the directories: a step is committed if its directory holds a manifest, and
steps are ordered as numbers. There is no pointer file that could disagree.

Only real directories with the canonical name (`step-0000001000`) count as steps. A symbolic link of that name
is ignored, like any other file: retention would delete through it, and two names for one step would make
"newest" ambiguous. A path that the caller gives may be a link.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckptengine.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotCommittedError,
    StorageError,
)
from ckptengine.format.limits import MAX_MANIFEST_NBYTES
from ckptengine.format.manifest import Manifest, decode_manifest
from ckptengine.format.names import MANIFEST_NAME, AttemptId, parse_step_dirname
from ckptengine.storage.store import Entry, Store

_LIKE_A_STEP = re.compile(r"step[-_.]?[0-9]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True, order=True)
class StepEntry:
    """A step directory below a root. committed: it holds a manifest, which may still turn out damaged."""

    step: int
    path: str
    committed: bool


@dataclass(frozen=True, slots=True)
class IgnoredEntry:
    """What a person may take for a step, and nothing reads as one."""

    path: str
    reason: str


def list_steps(store: Store, root: str, *, committed_only: bool = True) -> list[StepEntry]:
    """The steps below `root`, ascending. `CheckpointNotFoundError` if there is no such directory."""
    found = (StepEntry(step, path, _is_committed(store, path)) for step, path in _step_dirs(store, root))
    return [entry for entry in found if entry.committed or not committed_only]


def ignored_entries(store: Store, root: str) -> list[IgnoredEntry]:
    """What below `root` looks like a step and is none, for messages: a restore passes it over."""
    found = []
    for entry in list_dir(store, root):
        path = posixpath.join(root, entry.name)
        if parse_step_dirname(entry.name) is None:
            if _LIKE_A_STEP.fullmatch(entry.name):
                found.append(IgnoredEntry(path, "the name is not spelled as a step's is (step-0000000001)"))
        elif not entry.is_dir:
            kind = "a symbolic link" if os.path.islink(path) else "a file"
            found.append(
                IgnoredEntry(path, f"it is {kind}, and only a directory of its own counts as a step")
            )
    return found


def newest_first(store: Store, root: str) -> Iterator[StepEntry]:
    """The committed steps, newest first. Each is looked at when it is asked for: whoever takes the first of a
    thousand pays for one listing and one look. `CheckpointNotFoundError` if there is no such directory."""
    for step, path in reversed(_step_dirs(store, root)):
        if _is_committed(store, path):
            yield StepEntry(step, path, True)


def latest(store: Store, root: str) -> StepEntry | None:
    """The newest committed step, or None: a root that does not exist yet has none."""
    try:
        return next(newest_first(store, root), None)
    except CheckpointNotFoundError:
        return None


def read_manifest(store: Store, step_path: str) -> Manifest:
    """The manifest of a step, checked: its own digest, every rule of the format, and that it belongs to this
    directory.

    `CheckpointNotFoundError`: no such directory; `NotCommittedError`: no manifest in it.
    """
    path = posixpath.join(step_path, MANIFEST_NAME)
    try:
        data = store.read(path, limit=MAX_MANIFEST_NBYTES)
    except (FileNotFoundError, StorageError) as exc:
        if isinstance(exc, StorageError) and exc.errno != errno.ENOTDIR:
            raise
        list_dir(store, step_path)  # tells a missing directory from a missing manifest
        raise NotCommittedError(
            "the step was never committed: it has no manifest",
            path=step_path,
            hint="restore an earlier step; `ckpt list` shows those that are committed",
        ) from None
    manifest = decode_manifest(data, path=path)
    # A directory that was copied under a name of the user's own has no number to compare with.
    step = parse_step_dirname(posixpath.basename(posixpath.normpath(step_path)))
    if step is not None and step != manifest.step:
        raise CorruptCheckpointError(
            "the manifest belongs to another step",
            path=path,
            expected=step,
            actual=manifest.step,
            hint="the directory was renamed, or the manifest copied; restore another step",
        )
    return manifest


def next_life(store: Store, root: str) -> int:
    """The life number for a run that starts now: greater than that of every attempt to be seen below `root`.

    Committed or not makes no difference: an orphan of an uncommitted attempt may still be alive.
    """
    try:
        dirs = _step_dirs(store, root)
    except CheckpointNotFoundError:
        return 1
    lives = [0]
    for _, path in dirs:
        try:
            entries = store.list(path)
        except FileNotFoundError:  # removed meanwhile
            continue
        lives += [attempt.run.life for attempt, _ in attempt_dirs(entries)]
    return max(lives) + 1


def resolve(store: Store, path: str) -> tuple[str | None, str]:
    """(root, step directory) for a path a person gives: a root (its newest committed step), a step, or its
    manifest.

    root is None unless `path` is one. A step without a manifest is returned as well; reading its manifest
    says so.
    """
    if posixpath.basename(path) == MANIFEST_NAME:
        return None, posixpath.dirname(path) or "."
    entries = list_dir(store, path)
    name = posixpath.basename(posixpath.normpath(path))
    if parse_step_dirname(name) is not None or any(entry.name == MANIFEST_NAME for entry in entries):
        return None, path
    newest = latest(store, path)
    if newest is not None:
        return path, newest.path
    if any(entry.is_dir and parse_step_dirname(entry.name) is not None for entry in entries):
        raise NotCommittedError(
            "no step here was ever committed", path=path, hint="the saves are still under way, or they failed"
        )
    raise CheckpointNotFoundError(
        "not a checkpoint, and no checkpoints in it",
        path=path,
        hint="give the root directory, a step directory, or its MANIFEST.json",
    )


def attempt_dirs(entries: list[Entry]) -> list[tuple[AttemptId, str]]:
    """(attempt, directory name) of those entries of a step that are attempts' directories, ascending."""
    found = []
    for entry in entries:
        if not entry.is_dir:
            continue
        try:
            found.append((AttemptId.parse(entry.name), entry.name))
        except ValueError:  # not ours
            continue
    return sorted(found)


def list_dir(store: Store, path: str) -> list[Entry]:
    """`Store.list`, where a path that is missing or no directory is a `CheckpointNotFoundError`."""
    try:
        return store.list(path)
    except StorageError as exc:
        if exc.errno != errno.ENOTDIR:
            raise
        problem = "it is not a directory"
    except FileNotFoundError:
        problem = "there is no such directory"
    raise CheckpointNotFoundError(
        f"no checkpoint: {problem}", path=path, hint=f"relative paths start at {os.getcwd()}"
    )


def _step_dirs(store: Store, root: str) -> list[tuple[int, str]]:
    found = []
    for entry in list_dir(store, root):
        step = parse_step_dirname(entry.name) if entry.is_dir else None
        if step is not None:
            found.append((step, posixpath.join(root, entry.name)))
    return sorted(found)


def _is_committed(store: Store, step_path: str) -> bool:
    try:
        store.size(posixpath.join(step_path, MANIFEST_NAME))
    except FileNotFoundError:
        return False
    except CorruptCheckpointError:
        # Something that is no file has the manifest's name. It was put there after a commit, or by hand:
        # whoever reads it gets the error, instead of silently getting an older step.
        return True
    return True
