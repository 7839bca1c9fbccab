"""A checkpoint of several ranks in memory, restored by any number of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ckptengine.adapters.restore import Match, RestoreTarget
from ckptengine.adapters.world import World
from ckptengine.format.digest import hexdigest
from ckptengine.format.entries import ShardHeader
from ckptengine.format.index import index_from_headers
from ckptengine.format.per_rank import OWN_DIGITS
from ckptengine.read.held import HeldTensors
from ckptengine.read.per_rank import PerRankPolicy
from tests.adapters.fake import Saved, read_all


class SavedWorld:
    """states: one of each rank."""

    def __init__(self, states: Sequence[Any], **options: Any) -> None:
        count = len(states)
        self.shards = [
            Saved(state, rank=rank, world_size=count, **options) for rank, state in enumerate(states)
        ]
        self.headers = [_with_digests(shard) for shard in self.shards]
        self.opened: set[int] = set()

    def held(self) -> HeldTensors:
        return HeldTensors(index_from_headers(self.headers), lambda: self.headers)

    def header_of(self, rank: int) -> ShardHeader:
        self.opened.add(rank)
        return self.headers[rank]

    def world(self, reader: int, *, own: bool = False) -> World:
        base = self.headers[reader if own else 0]
        return World(base, self.held(), self.header_of, reader=reader, own=own)

    def match(self, target: Any, reader: int = 0, *, own: bool = False, strict: bool = True) -> Match:
        """own: in a world of the same size."""
        made = RestoreTarget(target)
        if not own:
            return made.match_world(self.world(reader), PerRankPolicy(), strict=strict, rank=reader)
        return made.match(
            self.headers[reader],
            strict=strict,
            rank=reader,
            others=self.header_of,
            world=lambda: self.world(reader, own=True),
        )

    def restore(self, target: Any, reader: int = 0, **options: Any) -> int:
        """How many bytes were read."""
        match = self.match(target, reader, **options)
        nbytes = read_all(match, self.shards.__getitem__)
        match.apply()
        return nbytes


def _with_digests(shard: Saved) -> ShardHeader:
    digests = [
        hexdigest(shard.data[entry.start : entry.stop])[:OWN_DIGITS] for entry in shard.header.own_entries
    ]
    return replace(shard.header, own="".join(digests).encode())
