"""Small committed and uncommitted steps in any store, for the tests of catalog and retention."""

from __future__ import annotations

import posixpath

from ckptengine.format.manifest import Manifest, ShardRef, encode_manifest
from ckptengine.format.names import MANIFEST_NAME, AttemptId, RunId, step_dirname
from ckptengine.storage.store import Store

SHARD = bytes(8192)


def attempt_id(life: int = 1, save: int = 1, retry: int = 0) -> AttemptId:
    return AttemptId(RunId(life, 0x19000000000 + life, f"{life:08x}"), save, retry)


def manifest(step: int, attempt: AttemptId) -> bytes:
    shard = ShardRef(0, f"{attempt}/shard-00000.safetensors", len(SHARD), 4096, "0" * 32)
    return encode_manifest(
        Manifest(
            step=step,
            attempt=str(attempt),
            run=str(attempt.run),
            world_size=1,
            created=1.0,
            codec="raw",
            block_nbytes=4096,
            nbytes=len(SHARD),
            tensors=0,
            metadata={},
            shards=(shard,),
            index=None,
        )
    )


def begin(store: Store, root: str, step: int, attempt: AttemptId) -> str:
    """Write an attempt's shard without committing it; the step's path."""
    path = posixpath.join(root, step_dirname(step))
    store.make_dirs(posixpath.join(path, str(attempt)))
    writer = store.create(posixpath.join(path, str(attempt), "shard-00000.safetensors"), nbytes=len(SHARD))
    writer.pwrite(0, memoryview(SHARD))
    writer.finish()
    store.sync_dir(posixpath.join(path, str(attempt)))
    return path


def commit(store: Store, root: str, step: int, attempt: AttemptId | None = None) -> str:
    attempt = attempt or attempt_id(save=step)
    path = begin(store, root, step, attempt)
    store.publish(posixpath.join(path, "INDEX"), b"index")
    store.publish(posixpath.join(path, MANIFEST_NAME), manifest(step, attempt))
    return path
