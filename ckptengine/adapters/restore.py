"""How does a checkpoint get into a state that is already there?

`RestoreTarget(state)`, then for each candidate checkpoint `match`, read the destinations, `apply`. Until the
read begins the target is untouched, and everything that does not fit has been reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptengine.adapters import objects
from ckptengine.adapters.collector import gc_paused
from ckptengine.adapters.delivery import Delivery, Priority
from ckptengine.adapters.differences import mismatch
from ckptengine.adapters.gates import Gate
from ckptengine.adapters.leaves import Leaf, leaves_of
from ckptengine.adapters.matching import Matcher
from ckptengine.adapters.matching_values import Large
from ckptengine.adapters.origin import Origin
from ckptengine.adapters.parcels import Memory
from ckptengine.adapters.placing import Placement, Plan, plan
from ckptengine.adapters.rounds import Round
from ckptengine.adapters.walk import KEEP, Outcome
from ckptengine.adapters.world import World
from ckptengine.errors import CorruptCheckpointError, UnsupportedFormatError, UnsupportedStateError
from ckptengine.format.entries import ShardHeader
from ckptengine.read.partial import ALL, Partial
from ckptengine.read.per_rank import PerRankChoices, PerRankPolicy


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """How a checkpoint that fits the target is read into it: all `rounds`, each with its `finish`, then
    `apply`.

    missing, unexpected: keys of the target only and of the checkpoint only, left alone with `strict=False`.
    from_rank0, dropped: values that each rank had its own of, as `PerRankChoices` has decided.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    from_rank0: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    _plan: Plan = field(default_factory=Plan)
    _actions: list[Callable[[], object]] = field(default_factory=list)
    _placements: Sequence[Placement] = ()
    _large: dict[int, Large] = field(default_factory=dict)

    def delivery(self, gates: Iterable[Gate], soon: Iterable[Memory], priority: Priority) -> Delivery:
        """For a read that goes on while training begins, instead of `rounds` and `apply`."""
        return Delivery(self._plan, self._placements, self._large, self._actions, gates, soon, priority)

    def rounds(self) -> Iterator[Round]:
        """What is to be read, of this rank's own shard and of those in which others store replicas for it.

        May raise `StateMismatchError` after the last: see `Plan.rounds`.
        """
        return self._plan.rounds()

    def extents(self) -> Iterator[tuple[int, int, int]]:
        """The bytes that all rounds read; see `Plan.extents`."""
        return self._plan.extents()

    @property
    def filled(self) -> list[str]:
        """The names of the tensors and large values that are read."""
        return [*(one.leaf.name for one in self._placements), *(one.name for one in self._large.values())]

    @property
    def one_round(self) -> bool:
        return self._plan.one_round

    @property
    def shards(self) -> set[int]:
        """The ranks whose shards are read."""
        return self._plan.shards

    def apply(self) -> None:
        """After the last round: put the values where they belong, load the objects."""
        self._plan.finish()
        for action in self._actions:
            action()


class RestoreTarget:
    """A state to be filled, with the tensors, keys and objects of the one that was saved."""

    def __init__(self, state: Any, *, allow_pickle: bool = False, partial: Partial = ALL) -> None:
        """partial: which part of the state is to be filled, and from which names."""
        if not (isinstance(state, dict | list | tuple) or objects.is_stateful(state)):
            raise UnsupportedStateError(
                "a restore target is a dict, list or tuple, or an object with state_dict and "
                f"load_state_dict, not a {type(state).__qualname__}",
                hint='pass {"name": value}',
            )
        self._state = state
        self._allow_pickle = allow_pickle
        self._partial = partial
        # What every read into it so far has left alone; None before the first.
        self._left_alone: tuple[str, ...] | None = None

    @property
    def is_touched(self) -> bool:
        """Has a read into it begun?"""
        return self._left_alone is not None

    def begin(self, match: Match) -> None:
        """A read begins, which may fail and leave the target with any bytes."""
        before = self._left_alone
        self._left_alone = match.missing if before is None else tuple({*before} & {*match.missing})

    def match(
        self,
        header: ShardHeader,
        *,
        strict: bool = True,
        path: str | None = None,
        rank: int | None = None,
        others: Callable[[int], ShardHeader] | None = None,
        world: Callable[[], World] | None = None,
    ) -> Match:
        """Compare the target with a shard's tree and plan the read. May be called again, for another
        checkpoint.

        strict: keys on one side only are an error. path, rank: for the error. others: gives the header of
        another rank's shard, where replicas are stored; called at most once for each rank that is needed.
        world: gives what all ranks have saved; asked only if the shard alone is not what the target is made
        of. Raises `StateMismatchError` with all differences.
        """
        origin = Origin(header.step, path, rank)
        with gc_paused():
            matcher = Matcher(
                [*leaves_of(header), *_replicas(header, others, path)],
                allow_pickle=self._allow_pickle,
                partial=self._partial,
                origin=origin,
            )
            outcome = matcher.match(self._state, header.tree)
            found = matcher.differences
            if world is not None and (found.mismatched or found.missing):
                matcher, outcome = self._match_world(world(), PerRankPolicy(), origin)
                # What only other ranks had is no rank's duty to take.
                matcher.differences.unexpected = found.unexpected
            return self._planned(matcher, outcome, strict, strict, origin)

    def match_world(
        self,
        world: World,
        per_rank: PerRankPolicy,
        *,
        strict: bool = True,
        path: str | None = None,
        rank: int | None = None,
    ) -> Match:
        """The same for what another number of ranks has saved. per_rank: what becomes of the values that each
        of these had its own of. Keys that only the checkpoint has are no error here: other ranks may have a
        place for them."""
        with gc_paused():
            origin = Origin(world.step, path, rank)
            matcher, outcome = self._match_world(world, per_rank, origin)
            return self._planned(matcher, outcome, strict, False, origin)

    def _match_world(self, world: World, policy: PerRankPolicy, origin: Origin) -> tuple[Matcher, Outcome]:
        asked = PerRankChoices(policy, world.per_rank)
        matcher = Matcher(
            world.leaves,
            allow_pickle=self._allow_pickle,
            world=world,
            per_rank=asked,
            partial=self._partial,
            origin=origin,
        )
        return matcher, matcher.match(self._state, world.tree)

    def _planned(
        self,
        matcher: Matcher,
        outcome: Outcome,
        strict: bool,
        strict_unexpected: bool,
        origin: Origin,
    ) -> Match:
        found = matcher.differences
        if self._left_alone is not None and not strict:
            # Left alone by this checkpoint, they would keep what a damaged one has put there.
            found.mismatched += [
                f"{name}: only in the newer step, which is damaged and has been read into it"
                for name in found.missing
                if not any(name == kept or name.startswith(f"{kept}.") for kept in self._left_alone)
            ]
        if outcome is not KEEP:
            found.mismatched.append(
                "the state is a tuple with values that would have to be replaced; pass it in a list or dict"
            )
        asked = matcher.asked
        if asked is not None:
            asked.finish(self._partial.selects)
            found.refused = [asked.reason(name) for name in asked.refused]
        if (
            found.mismatched
            or found.refused
            or (strict and found.missing)
            or (strict_unexpected and found.unexpected)
        ):
            raise mismatch(found, strict, origin.path, origin.rank, touched=self.is_touched)
        placed = plan(matcher.placements, origin)
        matcher.place_large(placed)
        return Match(
            tuple(found.missing),
            tuple(found.unexpected),
            *(((), ()) if asked is None else (tuple(asked.from_rank0), tuple(asked.dropped))),
            placed,
            matcher.actions,
            matcher.placements,
            matcher.large,
        )


def _replicas(
    header: ShardHeader, others: Callable[[int], ShardHeader] | None, path: str | None
) -> list[Leaf]:
    """The leaves whose bytes are in other shards, in the order of the header's list."""
    if not header.replicas:
        return []
    if others is None:
        raise UnsupportedFormatError(
            "the shard refers to other ranks' shards, which are not at hand", path=path
        )
    shards = {
        rank: {leaf.name: leaf for leaf in leaves_of(others(rank))}
        for rank in sorted({*header.replicas.values()})
    }
    leaves = []
    for name, rank in header.replicas.items():
        leaf = shards[rank].get(name)
        if leaf is None:
            raise CorruptCheckpointError(
                f"{name!r} is said to be in the shard of rank {rank}, but is not",
                path=path,
                rank=header.rank,
                fqn=name,
            )
        leaves.append(leaf)
    return leaves
