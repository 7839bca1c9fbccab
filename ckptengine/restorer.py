"""A restore, as one rank goes through it: resolve → plan → read → apply, with all ranks agreeing after each.

Nothing of the target is touched before every rank has found that the checkpoint fits it. A damaged shard on
any rank sends all ranks to the previous commit together; a mismatch is an error on all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from itertools import chain
from typing import Any

import msgspec

from ckptengine.adapters.collector import gc_paused
from ckptengine.adapters.restore import Match, RestoreTarget
from ckptengine.catalog.catalog import StepEntry, ignored_entries, list_steps, newest_first, read_manifest
from ckptengine.comm.group import COORDINATOR, Failure, Group
from ckptengine.config import Config
from ckptengine.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotCommittedError,
    StateMismatchError,
    StorageError,
)
from ckptengine.format.manifest import Manifest, ShardRef
from ckptengine.format.names import step_dirname
from ckptengine.format.shard import ShardHeader
from ckptengine.info import FallBack, RestoreInfo
from ckptengine.phases import Phase, Ranks, Stopwatch
from ckptengine.read.reader import ReadStats, read_shard
from ckptengine.read.shards import open_header, shard_path
from ckptengine.read.step import held_manifest
from ckptengine.storage.store import Store
from ckptengine.tracing.recorder import span

logger = logging.getLogger(__name__)

# What damage looks like: the next older commit may be whole. Anything else would fail there too, or is the
# caller's to fix.
DAMAGE = (CorruptCheckpointError, StorageError)


class _Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs to restore one step: its own shard, and nothing about the others'."""

    step: int
    step_path: str
    attempt: str
    run: str
    world_size: int
    codec: str
    block_nbytes: int
    created: float
    fingerprint: str
    shard: dict[str, Any]
    skipped: list[tuple[int, str]]

    def manifest(self) -> Manifest:
        """The manifest as far as this rank's shard goes."""
        return Manifest(
            step=self.step,
            attempt=self.attempt,
            run=self.run,
            world_size=self.world_size,
            created=self.created,
            codec=self.codec,  # type: ignore[arg-type]
            block_nbytes=self.block_nbytes,
            nbytes=0,
            tensors=0,
            metadata={},
            shards=(ShardRef(**self.shard),),
            index=None,
        )


def restore(
    root: str,
    state: Any,
    *,
    step: int | None,
    strict: bool,
    verify: bool,
    store: Store,
    group: Group,
    config: Config,
) -> RestoreInfo:
    """Fill `state` from the newest commit that is whole, or from `step`; see `Checkpointer.restore`."""
    started = time.perf_counter()
    with ExitStack() as held:
        candidates = _Candidates(root, step, store, group.world_size, held) if group.is_coordinator else None
        fell_back: list[FallBack] = []
        watch = Stopwatch()

        def look() -> RestoreTarget:
            with watch.measure("plan"):
                return RestoreTarget(state, allow_pickle=config.allow_pickle)

        target = _on_all_ranks(group, watch, look, "reading the restore target")
        while True:
            assignment = _resolve(candidates, group, watch)
            fell_back.extend(FallBack(skipped, reason, COORDINATOR) for skipped, reason in assignment.skipped)
            try:
                match, stats, read_s, ranks = _restore_step(
                    assignment, target, strict, verify, store, group, config, watch
                )
            except DAMAGE as error:
                if step is not None or not _is_damage(error):
                    raise
                fell_back.append(FallBack(assignment.step, str(error), error.rank))
                if candidates is not None:
                    candidates.reject(assignment.step, str(error))
                logger.warning(
                    "step %d is damaged, falling back to the one before it: %s", assignment.step, error
                )
                continue
            return RestoreInfo(
                step=assignment.step,
                path=assignment.step_path,
                nbytes=stats.nbytes_delivered,
                seconds=time.perf_counter() - started,
                read_seconds=read_s,
                missing=tuple(match.missing),
                unexpected=tuple(match.unexpected),
                fell_back_from=tuple(fell_back),
                from_cache_nbytes=stats.from_cache,
                verified=verify,
                rank=group.rank,
                phases=watch.phases(),
                slowest=ranks.slowest,
                ranks=ranks.all,
                limit_gbps=config.storage_gbps,
            )


def _restore_step(
    assignment: _Assignment,
    target: RestoreTarget,
    strict: bool,
    verify: bool,
    store: Store,
    group: Group,
    config: Config,
    watch: Stopwatch,
) -> tuple[Match, ReadStats, float, Ranks]:
    shards = _Shards(assignment, store, watch)

    def plan() -> Match:
        with gc_paused(), watch.measure("plan"):
            return target.match(
                shards.own, strict=strict, path=shards.own_path, rank=group.rank, others=shards.header_of
            )

    match = _on_all_ranks(group, watch, plan, "comparing the checkpoint with the restore target")

    def read() -> tuple[ReadStats, float]:
        begun = time.perf_counter()
        target.begin(match)
        with span("read the shards", "whole", {"step": assignment.step}):
            stats = shards.read(match, config.io_threads, verify)
        return stats, time.perf_counter() - begun

    stats, read_s = _on_all_ranks(
        group, watch, read, "reading the shards", timeout_s=config.restore_timeout_s
    )
    ranks = Ranks(group.rank, watch)

    def apply() -> None:
        with gc_paused(), watch.measure("apply"):
            match.apply()

    _on_all_ranks(group, watch, apply, "putting the restored values in place", ranks=ranks)
    return match, stats, read_s, ranks


class _Shards:
    """The shards one rank reads: its own, and those of ranks that stored a replica for it.

    Only a rank whose shard refers to others reads the whole manifest.
    """

    def __init__(self, assignment: _Assignment, store: Store, watch: Stopwatch) -> None:
        self._assignment = assignment
        self._watch = watch
        self._store = store
        self._manifest = assignment.manifest()
        (self._ref,) = self._manifest.shards
        self._others: dict[int, tuple[str, ShardHeader]] = {}

    @property
    def own_path(self) -> str:
        return shard_path(self._assignment.step_path, self._ref)

    @cached_property
    def own(self) -> ShardHeader:
        return self._open(self._ref)

    def _open(self, ref: ShardRef) -> ShardHeader:
        with self._watch.measure("metadata"):
            header = open_header(self._store, self._assignment.step_path, ref, self._manifest)
        self._watch.add("metadata", Phase(nbytes=ref.header_nbytes))
        return header

    def header_of(self, rank: int) -> ShardHeader:
        step_path = self._assignment.step_path
        if not self._others:
            with self._watch.measure("metadata"):
                self._manifest = read_manifest(self._store, step_path)
            if self._manifest.fingerprint != self._assignment.fingerprint:
                raise CorruptCheckpointError(
                    "the step was committed anew while it was being restored",
                    path=step_path,
                    expected=self._assignment.fingerprint,
                    actual=self._manifest.fingerprint,
                )
        ref = self._manifest.shards[rank]
        header = self._open(ref)
        self._others[rank] = shard_path(step_path, ref), header
        return header

    def read(self, match: Match, threads: int, verify: bool) -> ReadStats:
        stats = ReadStats()
        watch = self._watch
        rounds = match.rounds()
        while True:
            with watch.measure("plan"):
                one = next(rounds, None)
            if one is None:
                return stats
            for rank, destinations in one.destinations.items():
                path, header = (self.own_path, self.own) if rank is None else self._others[rank]
                read = read_shard(self._store, path, header, destinations, threads=threads, verify=verify)
                watch.add_all(read.phases)
                stats += read
            with watch.measure("scatter"):
                one.finish()


def _is_damage(error: CheckpointError) -> bool:
    return not (isinstance(error, StorageError) and error.is_local)


def _on_all_ranks(
    group: Group,
    watch: Stopwatch,
    work: Callable[[], Any],
    what: str,
    timeout_s: float | None = None,
    ranks: Ranks | None = None,
) -> Any:
    """Do `work` on every rank; return its result only if it succeeded on all, else raise the failing rank's
    error on all. ranks: to exchange with the others on the way."""
    result: Any = None
    failure: Failure | None = None
    own: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure, own = Failure.of(error, group.rank), error
    try:
        with watch.measure("agree"):
            if ranks is None:
                group.agree(failure, what=what, timeout_s=timeout_s)
            else:
                ranks.learn(
                    group.summarise(ranks.own(), ranks.summary, failure, what=what, timeout_s=timeout_s)
                )
    except CheckpointError as error:
        # The rank itself raises what it caught, with its traceback, unless another rank's failure came first.
        if own is not None and error.rank == group.rank and not isinstance(own, DAMAGE):
            raise own from None
        raise error from own
    return result


def _resolve(candidates: _Candidates | None, group: Group, watch: Stopwatch) -> _Assignment:
    values: list[bytes] | None = None
    failure: Failure | None = None
    if candidates is not None:
        try:
            with watch.measure("metadata"):
                values = candidates.next()
        except Exception as error:
            failure = Failure.of(error, group.rank)
    with watch.measure("agree"):
        data = group.scatter(values, failure, what="choosing the step to restore")
    return msgspec.msgpack.decode(data, type=_Assignment)


class _Candidates:
    """The steps the coordinator offers one after the other, newest first."""

    def __init__(self, root: str, step: int | None, store: Store, world_size: int, held: ExitStack) -> None:
        self._root = root
        self._step = step
        self._store = store
        self._world_size = world_size
        self._held = held
        self._entries: Iterator[StepEntry] | None = None
        self._rejected: list[str] = []

    def reject(self, step: int, reason: str) -> None:
        """A step that was offered turned out to be damaged; for the error if no step is left."""
        self._rejected.append(f"step {step}: {reason}")

    def next(self) -> list[bytes]:
        """The next committed step's assignments, one for each rank.

        Raises `CheckpointNotFoundError` if no save ever committed, `CorruptCheckpointError` when every commit
        has been tried.
        """
        skipped: list[tuple[int, str]] = []
        if self._entries is None:
            self._entries = self._find()
        for entry in self._entries:
            try:
                # Held until the restore ends: retention, in whatever process, leaves the step alone.
                manifest = self._held.enter_context(held_manifest(self._store, entry.path))
            except (*DAMAGE, CheckpointNotFoundError, NotCommittedError) as error:
                if self._step is not None or not _is_damage(error):
                    raise
                logger.warning("step %d cannot be used: %s", entry.step, error)
                skipped.append((entry.step, str(error)))
                self.reject(entry.step, str(error))
                continue
            self._check_world(manifest, entry.path)
            return [_assignment(manifest, entry.path, ref, skipped) for ref in manifest.shards]
        raise CorruptCheckpointError(
            f"no committed checkpoint could be restored ({'; '.join(self._rejected)})",
            path=self._root,
            hint="run `ckpt verify` on each step; training was not restarted from scratch",
        )

    def _find(self) -> Iterator[StepEntry]:
        if self._step is not None:
            return iter([StepEntry(self._step, f"{self._root}/{step_dirname(self._step)}", True)])
        newest = newest_first(self._store, self._root)
        first = next(newest, None)
        ignored = ignored_entries(self._store, self._root)
        for one in ignored:
            logger.warning("%s is ignored: %s", one.path, one.reason)
        if first is None:
            # Also where saves were begun: a first save that was cut short left nothing that could be lost.
            entries = list_steps(self._store, self._root, committed_only=False)
            begun = f": {len(entries)} saves were begun, none was committed" if entries else ""
            taken_for_steps = "; ".join(f"{one.path} is ignored: {one.reason}" for one in ignored[:3])
            raise CheckpointNotFoundError(
                f"there is no checkpoint here{begun}", path=self._root, hint=taken_for_steps or None
            )
        return chain([first], newest)

    def _check_world(self, manifest: Manifest, path: str) -> None:
        if manifest.world_size != self._world_size:
            raise StateMismatchError(
                f"step {manifest.step} was saved by {manifest.world_size} ranks, not by {self._world_size}",
                path=path,
                hint="restore with the same number of ranks, or read it with ckptengine.open_checkpoint",
            )


def _assignment(manifest: Manifest, path: str, ref: ShardRef, skipped: list[tuple[int, str]]) -> bytes:
    return msgspec.msgpack.encode(
        _Assignment(
            step=manifest.step,
            step_path=path,
            attempt=manifest.attempt,
            run=manifest.run,
            world_size=manifest.world_size,
            codec=manifest.codec,
            block_nbytes=manifest.block_nbytes,
            created=manifest.created,
            fingerprint=manifest.fingerprint,
            shard={
                "rank": ref.rank,
                "path": ref.path,
                "size": ref.size,
                "header_nbytes": ref.header_nbytes,
                "header_digest": ref.header_digest,
            },
            skipped=skipped,
        )
    )
