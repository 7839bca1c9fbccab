"""How does a target get its bytes bit by bit, what is wanted first before what can wait?

First what calls need that are made at once: values, and objects that are no optimizers. Then what the caller
wants first, then what modules need, in the order of their gates, then the other tensors, and last the state
that is loaded at the end: the optimizers'.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, SupportsFloat, TypeAlias

import numpy as np
import torch

from ckptengine.adapters.gates import Gate
from ckptengine.adapters.loads import Load
from ckptengine.adapters.matching_values import Large
from ckptengine.adapters.parcels import Memory, Parcels
from ckptengine.adapters.placing import Placement, Plan, written_to
from ckptengine.adapters.rounds import BUFFER_NBYTES, Piece, Then
from ckptengine.format.limits import round_up
from ckptengine.read.arrivals import Arrivals
from ckptengine.read.ordered import OrderedRead, Shard, Wanted, in_order
from ckptengine.read.patterns import matches, patterns_of
from ckptengine.read.plan import Destination
from ckptengine.read.reader import ShardReader

EARLY_NBYTES = 64 << 20
"""An object whose state has more bytes of tensors gets it at the end."""

Priority: TypeAlias = "str | Iterable[str] | Callable[[str], float] | None"
"""Patterns of FQNs, the first to be read first; or a number for each FQN, the lowest first. The function is
asked once for each name, in the order of the state."""

Rank: TypeAlias = "tuple[float, float]"

_EARLY, _CHOSEN, _GATED, _OTHERS, _LATE = (float(i) for i in range(5))

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What is read at once, in the order of `reads`; `note` is called with each that has passed its check.

    early: so many, from the first on, hold what is wanted early.
    """

    reads: list[OrderedRead]
    early: int
    note: Callable[[OrderedRead], None]


class Delivery:
    """One restore of a target: read all `batches`, one after the other; `arrivals` tells what is there.

    placements, large: the tensors to be filled, and the large values by leaf, in the order of the state.
    actions: what is to be called, in order; values are put into their holders as if they were all early.
    gates: in the order of the forward. soon: memory that is to be filled early, too.
    """

    def __init__(
        self,
        plan: Plan,
        placements: Sequence[Placement],
        large: dict[int, Large],
        actions: Iterable[Callable[[], object]],
        gates: Iterable[Gate],
        soon: Iterable[Memory],
        priority: Priority,
    ) -> None:
        self._plan = plan
        # An exchange of a tensor's memory must not free what is being written to.
        self._held = [placement.tensor.untyped_storage() for placement in placements if placement.stop]
        self.parcels = Parcels(_named(placements, large))
        self._at_once: list[Callable[[], object]] = []
        self._at_last: list[Callable[[], object]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        """Those that get their state at the end."""
        early: list[Memory] = list(soon)
        late: list[Memory] = []
        late_values: set[int] = set()
        for action in actions:
            if isinstance(action, Load):
                first, at_the_end, values = self._divide(action)
                early += map(_place, first)
                late += map(_place, at_the_end)
                late_values.update(values)
            else:
                self._at_once.append(action)
        early += [_memory(one) for i, one in large.items() if i not in late_values]
        ranks = self._ranks(gates, late, priority)
        self.early = sorted({parcel for memory in early for parcel in self.parcels.within(memory)})
        for parcel in self.early:
            ranks[parcel] = (_EARLY, 0.0)
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        self._order = dict(zip(order, map(float, range(len(order))), strict=True))
        self._early_until = float(len(self.early))
        self.arrivals = Arrivals(self._pieces(), self._whole)
        self._direct: dict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor in plan.direct:
            if tensor.numel():
                self._direct[self.parcels.at(tensor.data_ptr())].append(tensor)
        self._streams: dict[torch.device, Any] = {}
        for piece in plan.pieces:
            device = piece.target.device
            if device.type == "cuda" and device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                # What is still to be done to the tensors, such as their initialisation, comes first.
                self._streams[device].wait_stream(torch.cuda.current_stream(device))

    def _divide(self, load: Load) -> tuple[Sequence[Placement], Sequence[Placement], Sequence[int]]:
        """Have an object loaded at the beginning, or at the end; returns what it needs for either, and the
        large values of the latter."""
        if load.optimizers:
            self.optimizers += load.optimizers
            if load.large or not load.takes_options_early():
                self._at_last.append(load.held_to_groups(load))
                return (), load.placements, load.large
            self._at_once.append(load.load_options)
            self._at_last.append(load.held_to_groups(load.load_state))
            options = load.for_options
            known = set(map(id, options))
            return options, [one for one in load.placements if id(one) not in known], ()
        if load.of_module or load.nbytes <= EARLY_NBYTES:
            self._at_once.append(load)
            return load.placements, (), ()
        self._at_last.append(load)
        return (), load.placements, load.large

    def _ranks(self, gates: Iterable[Gate], late: Iterable[Memory], priority: Priority) -> list[Rank]:
        """Of each parcel; the lower is read before the higher."""
        parcels = self.parcels
        ranks: list[Rank] = [(_OTHERS, float(i)) for i in range(len(parcels))]
        for memory in late:
            for parcel in parcels.within(memory):
                ranks[parcel] = (_LATE, ranks[parcel][1])
        gated = dict.fromkeys(
            parcel for gate in gates for memory in gate.memory for parcel in parcels.within(memory)
        )
        for i, parcel in enumerate(gated):
            ranks[parcel] = (_GATED, float(i))
        if callable(priority):
            numbers = {
                name: _number(priority, name)
                for name, parcel in parcels.of_name.items()
                if parcel is not None
            }
            return [(_CHOSEN, min(numbers[name] for name in names)) for names in parcels.names]
        for parcel, names in enumerate(parcels.names):
            for i, pattern in enumerate(priority or ()):
                if any(matches(pattern, name) for name in names):
                    ranks[parcel] = (_CHOSEN, float(i))
                    break
        return ranks

    def _pieces(self) -> list[int]:
        """Of how many pieces each parcel is made."""
        counts = [0] * len(self.parcels)
        for destinations in self._plan.straight.values():
            for destination in destinations:
                if destination.stop > destination.start:
                    counts[self.parcels.at(destination.address)] += 1
        for piece in self._plan.pieces:
            counts[self._parcel_of(piece)] += 1
        return counts

    def _parcel_of(self, piece: Piece) -> int:
        return self.parcels.at(piece.target.data_ptr())

    def _whole(self, parcel: int) -> None:
        # Before anybody uses the tensors, not after: what is computed from them is not stale.
        written_to(self._direct.get(parcel, ()))

    def apply_early(self) -> None:
        """Once all of `early` are there, on the training thread: values into their holders, objects but
        optimizers get their state, optimizers their options."""
        for action in self._at_once:
            action()

    def apply_late(self) -> None:
        """Once all is there, on the training thread: the rest."""
        for action in self._at_last:
            action()

    def release(self) -> None:
        """After the end: let go of all that is in the state."""
        self._plan = Plan()
        self._held, self._at_once, self._at_last, self.optimizers = [], [], [], []
        self._direct.clear()
        self._streams.clear()

    def batches(self, shards: Mapping[Shard, ShardReader]) -> Iterator[Batch]:
        """All that is to be read. Each batch's reads are to be done before the next one is asked for.

        Raises after the last what `Plan.passes` does.
        """
        for straight, pieces, then in self._plan.passes():
            wanted = sorted(
                (
                    (self._order[self.parcels.at(destination.address)], shard, destination)
                    for shard, destinations in straight.items()
                    for destination in destinations
                    if destination.stop > destination.start
                ),
                key=lambda one: one[0],
            )
            copied = sorted(
                ((self._order[self._parcel_of(piece)], piece) for piece in pieces), key=lambda one: one[0]
            )
            at = 0
            for group in _groups(copied):
                end = bisect_right(wanted, group[-1][0], lo=at, key=lambda one: one[0])
                yield self._batch(shards, wanted[at:end], group, then)
                at = end
            if at < len(wanted):
                yield self._batch(shards, wanted[at:], [], then)

    def _batch(
        self,
        shards: Mapping[Shard, ShardReader],
        straight: Sequence[tuple[float, Shard, Destination]],
        pieces: Sequence[tuple[float, Piece]],
        then: Then,
    ) -> Batch:
        wanted: dict[Shard, list[Wanted]] = defaultdict(list)
        parcel_of: list[int] = []
        for order, shard, destination in straight:
            wanted[shard].append(Wanted(destination, len(parcel_of), order))
            parcel_of.append(self.parcels.at(destination.address))
        first = len(parcel_of)
        buffer = torch.from_numpy(np.empty(sum(_room(piece) for _, piece in pieces), np.uint8))
        parts = []
        at = 0
        for order, piece in pieces:
            part = buffer[at : at + piece.nbytes]
            at += _room(piece)
            into = Destination(piece.start, piece.start + piece.nbytes, part.data_ptr())
            wanted[piece.shard].append(Wanted(into, len(parcel_of), order))
            parcel_of.append(self._parcel_of(piece))
            parts.append((piece, part))

        def arrived(item: int) -> None:
            if item >= first:
                piece, part = parts[item - first]
                self._then(then, piece, part)
            self.arrivals.arrive([parcel_of[item]])

        reads = in_order(shards, wanted)
        blocks = [0] * len(parcel_of)
        for read in reads:
            for item in read.items:
                blocks[item] += 1
        items = Arrivals(blocks, arrived)
        early = {item for item, parcel in enumerate(parcel_of) if self._order[parcel] < self._early_until}
        upto = max((i + 1 for i, read in enumerate(reads) if early.intersection(read.items)), default=0)
        return Batch(reads, upto, lambda read: items.arrive(read.items))

    def _then(self, then: Then, piece: Piece, part: torch.Tensor) -> None:
        stream = self._streams.get(piece.target.device)
        with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else nullcontext():
            then(piece, piece.source(part))
            if stream is not None:
                stream.synchronize()


def priority_of(given: object) -> Priority:
    """Raises `TypeError` if it is none."""
    return given if given is None or callable(given) else patterns_of(given, "priority")


def _number(priority: Callable[[str], float], name: str) -> float:
    given: object = priority(name)
    if not isinstance(given, SupportsFloat):
        raise TypeError(f"priority gave {given!r:.80} for {name!r}, not a number")
    number = float(given)
    if math.isnan(number):
        raise ValueError(f"priority gave {number} for {name!r}, which has no place in an order")
    return number


def _groups(pieces: Sequence[tuple[float, Piece]]) -> Iterator[list[tuple[float, Piece]]]:
    """As many as there is room for at once."""
    group: list[tuple[float, Piece]] = []
    used = 0
    for one in pieces:
        room = _room(one[1])
        if group and used + room > BUFFER_NBYTES:
            yield group
            group, used = [], 0
        group.append(one)
        used += room
    if group:
        yield group


def _room(piece: Piece) -> int:
    return round_up(piece.nbytes, _ALIGNMENT)


def _place(placement: Placement) -> Memory:
    return placement.start, placement.stop


def _memory(one: Large) -> Memory:
    start = one.buffer.ctypes.data
    return start, start + one.buffer.nbytes


def _named(placements: Iterable[Placement], large: dict[int, Large]) -> list[tuple[str, Memory]]:
    """What is filled, in the order of the state."""
    named = [(one.leaf.name, _place(one)) for one in placements]
    for one in reversed(large.values()):
        named.insert(one.after, (one.name, _memory(one)))
    return named
