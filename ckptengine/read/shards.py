"""Is this file the shard that the manifest names?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptengine.errors import CheckpointError, CorruptCheckpointError
from ckptengine.format.columns import ShardColumns
from ckptengine.format.digest import hexdigest
from ckptengine.format.manifest import Manifest, ShardRef
from ckptengine.format.scan import scan_header
from ckptengine.format.shard import ShardHeader, decode_header
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.storage.store import BlockReader, Store


def shard_path(step_path: str, ref: ShardRef) -> str:
    """The shard's path, after checking that it does not lead out of the step directory.

    Raises CorruptCheckpointError for `..`, absolute paths, and symbolic links in between that point
    elsewhere.
    """
    path = os.path.join(step_path, ref.path)
    home = os.path.realpath(step_path)
    if os.path.commonpath([home, os.path.realpath(path)]) != home:
        raise CorruptCheckpointError(
            "the shard's path leads out of the step directory", path=path, rank=ref.rank
        )
    return path


def open_header(store: Store, step_path: str, ref: ShardRef, manifest: Manifest) -> ShardHeader:
    """Reads and checks one shard's header: path, file size, digest, content, and that it is of this rank and
    attempt.

    Raises CorruptCheckpointError, StorageError, or UnsupportedFormatError, all with path and rank.
    """
    with _opened(store, step_path, ref) as (path, file):
        return read_header(file, path, ref, manifest)


def scan_shard(
    store: Store,
    step_path: str,
    ref: ShardRef,
    manifest: Manifest,
    scan: Callable[[bytes], ShardColumns] = scan_header,
) -> ShardColumns:
    """What INDEX is to hold of a shard, after checking its path, its size and its header's digest.

    For whoever has the digest from the header's writer: what the header says is not checked once more, but
    for whose it is. Raises as `open_header` does. scan: for whoever has scanned that header before.
    """
    with _opened(store, step_path, ref) as (path, file):
        data = _checked_bytes(file, path, ref, manifest)
        try:
            columns = scan(data)
        except (ValueError, KeyError) as error:
            raise CorruptCheckpointError(
                f"malformed shard header: {error}", path=path, rank=ref.rank
            ) from error
        _check_fields(
            path, ref, ("rank", ref.rank, columns.rank), ("attempt", manifest.attempt, columns.attempt)
        )
        return columns


@contextmanager
def _opened(store: Store, step_path: str, ref: ShardRef) -> Iterator[tuple[str, BlockReader]]:
    """A shard's path and the open file, whose size is right; errors name the rank."""
    path = shard_path(step_path, ref)
    try:
        with store.open(path) as file:
            check_size(path, ref, file.size)
            yield path, file
    except FileNotFoundError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptCheckpointError("the shard file is missing", path=path, rank=ref.rank) from None
    except CheckpointError as error:
        if error.rank is None:
            error.rank = ref.rank
        raise


def check_size(path: str, ref: ShardRef, nbytes: int) -> None:
    if nbytes != ref.size:
        what = "truncated" if nbytes < ref.size else "longer than the manifest says"
        raise CorruptCheckpointError(
            f"the shard file is {what}", path=path, rank=ref.rank, expected=ref.size, actual=nbytes
        )


def read_header(file: BlockReader, path: str, ref: ShardRef, manifest: Manifest) -> ShardHeader:
    """`open_header` for an open file of whatever size. `ref` and `manifest` are as decoded, so in bounds."""
    data = _checked_bytes(file, path, ref, manifest)
    header = decode_header(data, path=path, file_nbytes=ref.size)
    _check_fields(
        path,
        ref,
        ("rank", ref.rank, header.rank),
        ("step", manifest.step, header.step),
        ("attempt", manifest.attempt, header.attempt),
        ("run", manifest.run, header.run),
        ("world size", manifest.world_size, header.world_size),
        ("codec", manifest.codec, header.codec),
        ("header size", ref.header_nbytes, header.header_nbytes),
    )
    return header


def _checked_bytes(file: BlockReader, path: str, ref: ShardRef, manifest: Manifest) -> bytes:
    """The header's bytes, if they have the digest that the manifest says."""
    if file.size < ref.header_nbytes:
        raise CorruptCheckpointError(
            "the shard file ends within its header",
            path=path,
            rank=ref.rank,
            expected=ref.header_nbytes,
            actual=file.size,
        )
    data = AlignedBuffer(ref.header_nbytes).view[: ref.header_nbytes]
    file.pread_into(0, data)
    found = hexdigest(data)
    if found != ref.header_digest:
        other = next((one.rank for one in manifest.shards if one.header_digest == found), None)
        raise CorruptCheckpointError(
            "the shard's header is damaged" if other is None else f"the file is the shard of rank {other}",
            path=path,
            rank=ref.rank,
            offset=0,
            expected=ref.header_digest,
            actual=found,
        )
    return bytes(data)


def _check_fields(path: str, ref: ShardRef, *fields: tuple[str, object, object]) -> None:
    for what, expected, actual in fields:
        if expected != actual:
            raise CorruptCheckpointError(
                f"the shard's {what} is not the manifest's",
                path=path,
                rank=ref.rank,
                expected=expected,
                actual=actual,
            )
