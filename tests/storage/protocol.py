"""A small commit protocol as the engine's, for testing what the test stores find."""

from __future__ import annotations

import posixpath

from ckptengine.storage.store import Store

ROOT = "/root"
NBYTES = 3 * 4096


def content(step: int) -> bytes:
    return bytes([step]) * NBYTES


def save(store: Store, root: str, step: int, *, without: str = "") -> None:
    """Commit a step. `without`: leave one of its precautions out."""
    path = posixpath.join(root, f"step-{step}")
    attempt = posixpath.join(path, "attempt")
    store.make_dirs(attempt)
    writer = store.create(posixpath.join(attempt, "shard"), nbytes=NBYTES)
    try:
        data = content(step)
        for at in range(0, NBYTES, 4096):
            writer.pwrite(at, memoryview(data)[at : at + 4096])
        if without != "finish":
            writer.finish()
    except Exception:
        writer.abort()
        raise
    if without != "sync_dir":
        store.sync_dir(attempt)
    store.publish(posixpath.join(path, "MANIFEST"), str(step).encode())


def delete(store: Store, root: str, step: int, *, without: str = "") -> None:
    path = posixpath.join(root, f"step-{step}")
    store.remove(posixpath.join(path, "MANIFEST"))
    if without != "sync_dir":
        store.sync_dir(path)
    store.remove_tree(path)
    store.sync_dir(root)


def check(store: Store, root: str) -> set[int]:
    """The committed steps; fails if one of them is not whole."""
    committed = set()
    for entry in store.list(root):
        path = posixpath.join(root, entry.name)
        try:
            step = int(store.read(posixpath.join(path, "MANIFEST"), limit=10))
        except FileNotFoundError:
            continue
        assert entry.name == f"step-{step}"
        assert store.read(posixpath.join(path, "attempt", "shard"), limit=1 << 20) == content(step)
        committed.add(step)
    return committed
