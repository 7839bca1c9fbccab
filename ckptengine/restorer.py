"""A restore, as one rank goes through it: resolve → plan → read → apply, with all ranks agreeing after each.

A rank whose target is made of what is in its own shard reads that and no other. Any other plans over all
ranks' shards, by itself: what it has to say to the others is the same. Only where another number of ranks
saved, as all of them know from the start, they tell each other which keys they had no place for.

Nothing of the target is touched before every rank has found that the checkpoint fits it. A damaged shard on
any rank sends all ranks to the previous commit together; a mismatch is an error on all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from ckptengine.adapters.collector import gc_paused
from ckptengine.adapters.delivery import Priority
from ckptengine.adapters.differences import Differences, mismatch
from ckptengine.adapters.gates import gates_of, modules_in, touched_by_strangers
from ckptengine.adapters.holders import holders_in
from ckptengine.adapters.restore import Match, RestoreTarget
from ckptengine.adapters.world import World
from ckptengine.candidates import DAMAGE, Candidates, is_damage
from ckptengine.comm.failure import Failure, StoppedByPeerError
from ckptengine.comm.group import COORDINATOR, Group
from ckptengine.comm.rollcall import RollCall
from ckptengine.config import Config
from ckptengine.errors import CheckpointError
from ckptengine.format.names import check_step
from ckptengine.info import ExchangeInfo, FallBack, RestoreInfo
from ckptengine.phases import Ranks, Stopwatch
from ckptengine.read.reader import ReadStats
from ckptengine.read_once import Sharing
from ckptengine.read_together import read_together
from ckptengine.restore_handle import RestoreHandle
from ckptengine.restore_options import RestoreOptions, same_restore_options
from ckptengine.step_shards import Assignment, StepShards
from ckptengine.storage.store import Store
from ckptengine.streaming import Stream
from ckptengine.tracing.recorder import span

logger = logging.getLogger(__name__)

_TOLD = 20


def restore(
    root: str,
    state: Any,
    step: int | None,
    options: RestoreOptions,
    store: Store,
    group: Group,
    config: Config,
    *,
    sharing: Callable[[], Sharing] | None = None,
) -> RestoreInfo:
    """Fill `state` from the newest commit that is whole, or from `step`; see `Checkpointer.restore`.

    sharing: begins to find out, for one step, what ranks can read once; None: they do not ask.
    """
    run = _Run(options, store, group, config)
    run.sharing = sharing
    with ExitStack() as held:
        return _first_whole(run, root, state, step, held, partial(_restore_step, run))


def begin_restore(
    root: str,
    state: Any,
    step: int | None,
    options: RestoreOptions,
    store: Store,
    group: Group,
    config: Config,
    *,
    priority: Priority,
) -> RestoreHandle:
    """As `restore`, up to where training can begin."""
    run = _Run(options, store, group, config, streaming=True)
    run.exchange = ExchangeInfo(why="a streaming restore has each rank read for itself")
    with ExitStack() as held:
        return _first_whole(run, root, state, step, held, partial(_stream_step, run, state, priority, held))


_Outcome = TypeVar("_Outcome")


def _first_whole(
    run: _Run,
    root: str,
    state: Any,
    step: int | None,
    held: ExitStack,
    use: Callable[[Assignment, RestoreTarget], _Outcome],
) -> _Outcome:
    """What `use` makes of the newest commit that it finds whole, or of `step`. held: the steps that are
    tried."""
    group, watch = run.group, run.watch

    def look() -> tuple[int | None, RestoreTarget]:
        with watch.measure("plan"):
            number = None if step is None else check_step(step)
            same.options = run.options.to_compare(number, streaming=run.streaming)
            return number, RestoreTarget(
                state, allow_pickle=run.config.allow_pickle, partial=run.options.partial
            )

    same = same_restore_options()
    number, target = _on_all_ranks(group, watch, look, "reading the restore target", tell=same)
    candidates = Candidates(root, number, run.store, group.world_size, held) if group.is_coordinator else None
    while True:
        assignment = _resolve(candidates, group, watch)
        run.fell_back += [
            FallBack(skipped, reason, COORDINATOR, COORDINATOR) for skipped, reason in assignment.skipped
        ]
        try:
            return use(assignment, target)
        except DAMAGE as error:
            if step is not None or not is_damage(error):
                raise
            run.fell_back.append(FallBack(assignment.step, str(error), error.rank, error.met_by))
            if candidates is not None:
                candidates.reject(assignment.step, str(error))
            logger.warning(
                "step %d is damaged, falling back to the one before it: %s", assignment.step, error
            )


class _Run:
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
        match: Match = _on_all_ranks(self.group, self.watch, plan, what, tell=tell)
        if not own:
            with self.watch.measure("agree"):
                match = _without_place(match, target, options.strict, assignment.step_path, self.group)
        return match

    def read(self, work: Callable[[], object], step: int) -> None:
        def read() -> None:
            with span("read the shards", "whole", {"step": step}):
                work()

        timeout_s = self.config.restore_timeout_s
        _on_all_ranks(self.group, self.watch, read, "reading the shards", timeout_s=timeout_s)

    def apply(self, work: Callable[[], object], ranks: Ranks | None = None) -> None:
        def apply() -> None:
            with gc_paused(), self.watch.measure("apply"):
                work()

        _on_all_ranks(self.group, self.watch, apply, "putting the restored values in place", tell=ranks)

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


def _restore_step(run: _Run, assignment: Assignment, target: RestoreTarget) -> RestoreInfo:
    shards = run.shards(assignment)
    common = None if run.sharing is None else run.sharing()

    def need(match: Match) -> None:
        if common is not None:
            common.need(shards.blocks(match))

    match = run.plan(assignment, shards, target, need, common)
    if common is not None:
        with run.watch.measure("agree"):
            common.resolve()
    stats, read_s = ReadStats(), 0.0

    def read() -> None:
        nonlocal stats, read_s
        begun = time.perf_counter()
        target.begin(match)
        together = None
        if common is not None and common.has_cell:
            together = read_together(
                match, shards, run.config.io_threads, run.options.verify, common, run.watch
            )
        stats = together or shards.read(match, run.config.io_threads, run.options.verify)
        read_s = time.perf_counter() - begun

    run.read(read, assignment.step)
    if common is not None:
        common.forget()
        common.learned(stats.nbytes_read - stats.from_cache, read_s)
        run.exchange = common.info
    return run.finish(assignment, match, stats, read_s, match.apply)


def _stream_step(
    run: _Run,
    state: Any,
    priority: Priority,
    held: ExitStack,
    assignment: Assignment,
    target: RestoreTarget,
) -> RestoreHandle:
    """As `_restore_step`, up to where training can begin."""
    shards = run.shards(assignment)
    group, config = run.group, run.config
    streams: list[Stream] = []
    with ExitStack() as opened:

        def prepare(match: Match) -> None:
            modules = modules_in(state)
            gates = gates_of(modules)
            streams.append(
                Stream(
                    assignment.step,
                    assignment.world_size,
                    match.delivery(gates, touched_by_strangers(modules), priority),
                    gates,
                    holders_in(modules),
                    shards.readers(match, run.options.verify, opened),
                    RollCall(group.rank, group.world_size, group.transport, group.key("stream")),
                    group.rank,
                    threads=config.io_threads,
                    timeout_s=config.restore_timeout_s,
                )
            )

        match = run.plan(assignment, shards, target, prepare)
        (stream,) = streams

        def read_early() -> None:
            target.begin(match)
            stream.read_early()

        run.read(read_early, assignment.step)
        run.apply(stream.apply_early)
        opened.push(held.pop_all())
        release = opened.pop_all()

    def agree(work: Callable[[], object]) -> RestoreInfo:
        run.watch.add_all(stream.stats.phases)
        with group.told_if_left("the restore"):
            return run.finish(assignment, match, stream.stats, stream.read_seconds, work)

    stream.start(agree, release)
    return RestoreHandle(stream)


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


class Told(Protocol):
    """What travels with the word that a rank has done its part: each rank's `own`, and to all what the
    coordinator makes of them."""

    def own(self) -> bytes: ...

    def summary(self, values: list[bytes]) -> bytes: ...

    def learn(self, answer: bytes) -> None: ...


def _on_all_ranks(
    group: Group,
    watch: Stopwatch,
    work: Callable[[], Any],
    what: str,
    timeout_s: float | None = None,
    tell: Told | None = None,
) -> Any:
    """Do `work` on every rank; return its result only if it succeeded on all, else raise the failing rank's
    error on all. tell: to exchange with the others on the way."""
    result: Any = None
    failure: Failure | None = None
    own: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure, own = Failure.of(error, group.rank), error
    try:
        with watch.measure("agree"):
            if tell is None:
                group.agree(failure, what=what, timeout_s=timeout_s)
            else:
                tell.learn(group.summarise(tell.own(), tell.summary, failure, what=what, timeout_s=timeout_s))
    except CheckpointError as error:
        # The rank itself raises what it caught, with its traceback, unless another rank's failure came first.
        told = (*DAMAGE, StoppedByPeerError)
        if own is not None and error.rank == group.rank and not isinstance(own, told):
            raise own from own.__cause__
        raise error from own
    return result


def _resolve(candidates: Candidates | None, group: Group, watch: Stopwatch) -> Assignment:
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
    return msgspec.msgpack.decode(data, type=Assignment)
