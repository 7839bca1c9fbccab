"""Turns the receipts of all ranks into a committed step; runs in the coordinator's writer process only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import msgspec

from ckptengine.catalog.catalog import read_manifest
from ckptengine.comm.transport import Transport
from ckptengine.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitTimeoutError,
    NotCommittedError,
    SaveFailedError,
)
from ckptengine.format.columns import IndexBuilder, ShardColumns
from ckptengine.format.digest import hexdigest
from ckptengine.format.index import encode_index
from ckptengine.format.manifest import IndexRef, Manifest, ShardRef, decode_manifest, encode_manifest
from ckptengine.format.names import INDEX_NAME, MANIFEST_NAME, AttemptId
from ckptengine.format.scan import HeaderScanner, digests_in
from ckptengine.read.shards import scan_shard
from ckptengine.storage.store import Store
from ckptengine.write.draft import IndexDraft
from ckptengine.write.messages import Receipt, WriteTask, failed_key, receipt_key
from ckptengine.write.reporting import Beat
from ckptengine.write.waiting import wait_for_key

logger = logging.getLogger(__name__)

HEADER_READERS = 16


def collect_receipts(transport: Transport, task: WriteTask, own: Receipt, beat: Beat) -> list[Receipt]:
    """All ranks' receipts in rank order; raises the first failure heard of, or `CommitTimeoutError` naming a
    missing rank."""
    receipts = []
    for rank in range(task.world_size):
        receipt = own if rank == task.rank else _wait_for_receipt(transport, task, rank, beat)
        if receipt.failure is not None:
            raise receipt.failure.to_error(SaveFailedError)
        receipts.append(receipt)
    return receipts


def _wait_for_receipt(transport: Transport, task: WriteTask, rank: int, beat: Beat) -> Receipt:
    try:
        data = wait_for_key(transport, task, beat, receipt_key(task.attempt, rank), failed_key(task.attempt))
    except TimeoutError:
        raise CommitTimeoutError(
            f"step {task.step}: rank {rank} did not make its shard durable before the commit deadline",
            rank=rank,
            hint="see that rank's log; raise Config.commit_timeout_s if its storage is only slow",
        ) from None
    return msgspec.msgpack.decode(data, type=Receipt)


def commit(
    store: Store,
    step_path: str,
    task: WriteTask,
    receipts: Sequence[Receipt],
    shard_paths: Sequence[str],
    own: Future[IndexDraft],
    beat: Beat,
    claim: Callable[[], None],
) -> Manifest:
    """Check every shard from this mount, publish `INDEX` and `MANIFEST.json`, and return the manifest. There
    is a beat after each step. claim: called before the manifest is published; raises if that may not be.

    The check is not politeness: a client that lost its connection can report a good sync for bytes that other
    mounts never see. A header with the digest that its rank reported is the one that rank encoded, so it is
    only scanned for INDEX: decoding the headers of thousands of ranks takes longer than all else here. The
    coordinator's has been, into `own`.
    Publishing is idempotent; an attempt older than the committed one is refused with `SaveFailedError`.
    """
    attempt_path = f"{step_path}/{task.attempt}"
    # Each rank synced its file; only this makes the names in the directory durable.
    store.sync_dir(attempt_path)
    beat()
    refs = [
        ShardRef(
            rank=r.rank, path=path, size=r.size, header_nbytes=r.header_nbytes, header_digest=r.header_digest
        )
        for r, path in zip(receipts, shard_paths, strict=True)
    ]
    draft = Manifest(
        step=task.step,
        attempt=task.attempt,
        run=str(AttemptId.parse(task.attempt).run),
        world_size=task.world_size,
        created=time.time(),
        codec=task.codec,
        block_nbytes=task.block_nbytes,
        nbytes=sum(ref.size for ref in refs),
        tensors=0,
        metadata=task.metadata,
        shards=tuple(refs),
        index=None,
    )
    contents = _check_shards(store, step_path, draft, task.rank, own, beat)
    index = own.result().index or _index(contents, step_path)
    beat()
    manifest = replace(
        draft,
        tensors=contents.tensors,
        index=None if index is None else IndexRef(size=len(index), digest=hexdigest(index)),
    )
    _refuse_if_overtaken(store, step_path, task)
    beat()
    if index is not None:
        store.publish(f"{step_path}/{INDEX_NAME}", index)
        beat()
    path = f"{step_path}/{MANIFEST_NAME}"
    data = encode_manifest(manifest)
    # Read back before it counts, by the rules every reader applies; that also gives the fingerprint.
    manifest = decode_manifest(data, path=path)
    claim()
    store.publish(path, data)
    return manifest


def _check_shards(
    store: Store, step_path: str, manifest: Manifest, rank: int, own: Future[IndexDraft], beat: Beat
) -> IndexBuilder:
    scanner = HeaderScanner()

    def check(ref: ShardRef) -> ShardColumns:
        try:
            if ref.rank == rank:
                return scan_shard(store, step_path, ref, manifest, lambda header: _finished(header, own))
            return scan_shard(store, step_path, ref, manifest, scanner.scan)
        except (OSError, CheckpointError) as error:
            raise SaveFailedError(
                f"rank {ref.rank} reported its shard durable, the coordinator does not see it whole: {error}",
                path=f"{step_path}/{ref.path}",
                rank=ref.rank,
                hint="are all ranks on the same shared file system?",
            ) from error
        finally:
            beat()

    with ThreadPoolExecutor(
        min(HEADER_READERS, len(manifest.shards)), thread_name_prefix="ckpt-commit"
    ) as pool:
        others = pool.map(check, manifest.shards)
        first = next(others)  # the coordinator's, of which the draft has all but the values
        contents = own.result().contents
        if first.values is not None:
            contents.per_rank.add(first.values)
        for shard in others:
            contents.add(shard)
            beat()
        return contents


def _finished(header: bytes, own: Future[IndexDraft]) -> ShardColumns:
    """The coordinator's columns, with the digests that were not known when they were drafted."""
    columns = own.result().columns
    assert columns.values is not None
    return replace(columns, values=replace(columns.values, digests=digests_in(header)))


def _index(contents: IndexBuilder, step_path: str) -> bytes | None:
    """None where the format's bound does not allow one: readers then read the headers, slower."""
    try:
        return encode_index(contents)
    except ValueError as error:
        logger.warning("%s is committed without INDEX: %s", step_path, error)
        return None


def _refuse_if_overtaken(store: Store, step_path: str, task: WriteTask) -> None:
    try:
        committed = read_manifest(store, step_path).attempt
    except (NotCommittedError, CheckpointNotFoundError):
        return
    except CheckpointError:
        return  # a damaged manifest commits nothing; the new one replaces it
    if AttemptId.parse(committed) > AttemptId.parse(task.attempt):
        raise SaveFailedError(
            f"step {task.step} was already committed by {committed}, a later attempt than {task.attempt}",
            path=step_path,
            hint="another, newer run writes to this root",
        )
