"""Which blocks do several ranks need, and which of them reads each? Pure: numbers only.

Ranks that need the same blocks form a cell. In it every such block is read by one of the members, and all
members know by whom and when: they come to the same schedule from the same ranges. A block is read by the
member that has read the least so far, so the members take turns: if one of them had a whole shard to read,
the others would wait for its last block before they came to the first one of theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import msgspec

Range: TypeAlias = tuple[int, int, int]
"""A shard's rank, the first block, and the one after the last."""

Block: TypeAlias = tuple[int, int]
"""A shard's rank and a block's number."""

MAX_RANGES = 1024
"""That one rank tells of; what else it needs it reads by itself."""

MAX_MEMBERS = 32
"""Of a cell. More would not read much less, and each has a connection to each other."""


class Cell(msgspec.Struct, frozen=True, array_like=True):
    """Ranks that exchange blocks. needs: all that any of them needs, each once, as it often is the same for
    all; kinds: which of these each member does. local: all are processes of one host."""

    members: tuple[int, ...]
    needs: tuple[tuple[Range, ...], ...]
    kinds: tuple[int, ...]
    local: bool

    @property
    def ranges(self) -> tuple[tuple[Range, ...], ...]:
        """What each member needs, in the order of the members."""
        return tuple(self.needs[kind] for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class Turn:
    """One block that goes round. members: positions in the cell, of all who need it. reader: which of them
    reads it. number: how many blocks that one has read before; sequence: how many went round before."""

    block: Block
    members: tuple[int, ...]
    reader: int
    number: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """All turns of a cell, in the order in which each member takes part."""

    turns: Mapping[Block, Turn] = field(default_factory=dict)

    def of(self, member: int) -> list[Turn]:
        """Those a member takes part in, in order."""
        return [turn for turn in self.turns.values() if member in turn.members]

    @property
    def spared(self) -> int:
        """How many blocks are not read, that would be if all members read what they need."""
        return sum(len(turn.members) - 1 for turn in self.turns.values())


def joined(blocks: Iterable[Range]) -> tuple[Range, ...]:
    """Ranges in order, those that touch or overlap as one; of too many, the longest."""
    made: list[list[int]] = []
    for shard, first, stop in sorted(blocks):
        if first >= stop:
            continue
        if made and made[-1][0] == shard and first <= made[-1][2]:
            made[-1][2] = max(made[-1][2], stop)
        else:
            made.append([shard, first, stop])
    if len(made) > MAX_RANGES:
        made = sorted(sorted(made, key=lambda one: one[1] - one[2])[:MAX_RANGES])
    return tuple((shard, first, stop) for shard, first, stop in made)


def cells_of(ranges: Sequence[Sequence[Range]], hosts: Sequence[bytes]) -> list[Cell]:
    """The cells, given what each rank needs and on which host it is. None if nobody shares anything. Ranks
    with the same needs are the quicker to tell if they have the same object for them.

    Ranks of one host exchange through its memory, which costs next to nothing; so where a host has several
    that share, these form a cell, and other hosts' ranks read the same once more. Only ranks that share with
    nobody on their own host form cells across hosts.
    """
    cells = []
    for ranks in _sharing(ranges):
        at: dict[bytes, list[int]] = defaultdict(list)
        for rank in ranks:
            at[hosts[rank]].append(rank)
        alone = [together[0] for together in at.values() if len(together) == 1]
        groups = [(together, True) for together in at.values() if len(together) > 1]
        for group, local in (*groups, (sorted(alone), False)):
            for start in range(0, len(group), MAX_MEMBERS):
                members = tuple(group[start : start + MAX_MEMBERS])
                if len(members) > 1:
                    cells.append(_cell(members, [ranges[rank] for rank in members], local))
    return cells


def _cell(members: tuple[int, ...], ranges: Sequence[Sequence[Range]], local: bool) -> Cell:
    kinds: dict[int, int] = {}
    for mine in ranges:
        kinds.setdefault(id(mine), len(kinds))
    needs = {id(mine): tuple(mine) for mine in ranges}
    return Cell(members, tuple(needs[one] for one in kinds), tuple(kinds[id(mine)] for mine in ranges), local)


def _sharing(ranges: Sequence[Sequence[Range]]) -> list[list[int]]:
    """Ranks that need blocks of which others need some, in groups of which none shares with another."""
    root = list(range(len(ranges)))

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = root[root[rank]]
            rank = root[rank]
        return rank

    shard, stop, holder = -1, 0, 0  # of the range that reaches farthest so far
    first_with: dict[int, int] = {}
    for rank, mine in enumerate(ranges):
        if mine:
            root[rank] = first_with.setdefault(id(mine), rank)
    ordered = sorted((*one, rank) for rank in first_with.values() for one in ranges[rank])
    for where, first, end, rank in ordered:
        if where == shard and first < stop:
            root[find(rank)] = find(holder)
        if where != shard or end > stop:
            shard, stop, holder = where, end, rank
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in range(len(ranges)):
        groups[find(rank)].append(rank)
    return [group for group in groups.values() if len(group) > 1]


def schedule(cell: Cell) -> Schedule:
    """Who reads which of the blocks that at least two members need, by shard and block."""
    changes: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for member, mine in enumerate(cell.ranges):
        for shard, first, stop in mine:
            changes[shard][first].append(member)
            changes[shard][stop].append(~member)
    turns: dict[Block, Turn] = {}
    read = [0] * len(cell.members)
    for shard in sorted(changes):
        needing: set[int] = set()
        at = changes[shard]
        for first, stop in pairwise(sorted(at)):
            for member in at[first]:
                needing ^= {member if member >= 0 else ~member}
            if len(needing) < 2:
                continue
            members = tuple(sorted(needing))
            for block in range(first, stop):
                reader = min(members, key=read.__getitem__)
                turns[shard, block] = Turn((shard, block), members, reader, read[reader], len(turns))
                read[reader] += 1
    return Schedule(turns)
