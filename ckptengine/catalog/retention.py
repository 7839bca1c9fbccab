"""Which checkpoints may go, and how do they go safely?

Runs after a commit, in one process, and derives everything from the disk. Removal follows the format: the
manifest first, then its directory's fsync, so that no crash leaves a manifest whose shards are gone; then the
rest. A removal that was cut short leaves an uncommitted step, which the next run cleans up like any other
left-over of an earlier attempt.

Never touched: the newest committed step, the current attempt and later ones, a step that someone reads (it
holds the step's lock), and anything whose name is not ours.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass

from ckptengine.catalog.catalog import attempt_dirs, list_steps, read_manifest
from ckptengine.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotCommittedError,
    UnsupportedFormatError,
)
from ckptengine.format.names import INDEX_NAME, MANIFEST_NAME, AttemptId, parse_step_dirname
from ckptengine.storage.durable import is_temporary
from ckptengine.storage.store import Entry, Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """What to keep: the newest `keep_last` steps, and every step divisible by `keep_every`. None for both:
    everything.

    With `keep_every` alone, the newest step is kept besides.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, not {value}")


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was due to go and stayed, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """What one run of retention removed, and what it left to the next run."""

    deleted_steps: tuple[int, ...] = ()
    deleted_attempts: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()


def plan_retention(steps: Iterable[int], policy: RetentionPolicy) -> list[int]:
    """Which of the committed steps to delete, ascending. Pure. The newest is never among them."""
    ordered = sorted(set(steps))
    if not ordered or (policy.keep_last is None and policy.keep_every is None):
        return []
    keep = set(ordered[-(policy.keep_last or 1) :])
    if policy.keep_every is not None:
        keep.update(step for step in ordered if step % policy.keep_every == 0)
    return [step for step in ordered if step not in keep]


def delete_step(store: Store, step_path: str, *, root: str | None = None) -> None:
    """Remove a step: manifest, fsync, then the rest. Idempotent, and safe to interrupt anywhere.

    root: if given, the step must lie directly in it. Refuses (`CorruptCheckpointError`) what is not a real
    directory with a step's name, such as a symbolic link. Does not ask whether someone reads the step.
    """
    step_path = posixpath.normpath(step_path)
    parent, name = posixpath.split(step_path)
    if parse_step_dirname(name) is None:
        raise CorruptCheckpointError("refused to delete what is not a step directory", path=step_path)
    if root is not None and posixpath.normpath(root) != (parent or "."):
        raise CorruptCheckpointError("refused to delete outside the root", path=step_path, expected=root)
    parent = parent or "."
    entry = next((entry for entry in store.list(parent) if entry.name == name), None)
    if entry is None:
        return
    if not entry.is_dir:
        raise CorruptCheckpointError(
            "refused to delete what is not a directory",
            path=step_path,
            hint="remove the file or link by hand",
        )
    store.remove(posixpath.join(step_path, MANIFEST_NAME))
    # Before any shard goes: a crash must never bring the manifest back over shards that are gone.
    store.sync_dir(step_path)
    store.remove_tree(step_path)
    store.sync_dir(
        parent
    )  # so that the space of a removed step does not come back as a left-over after a crash


def apply_retention(
    store: Store, root: str, policy: RetentionPolicy, *, current: AttemptId
) -> RetentionReport:
    """Delete what the policy lets go, and the left-overs of attempts before `current` that no manifest names.

    Called by the committer after a commit, never twice at once on a root. What cannot be deleted is logged,
    reported and left to the next run: a commit that succeeded must not fail for it.
    """
    report = _Progress()
    entries = list_steps(store, root, committed_only=False)
    due = set(plan_retention((entry.step for entry in entries if entry.committed), policy))
    for entry in entries:
        try:
            if entry.committed and entry.step not in due and _is_tidy(store.list(entry.path)):
                continue  # nothing to do here, and whoever comes to read it need not wait
            with store.try_lock_exclusive(entry.path) as held:
                if not held:
                    if entry.step in due:  # left-overs in a step being read are no news
                        report.skip(entry.path, "it is being read")
                elif entry.step in due and _may_go(store, entry.path, current, report):
                    delete_step(store, entry.path, root=root)
                    report.steps.append(entry.step)
                else:
                    _remove_leftovers(store, entry.path, current, report)
        except FileNotFoundError:  # removed by someone else meanwhile
            continue
        except (CheckpointError, OSError) as exc:
            report.skip(entry.path, str(exc))
    return RetentionReport(tuple(report.steps), tuple(report.attempts), tuple(report.skipped))


class _Progress:
    """What has been done so far."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.attempts: list[str] = []
        self.skipped: list[Skipped] = []

    def skip(self, path: str, reason: str) -> None:
        logger.warning("retention left %s: %s", path, reason)
        self.skipped.append(Skipped(path, reason))


def _may_go(store: Store, step_path: str, current: AttemptId, report: _Progress) -> bool:
    """Whether a step due to go was committed before `current`.

    After a fall-back to an early step, the steps this run commits have smaller numbers than those it gave up;
    the policy counts numbers only, and would delete the very commit it runs after.
    """
    try:
        manifest = read_manifest(store, step_path)
    except (NotCommittedError, CheckpointNotFoundError):
        return False
    except (CorruptCheckpointError, UnsupportedFormatError):
        return True  # damaged, or of another version: nothing of the current run
    if AttemptId.parse(manifest.attempt) < current:
        return True
    report.skip(step_path, "it was committed by this attempt or a later one")
    return False


def _is_tidy(entries: list[Entry]) -> bool:
    """Can nothing in a committed step be a left-over?"""
    return len(attempt_dirs(entries)) < 2 and not any(_is_temporary(entry) for entry in entries)


def _remove_leftovers(store: Store, step_path: str, current: AttemptId, report: _Progress) -> None:
    """Remove attempts before `current` that the manifest does not name, and the step if nothing is left."""
    entries = store.list(step_path)
    attempts = attempt_dirs(entries)
    stale = [(attempt, name) for attempt, name in attempts if attempt < current]
    committed = any(entry.name == MANIFEST_NAME for entry in entries)
    named = None
    if committed and stale:
        try:
            named = read_manifest(store, step_path).attempt
        except (CorruptCheckpointError, UnsupportedFormatError, NotCommittedError) as exc:
            # Which attempt it names is not known, and it may be worth repairing.
            report.skip(step_path, f"its manifest cannot be read: {exc}")
            return
    removed = False
    if all(attempt <= current for attempt, _ in attempts):
        # No publish is under way here: this process does them, and has done its own.
        for name in [entry.name for entry in entries if _is_temporary(entry)]:
            store.remove(posixpath.join(step_path, name))
            removed = True
    for _, name in stale:
        if name != named:
            store.remove_tree(posixpath.join(step_path, name))
            report.attempts.append(posixpath.join(step_path, name))
            removed = True
    if committed or len(attempts) > len(stale):
        if removed:
            store.sync_dir(step_path)
        return
    if any(entry.name == INDEX_NAME and not entry.is_dir for entry in entries):
        store.remove(posixpath.join(step_path, INDEX_NAME))
    # Only if empty: something of the user's, or an attempt begun this moment, keeps it. A save that has just
    # made the step and not yet its attempt makes it again.
    if store.remove_dir(step_path):
        store.sync_dir(posixpath.dirname(step_path) or ".")


def _is_temporary(entry: Entry) -> bool:
    """Is it a file of a publish that was cut short?"""
    return not entry.is_dir and is_temporary(entry.name, of=(INDEX_NAME, MANIFEST_NAME))
