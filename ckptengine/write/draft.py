"""What of a step's INDEX can be made before its shards are durable? The coordinator's part, and with no other
rank all of it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from ckptengine.format.columns import IndexBuilder, ShardColumns
from ckptengine.format.index import encode_index
from ckptengine.format.scan import scan_header


@dataclass(frozen=True, slots=True, eq=False)
class IndexDraft:
    """columns: of the coordinator's shard. contents: begun with these, to be given the other ranks', and all
    ranks' values. index: encoded already, if there is no other rank and the format's bound allows one."""

    columns: ShardColumns
    contents: IndexBuilder
    index: bytes | None


def begin_draft(header: bytes, world_size: int) -> Future[IndexDraft]:
    """Make the draft in a thread, while the shard's blocks are written: INDEX holds what the header says, but
    for the digests, which are not known yet. Fails with `ValueError` or `KeyError` for what is no header."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="ckpt-index")
    try:
        return pool.submit(_draft, header, world_size)
    finally:
        pool.shutdown(wait=False)


def _draft(header: bytes, world_size: int) -> IndexDraft:
    columns = scan_header(header)
    contents = IndexBuilder()
    # The values' digests are not known yet.
    contents.add(replace(columns, values=None))
    index = None
    if world_size == 1:
        try:
            index = encode_index(contents)
        except ValueError:
            pass  # too large: said when the step is committed without it
    return IndexDraft(columns, contents, index)
