"""How are a checkpoint's shard files striped, where they are on Lustre?"""

from __future__ import annotations

import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from ckptengine.catalog.catalog import read_manifest, resolve
from ckptengine.cli import render
from ckptengine.cli.contents import Contents
from ckptengine.errors import CheckpointError
from ckptengine.format.names import MANIFEST_NAME
from ckptengine.read.shards import shard_path
from ckptengine.storage import lustre
from ckptengine.storage.lustre_layout import Layout
from ckptengine.storage.store import Store

_COLUMNS = (
    render.Column("SHARD"),
    render.Column("STRIPING"),
    render.Column("OSTS"),
)
_READERS = 16

Found = Layout | str | None
"""A layout; why there is none to show; None for a file without one."""


def look(store: Store, path: str) -> dict[str, Found]:
    """The layout of each shard file by its path, in rank order; empty where `path` is not on Lustre.

    To be called before anything of a shard is read: that would fetch a released file. A path that is no
    checkpoint has none here; opening it says what is wrong with it.
    """
    if not lustre.on_lustre(path):
        return {}
    files = [path]
    if os.path.isdir(path) or os.path.basename(path) == MANIFEST_NAME:
        try:
            _, step_path = resolve(store, path)
            files = [shard_path(step_path, ref) for ref in read_manifest(store, step_path).shards]
        except (CheckpointError, FileNotFoundError):
            return {}
    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(files, pool.map(_layout, files), strict=True))


def to_json(found: Found) -> dict[str, Any] | None:
    if found is None:
        return None
    if isinstance(found, str):
        return {"error": found}
    return {
        "kind": found.kind,
        "released": found.released,
        "mirrors": found.mirrors,
        "components": [asdict(component) for component in found.components],
    }


def show(contents: Contents, layouts: dict[str, Found]) -> None:
    """A table of the shards, those that are alike together."""
    groups: dict[str, set[int]] = defaultdict(set)
    osts: dict[str, set[int]] = defaultdict(set)
    released = 0
    for rank in contents.ranks:
        found = layouts.get(contents.file(rank))
        text = _text(found)
        groups[text].add(rank)
        if isinstance(found, Layout):
            osts[text] |= {ost for component in found.components for ost in component.osts}
            released += found.released
    render.table(
        _COLUMNS,
        [[render.ranges(ranks), text, render.ranges(osts[text]) or "-"] for text, ranks in groups.items()],
    )
    if released:
        render.message(
            f"{render.plural(released, 'shard file')} released to the archive: whoever reads the bytes waits "
            "until Lustre has fetched them"
        )


def _layout(path: str) -> Found:
    try:
        return lustre.layout_of(path)
    except (OSError, ValueError) as error:
        return str(error)


def _text(found: Found) -> str:
    if found is None:
        return "none"
    return render.clean(found if isinstance(found, str) else lustre.describe(found))
