"""What is done in each part of a restore, plan → read → apply, with all ranks agreeing after it?

A rank whose target is made of what is in its own shard reads that and no other. Any other plans over all
ranks' shards, by itself: what it has to say to the others is the same. Only where another number of ranks
saved, as all of them know from the start, they tell each other which keys they had no place for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import msgspec

from ckptengine.adapters.collector import gc_paused
from ckptengine.adapters.differences import Differences, mismatch
from ckptengine.adapters.restore import Match, RestoreTarget
from ckptengine.adapters.wanted import key_text
from ckptengine.adapters.world import World
from ckptengine.comm.group import Group
from ckptengine.config import Config
from ckptengine.info import ExchangeInfo, FallBack, RestoreInfo
from ckptengine.no_match import Given, as_errors, on_no_rank, warn, without
from ckptengine.on_all_ranks import Told, on_all_ranks
from ckptengine.phases import Ranks, Stopwatch
from ckptengine.read import trees
from ckptengine.read.reader import ReadStats
from ckptengine.read_once import Sharing
from ckptengine.restore_options import RestoreOptions
from ckptengine.step_shards import Assignment, StepShards
from ckptengine.storage.store import Store
from ckptengine.tracing.recorder import span

logger = logging.getLogger(__name__)

_TOLD = 20


class RestoreParts:
    """One restore, whichever step it ends with."""

    def __init__(
        self, options: RestoreOptions, store: Store, group: Group, config: Config, *, streaming: bool = False
    ) -> None:
        self.started = time.perf_counter()
        self.streaming = streaming
        self.options = options
        self.store = store
        self.group = group
        self.config = config
        self.watch = Stopwatch()
        self.fell_back: list[FallBack] = []
        self.sharing: Callable[[], Sharing] | None = None
        self.priority: tuple[str, ...] = ()
        """Patterns of what is read first."""
        self.compares_patterns = False
        """Has any rank patterns?"""
        self.exchange = ExchangeInfo(why="each rank reads for itself")

    def shards(self, assignment: Assignment) -> StepShards:
        return StepShards(assignment, self.store, self.config.io_threads, self.watch)

    def plan(
        self,
        assignment: Assignment,
        shards: StepShards,
        target: RestoreTarget,
        prepare: Callable[[Match], object] = lambda match: None,
        tell: Told | None = None,
    ) -> Match:
        """How the step fits the target, on all ranks; they also `prepare` with it, and `tell`."""
        options, rank = self.options, self.group.rank
        own = assignment.world_size == self.group.world_size

        @cache
        def world() -> World:
            return World(shards.own, shards.held(), shards.header_of, reader=rank, own=own)

        def plan() -> Match:
            with gc_paused(), self.watch.measure("plan"):
                if own:
                    match = target.match(
                        shards.own,
                        strict=options.strict,
                        path=shards.own_path,
                        rank=rank,
                        others=shards.header_of,
                        world=world,
                    )
                else:
                    match = target.match_world(
                        world(), options.per_rank, strict=options.strict, path=assignment.step_path, rank=rank
                    )
                shards.open_headers(match.shards)
                prepare(match)
                return match

        what = "comparing the checkpoint with the restore target"
        match: Match = on_all_ranks(self.group, self.watch, plan, what, tell=tell)
        if not own:
            with self.watch.measure("agree"):
                match = _without_place(match, target, options.strict, assignment.step_path, self.group)
        if self.compares_patterns:
            with self.watch.measure("agree"):
                self._compare_patterns(assignment, match, target, None if own else world)
        return match

    def patterns(self) -> list[Given]:
        """All that this rank was given."""
        return [
            *self.options.partial.patterns(),
            *(("per_rank", pattern) for pattern in self.options.per_rank.patterns),
            *(("priority", pattern) for pattern in self.priority),
        ]

    def _compare_patterns(
        self, assignment: Assignment, match: Match, target: RestoreTarget, world: Callable[[], World] | None
    ) -> None:
        """Raises `StateMismatchError` on all ranks where something is asked for that no rank has. world: of
        another number of ranks."""
        unmatched = [*self.options.partial.unmatched()]
        per_rank = [("per_rank", pattern) for pattern in self.options.per_rank.patterns]
        if world is not None and per_rank:
            saved = world()
            in_tree = (name for name, _ in trees.named(saved.tree, key_text))
            unmatched += without(per_rank, [*in_tree, *saved.per_rank.names])
        unmatched += without([("priority", pattern) for pattern in self.priority], match.filled)
        missing = on_no_rank(self.group, self.patterns(), unmatched)
        errors = as_errors(missing) if self.options.strict else []
        if errors:
            found = Differences(mismatched=errors)
            raise mismatch(found, True, assignment.step_path, None, touched=target.is_touched)
        if self.group.is_coordinator:
            warn(assignment.step, missing)

    def read(self, work: Callable[[], object], step: int) -> None:
        def read() -> None:
            with span("read the shards", "whole", {"step": step}):
                work()

        timeout_s = self.config.restore_timeout_s
        on_all_ranks(self.group, self.watch, read, "reading the shards", timeout_s=timeout_s)

    def apply(self, work: Callable[[], object], ranks: Ranks | None = None) -> None:
        def apply() -> None:
            with gc_paused(), self.watch.measure("apply"):
                work()

        on_all_ranks(self.group, self.watch, apply, "putting the restored values in place", tell=ranks)

    def finish(
        self,
        assignment: Assignment,
        match: Match,
        stats: ReadStats,
        read_s: float,
        work: Callable[[], object],
    ) -> RestoreInfo:
        """Do what is left to do on all ranks, and report."""
        ranks = Ranks(self.group.rank, self.watch)
        self.apply(work, ranks)
        _tell(assignment, match, self.group)
        return RestoreInfo(
            step=assignment.step,
            path=assignment.step_path,
            nbytes=stats.nbytes_delivered,
            seconds=time.perf_counter() - self.started,
            read_seconds=read_s,
            missing=tuple(match.missing),
            unexpected=tuple(match.unexpected),
            world_size=assignment.world_size,
            from_rank0=match.from_rank0,
            dropped=match.dropped,
            fell_back_from=tuple(self.fell_back),
            from_cache_nbytes=stats.from_cache,
            verified=self.options.verify,
            rank=self.group.rank,
            phases=self.watch.phases(),
            slowest=ranks.slowest,
            ranks=ranks.all,
            limit_gbps=self.config.storage_gbps,
            exchange=self.exchange,
        )


def _without_place(match: Match, target: RestoreTarget, strict: bool, path: str, group: Group) -> Match:
    """The match, with only those keys of the checkpoint as unexpected that no rank's target has a place for.

    Ranks of another world may well share the keys among them, as the stages of a pipeline do. All come to the
    same answer, so that an error is raised on all of them.
    """
    told = group.gather_all(msgspec.msgpack.encode(match.unexpected), what="comparing the ranks' targets")
    everywhere = set.intersection(*(set(msgspec.msgpack.decode(one, type=list[str])) for one in told))
    unexpected = [name for name in match.unexpected if name in everywhere]
    if unexpected and strict:
        raise mismatch(Differences(unexpected=unexpected), strict, path, None, touched=target.is_touched)
    return replace(match, unexpected=tuple(unexpected))


def _tell(assignment: Assignment, match: Match, group: Group) -> None:
    """Say once what became of the values that the ranks of another world had their own of."""
    if not group.is_coordinator:
        return
    for what, names in (("rank 0's on all ranks", match.from_rank0), ("not restored", match.dropped)):
        if names:
            more = "" if len(names) <= _TOLD else f" and {len(names) - _TOLD} more"
            logger.warning(
                "step %d was saved by %d ranks, not by %d; of values that each had its own of, %s: %s%s",
                assignment.step,
                assignment.world_size,
                group.world_size,
                what,
                ", ".join(names[:_TOLD]),
                more,
            )
