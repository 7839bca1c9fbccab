"""What does the engine ask of a file system? Three protocols, kept by every store.

A checkpoint goes through a store like this::

    save, the coordinator     make_dirs(attempt)          the attempt's directory, durable
                              expect_files(attempt)       what it is going to hold
    save, every rank          w = create(shard, nbytes)   a new file
                              w.pwrite(...)               from several threads, any order
                              w.finish()                  data and size durable
                              sync_dir(attempt)           the file's name durable
    save, the committer       size(shard), open(shard)    what its own mount sees
                              publish(INDEX), publish(MANIFEST.json)
    restore, every rank       list, read(manifest), lock_shared(step)
                              r = open(shard); r.pread_into(...); r.close()
    retention                 try_lock_exclusive(step), remove(manifest), sync_dir(step), remove_tree(step),
    sync_dir(root)

Paths are strings in the file system's own notation. Errors: a missing file or directory is
`FileNotFoundError`; a file of the wrong kind (symbolic link, directory, device, too large) is
`CorruptCheckpointError`; everything else the system reports is `StorageError` with its `errno`. Nothing is
retried here. All methods may be called from any thread.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

ReadSource = Literal["cache", "direct", "buffered"]
"""Where a read was served from: the page cache, the disk past the cache, or the disk through it."""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One name in a directory. A symbolic link is never a directory here, whatever it points to."""

    name: str
    is_dir: bool


@runtime_checkable
class BlockWriter(Protocol):
    """One new file, written in any order by several threads. Ends with `finish` or `abort`, once.

    Any failed write, fsync or close poisons the writer: the kernel reports a lost write once and then forgets
    it, so a later success proves nothing. From then on `pwrite` and `finish` raise, and the file must be
    written anew under another name.
    """

    @property
    def direct(self) -> bool:
        """Whether aligned writes bypass the page cache at the moment."""
        ...

    def pwrite(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`, or raise. Called by the I/O threads; nothing is durable yet.

        Writes of different threads must not overlap, and a page is to be written by one call only.
        """
        ...

    def finish(self, nbytes: int | None = None) -> int:
        """Make data and size durable, close, and return the size the file system reports.

        nbytes: cut the file to so many bytes first; what was reserved beyond is given back.

        Called once, by one thread, after every `pwrite` returned. The name becomes durable with
        `Store.sync_dir`.
        """
        ...

    def abort(self) -> None:
        """Close and remove the file, as far as possible. Never raises; idempotent; does nothing after
        `finish` returned.

        Writes still under way in other threads end first: the last of them closes the file.
        """
        ...


@runtime_checkable
class BlockReader(Protocol):
    """One open file, read at any offset by several threads. A context manager."""

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""
        ...

    def source(self, offset: int, nbytes: int) -> ReadSource:
        """Where a read of this range would be served from now, given aligned memory where that matters.

        For a caller that then reads the range in pieces: asking costs as much as reading a small piece."""
        ...

    def pread_into(self, offset: int, out: memoryview, source: ReadSource | None = None) -> ReadSource:
        """Fill all of `out` from `offset`, or raise; a file that ends earlier is a `StorageError`.

        source: what `source` said of a range around this one; by default this one is asked about. Returns
        where the bytes came from."""
        ...

    def preadv_into(
        self, offset: int, outs: Sequence[memoryview], source: ReadSource | None = None
    ) -> ReadSource:
        """Fill up to 1,024 pieces of memory, one after the other, with what the file has from `offset` on;
        otherwise as `pread_into`. For small pieces, which cost one system call together."""
        ...

    def close(self) -> None:
        """Release the file. Idempotent; reads under way in other threads end first."""
        ...

    def __enter__(self) -> BlockReader: ...

    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class Store(Protocol):
    """A file system. Every implementation passes `ckptengine.testing.store_contract.StoreContract`."""

    def list(self, path: str) -> builtins.list[Entry]:
        """The entries of a directory, sorted by name. Called by catalog and retention."""
        ...

    def size(self, path: str) -> int:
        """Bytes in a regular file, as this mount sees it now. Called by the committer before it publishes."""
        ...

    def make_dirs(self, path: str) -> None:
        """Make a directory and its missing parents. Idempotent; safe against others making the same.

        Durable on return: every directory made here, and the names of `path` and of its parent even where
        they existed, since whoever made them may have died before making them durable.
        """
        ...

    def expect_files(self, path: str, *, files: int, file_nbytes: int) -> str | None:
        """Say what a directory is going to hold, before there is anything in it, so that a file system that
        has a choice can place it well: `files` files, made at the same time, of about `file_nbytes` bytes
        each (0: small ones).

        Called by the coordinator. Never fails: returns what could not be done, None if nothing had to be or
        all was. Idempotent.
        """
        ...

    def may_fit_elsewhere(self, path: str, *, nbytes: int) -> bool:
        """Whether a new file of `nbytes` bytes in the directory `path` may find the space that another one
        just did not (`ENOSPC`): where a file system consists of parts, one of them may be full.
        """
        ...

    def read(self, path: str, *, limit: int) -> bytes:
        """The whole of a small regular file. `CorruptCheckpointError` if it has more than `limit` bytes."""
        ...

    def create(self, path: str, *, nbytes: int) -> BlockWriter:
        """A new file of `nbytes` bytes (0: not known yet), its space reserved where the file system can.

        An existing file is a `StorageError` with `EEXIST`: two writers never share a name. On an error no
        file is left.
        """
        ...

    def open(self, path: str) -> BlockReader:
        """A regular file, for reading. A symbolic link as last component is refused."""
        ...

    def publish(self, path: str, data: bytes) -> None:
        """Put a small file at `path`, replacing what was there: readers see the old or the new one, never a
        mixture.

        Durable on return, name and content. Idempotent. On an error the old, the new or no file may be there
        after a crash; publishing again settles it.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove a file or symbolic link; a missing one is fine. Durable after `sync_dir` of its parent."""
        ...

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it; a missing one is fine. Follows no symbolic link, and refuses one
        as `path`.

        May be interrupted at any point and repeated. Durable after `sync_dir` of the parent.
        """
        ...

    def remove_dir(self, path: str) -> bool:
        """Remove an empty directory; a missing one is fine. False, and untouched, if it is not empty."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make durable which names are in a directory."""
        ...

    def lock_shared(self, path: str) -> AbstractContextManager[bool]:
        """Held on a step's directory by whoever reads the step, so that retention leaves it. Never waits.

        Gives False if someone holds it exclusively (the step is being removed), True otherwise, also where
        the file system has no locks. Ends with the context or the process.
        """
        ...

    def try_lock_exclusive(self, path: str) -> AbstractContextManager[bool]:
        """Held on a step's directory by retention. Gives False if anyone holds it; else as `lock_shared`."""
        ...
