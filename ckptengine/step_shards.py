"""Which shards does one rank read of a step, and how? Its own, and whichever it needs of other ranks'."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import msgspec

from ckptengine.adapters.restore import Match
from ckptengine.adapters.rounds import Destinations
from ckptengine.catalog.catalog import read_manifest
from ckptengine.errors import CorruptCheckpointError
from ckptengine.format.manifest import Manifest, ShardRef
from ckptengine.format.shard import ShardHeader
from ckptengine.phases import Phase, Stopwatch
from ckptengine.read.held import HeldTensors, held_tensors
from ckptengine.read.reader import ReadStats, ShardReader
from ckptengine.read.several import ShardPart, read_shards
from ckptengine.read.shards import open_header, shard_path
from ckptengine.storage.store import Store
from ckptengine.storage.threads import in_threads


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs to restore one step: its own shard, and nothing about the others'.

    world_size: how many ranks saved it. If as many restore it, the shard is the rank's own, else rank 0's.
    """

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


class StepShards:
    """A step as one rank of a restore sees it. Only who needs others' shards reads the whole manifest.

    threads: for the headers of other ranks.
    """

    def __init__(self, assignment: Assignment, store: Store, threads: int, watch: Stopwatch) -> None:
        self._assignment = assignment
        self._store = store
        self._threads = threads
        self._watch = watch
        self._own = assignment.manifest()
        (self._ref,) = self._own.shards
        self._others: dict[int, ShardHeader] = {}

    @property
    def own_path(self) -> str:
        return shard_path(self._assignment.step_path, self._ref)

    @cached_property
    def own(self) -> ShardHeader:
        with self._watch.measure("metadata"):
            header = open_header(self._store, self._assignment.step_path, self._ref, self._own)
        self._watch.add("metadata", Phase(nbytes=self._ref.header_nbytes))
        return header

    @cached_property
    def _manifest(self) -> Manifest:
        step_path = self._assignment.step_path
        with self._watch.measure("metadata"):
            manifest = read_manifest(self._store, step_path)
        if manifest.fingerprint != self._assignment.fingerprint:
            raise CorruptCheckpointError(
                "the step was committed anew while it was being restored",
                path=step_path,
                expected=self._assignment.fingerprint,
                actual=manifest.fingerprint,
            )
        return manifest

    def header_of(self, rank: int) -> ShardHeader:
        """The header of any rank's shard."""
        self.open_headers([rank])
        return self.own if rank == self._ref.rank else self._others[rank]

    def open_headers(self, ranks: Iterable[int]) -> None:
        """Side by side, so that `header_of` has them."""
        missing = [rank for rank in sorted(ranks) if rank != self._ref.rank and rank not in self._others]
        if not missing:
            return
        manifest = self._manifest

        def read(rank: int, _: None) -> None:
            ref = manifest.shards[rank]
            self._others[rank] = open_header(self._store, self._assignment.step_path, ref, manifest)

        with self._watch.measure("metadata"):
            in_threads(missing, self._threads, lambda: None, read)
        nbytes = sum(manifest.shards[rank].header_nbytes for rank in missing)
        self._watch.add("metadata", Phase(nbytes=nbytes))

    def held(self) -> HeldTensors:
        """What all ranks have saved."""
        manifest = self._manifest
        with self._watch.measure("metadata"):
            return held_tensors(self._store, self._assignment.step_path, manifest, self._all_headers)

    def _all_headers(self) -> list[ShardHeader]:
        ranks = range(self._manifest.world_size)
        self.open_headers(ranks)
        return [self.header_of(rank) for rank in ranks]

    def blocks(self, match: Match) -> Iterator[tuple[int, int, int]]:
        """What a match reads, as ranges of blocks by the rank whose shard they are in."""
        size = self._assignment.block_nbytes
        for rank, start, stop in match.extents():
            if start < stop:
                yield rank, start // size, (stop - 1) // size + 1

    def readers(self, match: Match, verify: bool, held: ExitStack) -> dict[int, ShardReader]:
        """The shards that a match needs, by rank, open until `held` is closed."""
        return {
            rank: held.enter_context(ShardReader(self._store, *self._opened(rank), verify=verify))
            for rank in match.shards
        }

    def _opened(self, rank: int) -> tuple[str, ShardHeader]:
        ref = self._ref if rank == self._ref.rank else self._manifest.shards[rank]
        return shard_path(self._assignment.step_path, ref), self.header_of(rank)

    def _parts(self, wanted: Destinations) -> list[ShardPart]:
        return [ShardPart(*self._opened(rank), destinations) for rank, destinations in wanted.items()]

    def read(self, match: Match, threads: int, verify: bool) -> ReadStats:
        """Fill the target of a match."""
        stats = ReadStats()
        watch = self._watch
        rounds = match.rounds()
        while True:
            with watch.measure("plan"):
                one = next(rounds, None)
            if one is None:
                return stats
            read = read_shards(self._store, self._parts(one.destinations), threads=threads, verify=verify)
            watch.add_all(read.phases)
            stats += read
            with watch.measure("scatter"):
                one.finish()
