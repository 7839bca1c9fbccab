"""One attempt to save one step, as one rank's writer process goes through it: written → durable → committed.

The coordinator's writer makes the attempt's directory, and after writing its own shard decides the outcome
for all ranks. The other writers wait for that decision. Every wait ends at the task's deadline, or
soon after (`ckptengine.write.waiting`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from concurrent.futures import Future
from functools import partial

import msgspec

from ckptengine.catalog.catalog import read_manifest
from ckptengine.catalog.retention import RetentionPolicy, apply_retention
from ckptengine.comm.failure import Failure
from ckptengine.comm.group import COORDINATOR
from ckptengine.comm.transport import Transport
from ckptengine.errors import CheckpointError, CommitTimeoutError, SaveFailedError
from ckptengine.format.blocks import BlockTable
from ckptengine.format.manifest import Manifest
from ckptengine.format.names import AttemptId, shard_filename, step_dirname
from ckptengine.format.shard import HeaderTemplate
from ckptengine.staging.arena import Arena
from ckptengine.storage.store import Store
from ckptengine.write.commit import collect_receipts, commit
from ckptengine.write.draft import IndexDraft, begin_draft
from ckptengine.write.fate import COMMIT_GRACE_S, claim_commit, give_up
from ckptengine.write.messages import (
    Outcome,
    Ready,
    Receipt,
    WriteTask,
    failed_key,
    fate_key,
    outcome_key,
    ready_key,
    receipt_key,
)
from ckptengine.write.methods import History
from ckptengine.write.reporting import Reporter
from ckptengine.write.second_place import with_a_second_place
from ckptengine.write.shard_writer import Compression, WrittenShard, write_shard
from ckptengine.write.staged import waiting_for
from ckptengine.write.waiting import OUTCOME_GRACE_S, wait_for_key

logger = logging.getLogger(__name__)


def run_save(
    task: WriteTask,
    store: Store,
    transport: Transport,
    arena: Arena,
    history: History,
) -> Outcome:
    """Bring the bytes in the arena to the commit, also while they are still being staged; how it ended is on
    the status page and returned, never raised. `history`: what earlier saves to this root have shown."""
    reporter = Reporter(task, arena.status)
    draft = None
    try:
        header = bytes(arena.payload[: task.header_nbytes])
        if task.rank == COORDINATOR:
            draft = begin_draft(header, task.world_size)
        receipt = _make_durable(task, store, transport, arena, header, reporter, history)
    except Exception as error:
        logger.warning("step %d, attempt %s, rank %d: %s", task.step, task.attempt, task.rank, error)
        receipt = Receipt(rank=task.rank, failure=Failure.of(error, task.rank))
    try:
        outcome = (
            _decide(task, store, transport, receipt, draft, reporter)
            if task.rank == COORDINATOR
            else _report_and_wait(task, store, transport, receipt, reporter)
        )
    except Exception as error:
        outcome = Outcome(committed=False, failure=Failure.of(error, task.rank))
    reporter.ended(outcome)
    if outcome.committed and task.rank == COORDINATOR:
        _retain(task, store)
    return outcome


def forget(attempt: str, world_size: int, transport: Transport) -> None:
    """Drop an attempt's values from the transport. For the coordinator, after a later attempt has committed:
    each writer takes one task after the other, so all of them are done with the earlier one."""
    for key in (
        ready_key(attempt),
        failed_key(attempt),
        outcome_key(attempt),
        fate_key(attempt),
        *(receipt_key(attempt, rank) for rank in range(world_size)),
    ):
        transport.delete(key)


def report_failure(attempt: str, rank: int, failure: Failure, transport: Transport) -> None:
    """Tell all ranks that `rank` cannot finish the attempt. A word of its writer's that came before
    stands."""
    if rank == COORDINATOR:
        # Writers that still wait for the directory must not wait for the deadline.
        transport.set(ready_key(attempt), msgspec.msgpack.encode(Ready(failure=failure)))
        outcome = Outcome(committed=False, failure=failure)
        transport.set_if_absent(outcome_key(attempt), msgspec.msgpack.encode(outcome))
    else:
        transport.set_if_absent(failed_key(attempt), msgspec.msgpack.encode(failure))
        receipt = Receipt(rank=rank, failure=failure)
        transport.set_if_absent(receipt_key(attempt, rank), msgspec.msgpack.encode(receipt))


def shard_path(task: WriteTask, rank: int) -> str:
    """Where a rank's shard of this attempt is, relative to the step directory."""
    return f"{task.attempt}/{shard_filename(rank, compressed=task.codec == 'zstd')}"


def step_path(task: WriteTask) -> str:
    return os.path.join(task.root, step_dirname(task.step))


def _make_durable(
    task: WriteTask,
    store: Store,
    transport: Transport,
    arena: Arena,
    header: bytes,
    reporter: Reporter,
    history: History,
) -> Receipt:
    notes = _prepare_directory(task, store, transport, reporter)
    reporter.enter("writing")
    payload = arena.payload
    data = payload[task.data_offset : task.data_offset + task.data_nbytes]
    template = HeaderTemplate(
        data=header,
        digests_at=task.digests_at,
        stored_at=task.stored_at,
        methods_at=task.methods_at,
        own_at=task.own_at,
        n_blocks=BlockTable(task.data_nbytes, task.block_nbytes).count,
    )
    path = os.path.join(step_path(task), shard_path(task, task.rank))

    def write() -> WrittenShard:
        return write_shard(
            store,
            path,
            template=template,
            data=data,
            block_nbytes=task.block_nbytes,
            compression=Compression(task.zstd_level, task.auto, history) if task.codec == "zstd" else None,
            threads=task.io_threads,
            huge=task.arena.huge,
            staged=waiting_for(arena.mark, task, reporter.beat),
            on_progress=reporter.wrote,
            on_written=reporter.written,
        )

    written = with_a_second_place(store, path, template.nbytes + len(data), write)
    reporter.durable()
    return Receipt(
        rank=task.rank,
        size=written.size,
        header_nbytes=task.header_nbytes,
        header_digest=written.header_digest,
        notes=notes,
    )


def _refuse_link(task: WriteTask, store: Store) -> None:
    """What is written through a symbolic link lies elsewhere, and the catalog would not list it."""
    name = step_dirname(task.step)
    try:
        entries = store.list(task.root)
    except FileNotFoundError:
        return  # removed since the run began; it is made again
    if any(entry.name == name and not entry.is_dir for entry in entries):
        raise SaveFailedError(
            f"step {task.step}: its name is taken by a symbolic link or a file",
            path=step_path(task),
            hint="move it out of the root",
        )


def _prepare_directory(
    task: WriteTask, store: Store, transport: Transport, reporter: Reporter
) -> tuple[str, ...]:
    """One mkdir per attempt, by one rank: on Lustre a mkdir costs ten times a create. Returns what did not go
    as wished."""
    notes: tuple[str, ...] = ()
    if task.rank == COORDINATOR:
        try:
            _refuse_link(task, store)
            reporter.beat()
            store.make_dirs(os.path.join(step_path(task), task.attempt))
            reporter.beat()
            notes = _announce_files(task, store)
            reporter.beat()
        except Exception as error:
            ready = Ready(failure=Failure.of(error, task.rank))
            transport.set(ready_key(task.attempt), msgspec.msgpack.encode(ready))
            raise
        transport.set(ready_key(task.attempt), msgspec.msgpack.encode(Ready(step=task.step)))
        return notes
    try:
        answer = wait_for_key(transport, task, reporter.beat, ready_key(task.attempt))
    except TimeoutError:
        raise CommitTimeoutError(
            f"step {task.step}: the coordinator did not make the attempt's directory in time",
            path=step_path(task),
            rank=COORDINATOR,
        ) from None
    ready = msgspec.msgpack.decode(answer, type=Ready)
    if ready.failure is not None:
        raise ready.failure.to_error(SaveFailedError)
    if ready.step != task.step:
        raise SaveFailedError(
            f"this rank saves step {task.step} while the coordinator saves step {ready.step}",
            rank=task.rank,
            hint="all ranks must save the same steps in the same order",
        )
    return notes


def _announce_files(task: WriteTask, store: Store) -> tuple[str, ...]:
    """Before any rank knows of the directory, so that every file in it is laid out the same. The
    coordinator's shard stands for all: FSDP's are alike, and replicas are balanced by bytes."""
    shard_nbytes = task.data_offset + task.data_nbytes
    problems = (
        # INDEX and the manifest: in a root striped over all OSTs, each look at one would ask them all.
        store.expect_files(step_path(task), files=2, file_nbytes=0),
        store.expect_files(
            os.path.join(step_path(task), task.attempt), files=task.world_size, file_nbytes=shard_nbytes
        ),
    )
    notes = tuple(problem for problem in problems if problem is not None)
    for note in notes:
        logger.warning("step %d, attempt %s: %s", task.step, task.attempt, note)
    return notes


def _decide(
    task: WriteTask,
    store: Store,
    transport: Transport,
    own: Receipt,
    draft: Future[IndexDraft] | None,
    reporter: Reporter,
) -> Outcome:
    """The coordinator's decision. Every way out of here is told to the other ranks."""
    try:
        receipts = collect_receipts(transport, task, own, reporter.beat)
        reporter.enter("committing")
        paths = [shard_path(task, rank) for rank in range(task.world_size)]
        assert draft is not None  # or there would be no good receipt
        manifest = commit(
            store,
            step_path(task),
            task,
            receipts,
            paths,
            draft,
            reporter.beat,
            claim=partial(claim_commit, transport, task.attempt),
        )
        reporter.beat()
        outcome = msgspec.structs.replace(
            committed_as(manifest),
            # The manifest was made, and says so, before it was published.
            committed_at=time.time(),
            notes=own.notes,
        )
    except Exception as error:
        failure = Failure.of(error, task.rank)
        outcome = Outcome(committed=False, failure=failure, retry=task.may_retry and failure.retryable)
    # The coordinator's trainer may have given the attempt up for us, if we were slow: the first word stands.
    try:
        data = transport.set_if_absent(outcome_key(task.attempt), msgspec.msgpack.encode(outcome))
    except ConnectionError:
        if outcome.committed:  # the manifest stands, and the others will find it
            return outcome
        raise
    return msgspec.msgpack.decode(data, type=Outcome)


def _report_and_wait(
    task: WriteTask, store: Store, transport: Transport, receipt: Receipt, reporter: Reporter
) -> Outcome:
    if receipt.failure is not None:
        transport.set_if_absent(failed_key(task.attempt), msgspec.msgpack.encode(receipt.failure))
    transport.set(receipt_key(task.attempt, task.rank), msgspec.msgpack.encode(receipt))
    try:
        return _await_outcome(task, transport, reporter)
    except (TimeoutError, ConnectionError, CheckpointError) as error:
        # The coordinator may have died between publishing and telling; the manifest is the truth.
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(store, step_path(task))
            if manifest.attempt == task.attempt:
                return committed_as(manifest)
        if isinstance(error, CheckpointError):
            raise
        raise undecided(task, error) from None


def _await_outcome(task: WriteTask, transport: Transport, reporter: Reporter) -> Outcome:
    wait = partial(wait_for_key, transport, task, reporter.beat, outcome_key(task.attempt))
    try:
        data = wait(grace_s=OUTCOME_GRACE_S)
    except TimeoutError:
        silent = CommitTimeoutError(
            f"step {task.step}: the coordinator did not say in time how the attempt ended",
            path=step_path(task),
            rank=COORDINATOR,
        )
        if give_up(transport, task.attempt, Failure.of(silent, task.rank)):
            raise silent from None
        data = wait(grace_s=OUTCOME_GRACE_S + COMMIT_GRACE_S)
    return msgspec.msgpack.decode(data, type=Outcome)


def undecided(task: WriteTask, reason: object) -> CommitTimeoutError:
    """The error of a rank that will not hear whether the coordinator has made the commit."""
    return CommitTimeoutError(
        f"step {task.step}: the coordinator was making the commit, and did not say how that ended ({reason})",
        path=step_path(task),
        rank=COORDINATOR,
        hint="the step may be committed: `ckpt list` tells",
    )


def committed_as(manifest: Manifest) -> Outcome:
    """The outcome of the attempt that `manifest` commits."""
    return Outcome(
        committed=True,
        fingerprint=manifest.fingerprint,
        nbytes=manifest.nbytes,
        committed_at=manifest.created,
    )


def _retain(task: WriteTask, store: Store) -> None:
    policy = RetentionPolicy(keep_last=task.keep_last, keep_every=task.keep_every)
    try:
        apply_retention(store, task.root, policy, current=AttemptId.parse(task.attempt))
    except (OSError, CheckpointError) as error:
        # The step is committed; what could not be deleted is tried again after the next commit.
        logger.warning("retention in %s failed: %s", task.root, error)
