"""`ckpt list`: which steps are in a checkpoint root?"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptengine.cli import exit_codes, render
from ckptengine.cli.options import AsJson
from ckptengine.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotCommittedError,
    UnsupportedFormatError,
)

if TYPE_CHECKING:
    from ckptengine.catalog.catalog import StepEntry
    from ckptengine.format.manifest import Manifest
    from ckptengine.storage.store import Entry, Store

_COLUMNS = (
    render.Column("STEP", right=True),
    render.Column("DATE"),
    render.Column("RANKS", right=True),
    render.Column("SIZE", right=True),
    render.Column("TENSORS", right=True),
    render.Column("CODEC"),
    render.Column("ATTEMPT"),
    render.Column("FINGERPRINT"),
    render.Column("STATE"),
)
_FINGERPRINT_DIGITS = 12


@dataclass(frozen=True, slots=True)
class _Row:
    """A step, and what its manifest says where there is one to read."""

    entry: StepEntry
    state: str
    manifest: Manifest | None = None
    error: str | None = None


def list_command(
    root: Annotated[str, typer.Argument(help="The directory that a training run saves to.")],
    as_json: AsJson = False,
) -> int:
    """List the saved steps of a checkpoint root, oldest first.

    Steps whose save did not finish (yet) are listed as incomplete: they cannot be restored, and nothing reads
    them.

    ATTEMPT is LIFE.SAVE: which run of the job wrote the step, with which of its saves; a retry adds a number.
    FINGERPRINT is the beginning of the manifest's digest, which vouches for every byte of the checkpoint.
    """
    from ckptengine.catalog.catalog import ignored_entries, list_dir, list_steps
    from ckptengine.storage.posix import PosixStore

    store = PosixStore()
    rows = [_row(store, entry) for entry in list_steps(store, root, committed_only=False)]
    entries = list_dir(store, root)
    if not rows:
        _refuse_step(root, entries)
    ignored = ignored_entries(store, root)
    if as_json:
        steps = [_to_json(row) for row in rows]
        render.json({"root": root, "steps": steps, "ignored": [asdict(one) for one in ignored]})
    elif rows:
        incomplete = [number for number, row in enumerate(rows) if row.state == "incomplete"]
        render.table(_COLUMNS, [_to_cells(row) for row in rows], dim=incomplete)
    else:
        why = "nothing that is in it is a step" if entries else "nothing was saved here yet"
        render.message(f"no checkpoints in {render.clean(root)}: {why}")
    for one in ignored:
        render.message(f"note: {render.clean(one.path)} is ignored: {one.reason}")
    for row in rows:
        if row.error is not None:
            render.failure(f"step {row.entry.step}: {row.error}")
    states = {row.state for row in rows}
    if "damaged" in states:
        return exit_codes.DAMAGED
    return exit_codes.UNSUPPORTED_FORMAT if "unsupported" in states else exit_codes.GOOD


def _refuse_step(path: str, entries: list[Entry]) -> None:
    """A step's directory would pass for an empty root."""
    from ckptengine.format.names import MANIFEST_NAME, parse_step_dirname

    parent, name = os.path.split(os.path.abspath(path))
    if parse_step_dirname(name) is not None:
        hint = f"list its root: ckpt list {parent}"
    elif any(entry.name == MANIFEST_NAME for entry in entries):
        hint = "a root holds step directories; `ckpt inspect` and `ckpt verify` take this one"
    else:
        return
    raise CheckpointNotFoundError("it is a step's directory, not a root", path=path, hint=hint)


def _row(store: Store, entry: StepEntry) -> _Row:
    from ckptengine.catalog.catalog import read_manifest

    if not entry.committed:
        return _Row(entry, "incomplete")
    try:
        return _Row(entry, "committed", read_manifest(store, entry.path))
    except NotCommittedError:
        return _Row(entry, "incomplete")  # removed since it was listed
    except UnsupportedFormatError as error:
        return _Row(entry, "unsupported", error=str(error))
    except CorruptCheckpointError as error:
        return _Row(entry, "damaged", error=str(error))


def _to_cells(row: _Row) -> list[str]:
    manifest = row.manifest
    if manifest is None:
        return [str(row.entry.step), "-", "-", "-", "-", "-", "-", "-", row.state]
    return [
        str(manifest.step),
        render.human_time(manifest.created),
        str(manifest.world_size),
        render.human_nbytes(manifest.nbytes),
        str(manifest.tensors),
        manifest.codec,
        _short_attempt(manifest.attempt),
        manifest.fingerprint[:_FINGERPRINT_DIGITS],
        row.state,
    ]


def _short_attempt(text: str) -> str:
    from ckptengine.format.names import AttemptId

    attempt = AttemptId.parse(text)
    return f"{attempt.run.life}.{attempt.save}" + (f".{attempt.retry}" if attempt.retry else "")


def _to_json(row: _Row) -> dict[str, Any]:
    result: dict[str, Any] = {"step": row.entry.step, "path": row.entry.path, "state": row.state}
    manifest = row.manifest
    if manifest is not None:
        result |= {
            "created": manifest.created,
            "world_size": manifest.world_size,
            "nbytes": manifest.nbytes,
            "tensors": manifest.tensors,
            "codec": manifest.codec,
            "attempt": manifest.attempt,
            "fingerprint": manifest.fingerprint,
        }
    if row.error is not None:
        result["error"] = row.error
    return result
