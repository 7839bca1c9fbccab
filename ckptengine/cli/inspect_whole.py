"""How are a checkpoint, or a shard, and its tensors shown?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from ckptengine.cli import render, striping
from ckptengine.cli.contents import Contents, Row
from ckptengine.cli.stored import stored

_TENSORS = (
    render.Column("TENSOR"),
    render.Column("DTYPE"),
    render.Column("SHAPE"),
    render.Column("PLACEMENT"),
    render.Column("SHARD"),
    render.Column("BYTES", right=True),
)
_DTYPES = (
    render.Column("DTYPE"),
    render.Column("TENSORS", right=True),
    render.Column("BYTES", right=True),
    render.Column("SHARE", right=True),
    render.Column(""),
)


def show(
    contents: Contents, names: Sequence[str], limit: int, layouts: dict[str, striping.Found] | None = None
) -> None:
    """The summary, and the tensors named. layouts: of the shard files, where they are on Lustre."""
    render.facts(_facts(contents))
    render.line()
    dtypes = _count_dtypes(contents)
    total = sum(nbytes for _, nbytes in dtypes.values()) or 1
    if dtypes:
        render.table(
            _DTYPES,
            [
                [
                    dtype,
                    str(count),
                    render.human_nbytes(nbytes),
                    f"{nbytes / total:.1%}",
                    render.bar(nbytes / total),
                ]
                for dtype, (count, nbytes) in dtypes.items()
            ],
        )
        render.line()
    if layouts:
        striping.show(contents, layouts)
        render.line()
    rows = _rows(contents, names[:limit])
    if rows:
        render.table(_TENSORS, [_cells(row) for row in rows])
    if len(names) > limit:
        render.message(f"{len(names) - limit} more tensors; --limit 0 shows all, --filter GLOB some")
    elif not names and dtypes:
        render.message("no tensor's name matches the filter")
    elif not names:
        render.message("there are no tensors in it")


def to_json(
    contents: Contents, names: Sequence[str], limit: int, layouts: dict[str, striping.Found] | None = None
) -> None:
    """The same, as JSON."""
    dtypes = {
        dtype: {"tensors": count, "nbytes": nbytes}
        for dtype, (count, nbytes) in _count_dtypes(contents).items()
    }
    tensors = [row_to_json(row) for row in _rows(contents, names[:limit])]
    head = _head(contents)
    if layouts:
        shards = [head] if contents.shard is not None else head["shards"]
        for rank, shown in zip(contents.ranks, shards, strict=True):
            shown["striping"] = striping.to_json(layouts.get(contents.file(rank)))
    render.json({**head, "dtypes": dtypes, "tensors": tensors})


def row_to_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "placement": row.placement,
        "ranks": sorted(row.ranks),
        "nbytes": row.nbytes,
    }


def shape(sizes: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def _rows(contents: Contents, names: Sequence[str]) -> list[Row]:
    return [row for row in map(contents.row, names) if row is not None]


def _cells(row: Row) -> list[str]:
    return [
        render.clean(row.name),
        row.dtype,
        shape(row.shape),
        render.clean(row.placement or "-"),
        render.ranges(row.ranks),
        render.human_nbytes(row.nbytes),
    ]


def _count_dtypes(contents: Contents) -> dict[str, tuple[int, int]]:
    """dtype → (tensors, bytes), the most bytes first. A tensor counts with the bytes of all ranks' pieces."""
    counts: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for name in contents.tensors.names():
        found = contents.tensors.nbytes(name)
        counts[next(iter(found))] += 1
        for dtype, nbytes in found.items():
            sizes[dtype] += nbytes
    order = sorted(sizes, key=lambda dtype: (-sizes[dtype], dtype))
    return {dtype: (counts[dtype], sizes[dtype]) for dtype in order}


def _facts(contents: Contents) -> list[tuple[str, str]]:
    manifest, shard = contents.manifest, contents.shard
    facts = [("path", render.clean(contents.path))]
    if shard is not None:
        committed = "no: no manifest names this file" if manifest is None else f"yes, as step {manifest.step}"
        facts += [
            ("step", str(shard.step)),
            ("rank", f"{shard.rank} of {shard.world_size}"),
            ("committed", committed),
            ("data", render.human_nbytes(shard.data_nbytes)),
            ("replicas", f"{len(shard.replicas)}, whose bytes other ranks store"),
        ]
    elif manifest is not None:
        files = render.plural(len(manifest.shards), "shard file")
        facts += [
            ("step", str(manifest.step)),
            ("created", render.human_time(manifest.created)),
            ("ranks", str(manifest.world_size)),
            ("size", f"{render.human_nbytes(manifest.nbytes)} in {files}"),
        ]
    source = shard or manifest
    assert source is not None
    compressed = stored(contents)
    facts += [
        ("tensors", str(len(contents.tensors.names()))),
        ("codec", f"{source.codec}, in blocks of {render.human_nbytes(source.block_nbytes)}"),
        *([("stored", str(compressed))] if compressed is not None else []),
        ("attempt", source.attempt),
    ]
    if manifest is not None:
        facts.append(("fingerprint", manifest.fingerprint))
    if manifest is not None and shard is None:
        facts.append(("metadata", render.clean(msgspec.json.encode(manifest.metadata).decode())))
    return facts


def _head(contents: Contents) -> dict[str, Any]:
    manifest, shard = contents.manifest, contents.shard
    source = shard or manifest
    assert source is not None
    head: dict[str, Any] = {
        "kind": "checkpoint" if shard is None else "shard",
        "path": contents.path,
        "step": source.step,
        "attempt": source.attempt,
        "run": source.run,
        "world_size": source.world_size,
        "codec": source.codec,
        "block_nbytes": source.block_nbytes,
        "fingerprint": None if manifest is None else manifest.fingerprint,
    }
    compressed = stored(contents)
    if compressed is not None:
        head["stored"] = compressed.to_json()
    if shard is not None:
        head |= {
            "rank": shard.rank,
            "committed": manifest is not None,
            "data_nbytes": shard.data_nbytes,
            "header_nbytes": shard.header_nbytes,
            "replicas": shard.replicas,
        }
    elif manifest is not None:
        head |= {
            "created": manifest.created,
            "nbytes": manifest.nbytes,
            "metadata": manifest.metadata,
            "shards": [
                {
                    "rank": ref.rank,
                    "path": ref.path,
                    "nbytes": ref.size,
                    "header_nbytes": ref.header_nbytes,
                    "header_digest": ref.header_digest,
                }
                for ref in manifest.shards
            ],
        }
    return head
