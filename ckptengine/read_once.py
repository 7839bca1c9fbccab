"""Do the ranks of a restore need the same bytes, and do they read them once, or each for itself?

`Sharing` goes through one step's restore: what each rank needs travels with the word that its plan is made;
where nobody shares, that is all. Else each rank is told its cell, and in that they decide, each from the same
figures: what the page cache has is read by all, as that costs less than to pass it on; through shared memory
blocks go round, as that costs next to nothing; over the network where the rates say that it is faster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import msgspec

from ckptengine.comm.failure import PeerLostError, StoppedByPeerError
from ckptengine.comm.group import Group
from ckptengine.comm.host import host_id
from ckptengine.config import Config
from ckptengine.errors import CheckpointError, CommitTimeoutError
from ckptengine.info import ExchangeInfo
from ckptengine.phases import GB
from ckptengine.read.channel import Channel
from ckptengine.read.exchange import Exchange
from ckptengine.read.local_channel import LocalChannel, slots_for
from ckptengine.read.local_channel import Offer as RingOffer
from ckptengine.read.reader import ShardReader
from ckptengine.read.sharing import Cell, Range, Schedule, Turn, cells_of, joined, schedule

logger = logging.getLogger(__name__)

WORTH_IT = 0.05
"""Of what a cell's ranks need, so much must be spared for `"auto"` to exchange anything."""

WORTH_NBYTES = 64 << 20
"""To be spared, too, where no rate is known: rings and groups take tens of milliseconds to make."""

MEASURE_NBYTES = 512 << 20
"""Of a rank's need. With less, measuring would cost more than it could win: blocks are exchanged."""

_WHAT = "preparing to exchange blocks"

_CACHED, _RING, _JOINED, _RATE = _NAMES = ("cached", "ring", "joined", "rate")


class NetworkChannel(Channel, Protocol):
    """Also measures how fast it is."""

    def rate_gbps(self) -> float:
        """GB a second that this rank receives while all do. Every member calls it."""
        ...


class Network(Protocol):
    """Makes channels between hosts."""

    def held(self, members: tuple[int, ...]) -> str:
        """The name of the channel from which this rank holds connections to the members; "" if it holds
        none."""
        ...

    def open(
        self, members: tuple[int, ...], me: int, turns: list[Turn], nbytes: int, name: str, held: str
    ) -> NetworkChannel:
        """members: ranks, in order. me: this one's position. turns: its own and others'. nbytes: of the
        largest block. name: which no other channel has. held: what all members hold alike; "": nothing.
        Every member calls it."""
        ...


class _Needs(msgspec.Struct, frozen=True, array_like=True):
    """ranges: encoded, as many ranks may need the same, and it is decoded once."""

    host: bytes = b""
    ranges: bytes = b""


class _Offer(msgspec.Struct, frozen=True):
    """What a member tells the others. cached: the page cache has its blocks. nbytes: of the largest. problem:
    why it cannot take part. gone: and that it has failed, and stops. held: see `Network`."""

    cached: bool = False
    nbytes: int = 0
    problem: str = ""
    gone: bool = False
    ring: RingOffer | None = None
    held: str = ""
    storage_gbps: float | None = None
    fabric_gbps: float | None = None


@dataclass(slots=True)
class Rates:
    """What a Checkpointer has learned, in GB a second. storage: of one rank while all read."""

    storage_gbps: float | None = None
    fabric_gbps: float | None = None


@dataclass(slots=True)
class Sharing:
    """One step's restore. All ranks call `own` (which travels, as `summary` and `learn`) and then `resolve`;
    after that, in its own time, `open`.
    """

    group: Group
    config: Config
    rates: Rates
    network: Network | None
    info: ExchangeInfo = field(default_factory=ExchangeInfo)
    _ranges: tuple[Range, ...] = ()
    _cells: list[Cell] = field(default_factory=list)
    _any: bool = False
    _cell: Cell | None = None
    _told: list[tuple[str, int]] = field(default_factory=list)

    def need(self, blocks: Iterable[Range]) -> None:
        """What this rank's plan reads."""
        if self.config.exchange != "off":
            self._ranges = joined(blocks)

    # --- travels with the agreement on the plan ---------------------------------------------------

    def own(self) -> bytes:
        if not self._ranges:
            return b""
        return msgspec.msgpack.encode(_Needs(host_id(), msgspec.msgpack.encode(self._ranges)))

    def summary(self, values: list[bytes]) -> bytes:
        """The coordinator's: whether anybody shares anything."""
        needs = [msgspec.msgpack.decode(value, type=_Needs) if value else _Needs() for value in values]
        ranges: dict[bytes, tuple[Range, ...]] = {b"": ()}
        for one in needs:
            if one.ranges not in ranges:
                ranges[one.ranges] = msgspec.msgpack.decode(one.ranges, type=tuple[Range, ...])
        self._cells = cells_of([ranges[one.ranges] for one in needs], [one.host for one in needs])
        return b"1" if self._cells else b""

    def learn(self, answer: bytes) -> None:
        self._any = bool(answer)

    def resolve(self) -> None:
        """Each rank hears of its cell, if there are any; every rank calls it."""
        if self.config.exchange == "off":
            self.info = ExchangeInfo(why='Config(exchange="off")')
        if not self._any:
            return
        values = None
        if self.group.is_coordinator:
            values = [b""] * self.group.world_size
            for cell in self._cells:
                for rank in cell.members:
                    values[rank] = msgspec.msgpack.encode(cell)
        value = self.group.scatter(values, what="learning who needs the same blocks")
        self._cell = msgspec.msgpack.decode(value, type=Cell) if value else None

    # --- in the cell ------------------------------------------------------------------------------

    @property
    def has_cell(self) -> bool:
        return self._cell is not None

    def open(self, readers: Callable[[], Mapping[int, ShardReader]], *, retain: bool) -> Exchange | None:
        """This rank's part in the exchange, None if each reads for itself; `info` says why.

        readers: opens the shards that the rank reads. retain: see `Exchange`. Within `telling`. Raises what
        `readers` and the measuring read raise, `StoppedByPeerError` where another member has failed, and
        `PeerLostError` with the member that does not come.
        """
        cell = self._cell
        assert cell is not None
        shards = readers()
        turns = schedule(cell)
        me = cell.members.index(self.group.rank)
        mine = turns.of(me)
        nbytes = max((shards[turn.block[0]].block_nbytes(turn.block[1]) for turn in mine), default=0)
        offers = self._tell(cell, _CACHED, self._first_offer(cell, shards, turns, mine, nbytes))
        against, why = self._against(cell, turns, offers)
        if against:
            self.info = ExchangeInfo(why=why, ranks=len(cell.members))
            return None
        channel, why = self._connect(cell, me, mine, nbytes, why, offers)
        if channel is None:
            self.info = ExchangeInfo(why=why, ranks=len(cell.members))
            logger.warning("blocks are not exchanged: %s", why)
            return None
        try:
            exchange = Exchange(turns, me, channel, retain=retain)
        except BaseException:
            _leave(channel)
            raise
        self.info = ExchangeInfo(used=True, why=why, channel=channel.name, ranks=len(cell.members))
        return exchange

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around `open` and whatever a member does before it: where it fails, the others of its cell hear of
        that at once, wherever they wait for it."""
        try:
            yield
        except Exception as error:
            cell = self._cell
            if cell is not None and not isinstance(error, StoppedByPeerError):
                told = {name for name, call in self._told if call == self.group.calls}
                gone = _Offer(problem=f"{type(error).__name__}: {error}", gone=True)
                with suppress(CheckpointError):  # they cannot be reached: this error is the better one
                    for name in _NAMES:
                        if name not in told:
                            self._tell(cell, name, gone)
            raise

    def done(self, exchange: Exchange) -> None:
        """After the last round, and before `close`."""
        self.info = replace(
            self.info, received_nbytes=exchange.nbytes_received, sent_nbytes=exchange.nbytes_sent
        )

    def learned(self, read_nbytes: int, seconds: float) -> None:
        """So much has come from the storage, and not from the page cache: at least what it gives."""
        if read_nbytes >= WORTH_NBYTES and seconds > 0:
            seen = read_nbytes / seconds / GB
            self.rates.storage_gbps = max(seen, self.rates.storage_gbps or 0.0)

    def forget(self) -> None:
        """After the next call of all ranks: nobody asks any more for what this one told."""
        for name, call in self._told:
            self.group.forget_among(name, call)
        self._told.clear()

    def _tell(self, cell: Cell, name: str, offer: _Offer) -> list[_Offer]:
        self._told.append((name, self.group.calls))
        # Who has failed need not hear of the others.
        members = () if offer.gone else cell.members
        try:
            told = self.group.among(members, msgspec.msgpack.encode(offer), name, what=_WHAT)
        except CommitTimeoutError as error:
            # All ranks will wait for it no longer than this.
            raise PeerLostError(error.message, rank=error.rank) from error
        offers = [msgspec.msgpack.decode(one, type=_Offer) for one in told]
        for rank, other in zip(cell.members, offers, strict=False):
            if other.gone:
                raise StoppedByPeerError(f"rank {rank} has failed: {other.problem}", rank=rank)
        return offers

    def _first_offer(
        self,
        cell: Cell,
        shards: Mapping[int, ShardReader],
        turns: Schedule,
        mine: list[Turn],
        nbytes: int,
    ) -> _Offer:
        if mine and not slots_for(nbytes, len(mine)):
            return _Offer(problem=f"blocks of {nbytes} bytes are too large to hold several in memory")
        if not cell.local and self.network is None:
            return _Offer(problem="there is no process group")
        by_shard: dict[int, list[int]] = {}
        for shard, block in (turn.block for turn in mine):
            by_shard.setdefault(shard, []).append(block)
        cached = all(shards[shard].are_cached(blocks) for shard, blocks in by_shard.items())
        storage = self.config.storage_gbps or self.rates.storage_gbps
        large = len(mine) * nbytes > MEASURE_NBYTES
        if not cell.local and not cached and storage is None and large and self.config.exchange == "auto":
            first = next((turn.block for turn in mine if cell.members[turn.reader] == self.group.rank), None)
            if first is not None:
                began = time.perf_counter()
                shards[first[0]].load_alone(first[1])
                # One block at a time is slower than several: a lower bound, which speaks for the exchange.
                storage = nbytes / GB / max(time.perf_counter() - began, 1e-9)
        fabric = self.config.fabric_gbps or self.rates.fabric_gbps
        held = "" if cell.local or self.network is None else self.network.held(cell.members)
        return _Offer(cached=cached, nbytes=nbytes, storage_gbps=storage, fabric_gbps=fabric, held=held)

    def _against(self, cell: Cell, turns: Schedule, offers: list[_Offer]) -> tuple[bool, str]:
        """Whether each member reads for itself, and why, or why not. The same on all members."""
        for rank, offer in zip(cell.members, offers, strict=True):
            if offer.problem:
                return True, f"rank {rank} cannot: {offer.problem}"
        if self.config.exchange == "on":
            return False, 'Config(exchange="on")'
        needed = sum(stop - first for mine in cell.ranges for _, first, stop in mine)
        if turns.spared < WORTH_IT * needed:
            return True, f"only {turns.spared} of {needed} blocks need not be read"
        if all(offer.cached for offer in offers):
            return True, "the page cache has the blocks"
        spared = turns.spared * max(offer.nbytes for offer in offers)
        if spared < WORTH_NBYTES and (cell.local or not any(offer.storage_gbps for offer in offers)):
            return True, f"only {spared} bytes need not be read"
        return False, f"{len(cell.members)} ranks need the same blocks; {turns.spared} of {needed} are spared"

    def _connect(
        self, cell: Cell, me: int, mine: list[Turn], nbytes: int, why: str, offers: list[_Offer]
    ) -> tuple[Channel | None, str]:
        channel: LocalChannel | NetworkChannel | None
        if cell.local:
            channel, why_not = self._local(cell, me, mine, nbytes)
        else:
            held = {offer.held for offer in offers}
            channel, why_not = self._over_network(
                cell, me, mine, nbytes, held.pop() if len(held) == 1 else ""
            )
        if channel is None or isinstance(channel, LocalChannel):
            return channel, why_not or why
        storage = [offer.storage_gbps for offer in offers if offer.storage_gbps is not None]
        if self.config.exchange == "on" or not storage:
            return channel, why
        try:
            fabric = min((one.fabric_gbps for one in offers if one.fabric_gbps is not None), default=None)
            if fabric is None:
                self.rates.fabric_gbps = channel.rate_gbps()
                told = self._tell(cell, _RATE, _Offer(fabric_gbps=self.rates.fabric_gbps))
                fabric = min(offer.fabric_gbps or 0.0 for offer in told)
        except BaseException:
            _leave(channel)
            raise
        largest = max(offer.nbytes for offer in offers)
        direct_s, exchange_s = _seconds(cell, largest, min(storage), fabric)
        told_by = f"{min(storage):.2f} GB/s of storage, {fabric:.2f} of fabric"
        if exchange_s < direct_s:
            return channel, f"{why}: {exchange_s:.2g} s instead of {direct_s:.2g}, at {told_by}"
        channel.close()
        return None, f"reading takes {direct_s:.2g} s, exchanging {exchange_s:.2g}, at {told_by}"

    def _local(self, cell: Cell, me: int, mine: list[Turn], nbytes: int) -> tuple[LocalChannel | None, str]:
        """A channel, or why there is none on some member, and so on none."""
        with ExitStack() as held:
            channel = None
            try:
                channel = LocalChannel(cell.members, me, mine, nbytes, self.config.restore_timeout_s)
                held.push(partial(_closed, channel))
                offer = _Offer(ring=channel.offer())
            except Exception as error:
                offer = _Offer(problem=_said(error))
            rings = self._tell(cell, _RING, offer)
            problem = next((one.problem for one in rings if one.problem), "")
            if channel is not None and not problem:
                try:
                    channel.connect([one.ring for one in rings if one.ring is not None])
                except Exception as error:
                    problem = _said(error)
            problem = self._problem_of_any(cell, problem)
            if not problem:
                held.pop_all()
            return (None if problem else channel), problem

    def _over_network(
        self, cell: Cell, me: int, mine: list[Turn], nbytes: int, held_by_all: str
    ) -> tuple[NetworkChannel | None, str]:
        assert self.network is not None
        with ExitStack() as held:
            channel, problem = None, ""
            try:
                name = f"{self.group.calls}-{cell.members[0]}"
                channel = self.network.open(cell.members, me, mine, nbytes, name, held_by_all)
                held.push(partial(_closed, channel))
            except Exception as error:  # whatever torch raises
                problem = f"no process group for the exchange: {error}"
            problem = self._problem_of_any(cell, problem)
            if not problem:
                held.pop_all()
            return (None if problem else channel), problem

    def _problem_of_any(self, cell: Cell, problem: str) -> str:
        told = self._tell(cell, _JOINED, _Offer(problem=problem))
        return next((one.problem for one in told if one.problem), "")


def _closed(channel: Channel, kind: type[BaseException] | None, *_: object) -> None:
    """At the end of a `with`."""
    if kind is None:
        channel.close()
    else:
        _leave(channel)


def _leave(channel: Channel) -> None:
    """The other members may be in theirs already."""
    channel.stop()
    channel.give_up([])
    channel.close()


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _seconds(cell: Cell, nbytes: int, storage_gbps: float, fabric_gbps: float) -> tuple[float, float]:
    """How long the cell takes if each member reads all it needs, and if they exchange.

    storage_gbps is one rank's part of what the storage gives to all; whoever reads less leaves it to others.
    """
    need = max(sum(stop - first for _, first, stop in mine) for mine in cell.ranges) * nbytes / GB
    turns = schedule(cell)
    read = max(
        sum(turn.reader == member for turn in turns.turns.values()) for member in range(len(cell.members))
    )
    received = max(
        sum(member in turn.members and turn.reader != member for turn in turns.turns.values())
        for member in range(len(cell.members))
    )
    return need / storage_gbps, max(read * nbytes / GB / storage_gbps, received * nbytes / GB / fabric_gbps)
