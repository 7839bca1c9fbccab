"""How do all ranks get the newest commit that is whole into their states: resolve → plan → read → apply?

Nothing of the target is touched before every rank has found that the checkpoint fits it. A damaged shard on
any rank sends all ranks to the previous commit together; a mismatch is an error on all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, TypeVar

import msgspec

from ckptengine.adapters.delivery import Priority
from ckptengine.adapters.gates import gates_of, modules_in, touched_by_strangers
from ckptengine.adapters.holders import holders_in
from ckptengine.adapters.restore import Match, RestoreTarget
from ckptengine.candidates import DAMAGE, Candidates, is_damage
from ckptengine.comm.failure import Failure
from ckptengine.comm.group import COORDINATOR, Group
from ckptengine.comm.rollcall import RollCall
from ckptengine.config import Config
from ckptengine.format.names import check_step
from ckptengine.info import ExchangeInfo, FallBack, RestoreInfo
from ckptengine.on_all_ranks import on_all_ranks
from ckptengine.phases import Stopwatch
from ckptengine.read.reader import ReadStats
from ckptengine.read_once import Sharing
from ckptengine.read_together import read_together
from ckptengine.restore_handle import RestoreHandle
from ckptengine.restore_options import RestoreOptions, SameRestoreOptions
from ckptengine.restore_parts import RestoreParts
from ckptengine.step_shards import Assignment
from ckptengine.storage.store import Store
from ckptengine.streaming import Stream

logger = logging.getLogger(__name__)


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
    parts = RestoreParts(options, store, group, config)
    parts.sharing = sharing
    with ExitStack() as held:
        return _first_whole(parts, root, state, step, held, partial(_restore_step, parts))


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
    parts = RestoreParts(options, store, group, config, streaming=True)
    parts.priority = priority if isinstance(priority, tuple) else ()
    parts.exchange = ExchangeInfo(why="a streaming restore has each rank read for itself")
    with ExitStack() as held:
        return _first_whole(
            parts, root, state, step, held, partial(_stream_step, parts, state, priority, held)
        )


_Outcome = TypeVar("_Outcome")


def _first_whole(
    parts: RestoreParts,
    root: str,
    state: Any,
    step: int | None,
    held: ExitStack,
    use: Callable[[Assignment, RestoreTarget], _Outcome],
) -> _Outcome:
    """What `use` makes of the newest commit that it finds whole, or of `step`. held: the steps that are
    tried."""
    group, watch = parts.group, parts.watch

    def look() -> tuple[int | None, RestoreTarget]:
        with watch.measure("plan"):
            number = None if step is None else check_step(step)
            same.patterns = bool(parts.patterns())
            same.options = parts.options.to_compare(number, streaming=parts.streaming)
            return number, RestoreTarget(
                state, allow_pickle=parts.config.allow_pickle, partial=parts.options.partial
            )

    same = SameRestoreOptions()
    number, target = on_all_ranks(group, watch, look, "reading the restore target", tell=same)
    parts.compares_patterns = same.patterns
    candidates = (
        Candidates(root, number, parts.store, group.world_size, held) if group.is_coordinator else None
    )
    while True:
        assignment = _resolve(candidates, group, watch)
        parts.fell_back += [
            FallBack(skipped, reason, COORDINATOR, COORDINATOR) for skipped, reason in assignment.skipped
        ]
        try:
            return use(assignment, target)
        except DAMAGE as error:
            if step is not None or not is_damage(error):
                raise
            parts.fell_back.append(FallBack(assignment.step, str(error), error.rank, error.met_by))
            if candidates is not None:
                candidates.reject(assignment.step, str(error))
            logger.warning(
                "step %d is damaged, falling back to the one before it: %s", assignment.step, error
            )


def _restore_step(parts: RestoreParts, assignment: Assignment, target: RestoreTarget) -> RestoreInfo:
    shards = parts.shards(assignment)
    common = None if parts.sharing is None else parts.sharing()

    def need(match: Match) -> None:
        if common is not None:
            common.need(shards.blocks(match))

    match = parts.plan(assignment, shards, target, need, common)
    if common is not None:
        with parts.watch.measure("agree"):
            common.resolve()
    stats, read_s = ReadStats(), 0.0

    def read() -> None:
        nonlocal stats, read_s
        begun = time.perf_counter()
        with nullcontext() if common is None else common.telling():
            target.begin(match)
        together = None
        if common is not None and common.has_cell:
            together = read_together(
                match, shards, parts.config.io_threads, parts.options.verify, common, parts.watch
            )
        stats = together or shards.read(match, parts.config.io_threads, parts.options.verify)
        read_s = time.perf_counter() - begun

    parts.read(read, assignment.step)
    if common is not None:
        common.forget()
        common.learned(stats.nbytes_read - stats.from_cache, read_s)
        parts.exchange = common.info
    return parts.finish(assignment, match, stats, read_s, match.apply)


def _stream_step(
    parts: RestoreParts,
    state: Any,
    priority: Priority,
    held: ExitStack,
    assignment: Assignment,
    target: RestoreTarget,
) -> RestoreHandle:
    """As `_restore_step`, up to where training can begin."""
    shards = parts.shards(assignment)
    group, config = parts.group, parts.config
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
                    shards.readers(match, parts.options.verify, opened),
                    RollCall(group.rank, group.world_size, group.transport, group.key("stream")),
                    group.rank,
                    group.neighbours,
                    threads=config.io_threads,
                    timeout_s=config.restore_timeout_s,
                )
            )

        match = parts.plan(assignment, shards, target, prepare)
        (stream,) = streams

        def read_early() -> None:
            target.begin(match)
            stream.read_early()

        parts.read(read_early, assignment.step)
        parts.apply(stream.apply_early)
        opened.push(held.pop_all())
        release = opened.pop_all()

    def agree(work: Callable[[], object]) -> RestoreInfo:
        parts.watch.add_all(stream.stats.phases)
        with group.told_if_left("the restore"):
            return parts.finish(assignment, match, stream.stats, stream.read_seconds, work)

    stream.start(agree, release)
    return RestoreHandle(stream)


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
