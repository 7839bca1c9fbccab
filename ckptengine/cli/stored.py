"""How are the blocks of compressed shards stored, and what has it saved?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckptengine.cli import render
from ckptengine.cli.contents import Contents
from ckptengine.errors import CheckpointError
from ckptengine.format.blocks import METHOD_NAMES
from ckptengine.format.entries import ShardHeader
from ckptengine.format.limits import PAGE, round_up

HEADERS_UP_TO_NBYTES = 4 << 20
"""Only the headers know how blocks are stored; more than this is not read for it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Of one shard or several: bytes of the data sections, what they take in the files, and how many blocks
    are stored in which way."""

    data_nbytes: int
    stored_nbytes: int
    methods: dict[str, int]

    def __str__(self) -> str:
        ratio = f", {self.data_nbytes / self.stored_nbytes:.2f} times smaller" if self.stored_nbytes else ""
        counts = ", ".join(f"{count} {name}" for name, count in self.methods.items())
        return (
            f"{render.human_nbytes(self.data_nbytes)} in {render.human_nbytes(self.stored_nbytes)}{ratio}; "
            f"blocks: {counts or 'none'}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "data_nbytes": self.data_nbytes,
            "stored_nbytes": self.stored_nbytes,
            "blocks": self.methods,
        }


def stored(contents: Contents) -> Stored | None:
    """None for raw shards, and where the headers are too many, or cannot be read: to judge them is for
    `verify`."""
    if contents.shard is not None:
        return _stored([contents.shard]) if contents.shard.codec == "zstd" else None
    manifest = contents.manifest
    assert manifest is not None
    if manifest.codec != "zstd" or sum(ref.header_nbytes for ref in manifest.shards) > HEADERS_UP_TO_NBYTES:
        return None
    try:
        return _stored(contents.header(rank) for rank in contents.ranks)
    except (CheckpointError, FileNotFoundError):
        return None


def _stored(headers: Iterable[ShardHeader]) -> Stored:
    data_nbytes = stored_nbytes = 0
    counts: Counter[str] = Counter()
    for header in headers:
        data_nbytes += header.data_nbytes
        stored_nbytes += sum(round_up(length, PAGE) for length in header.stored_nbytes or ())
        counts.update(header.methods or "")
    methods = {name: counts[method] for method, name in METHOD_NAMES.items() if counts[method]}
    return Stored(data_nbytes, stored_nbytes, methods)
