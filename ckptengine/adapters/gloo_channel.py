"""The channel of ranks on several hosts: a gloo group of their own, beside whatever the training uses.

gloo works wherever torch does, also where the job's group is NCCL alone, and takes nothing of the device. A
block goes from its reader to each other member, who all read as much as each other, so each sends and
receives what a ring would have it. gloo sends nothing before it is asked for, so what is on its way is
bounded by the receivers' buffers.

A wait in gloo has no end of its own but its time limit, and when one runs into that, gloo closes all
connections of the group, here and so for the other members. So nobody waits to the limit. A thread that looks
every half second keeps the time. A member that fails, or sees another fail, says so in the job's store and
then closes all connections by such a limit of a millisecond: that ends all waits everywhere at once, whoever
waits for whom, and the others find in the store why. Nothing that was on its way need be taken.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in its __all__

from ckptengine.comm.failure import PeerLostError, StoppedByPeerError
from ckptengine.comm.transport import Transport
from ckptengine.comm.verdict import Board, Verdict, at_fault, reached_from
from ckptengine.format.limits import PAGE
from ckptengine.phases import GB
from ckptengine.read.channel import StoppedHereError, silent
from ckptengine.read.sharing import Turn
from ckptengine.storage.direct import AlignedBuffer

SLOTS = 4
MAX_NBYTES = 64 << 20

LOOK_S = 0.5
"""So often a member sees whether all must stop, or whether it is asked whom it waits for."""
ANSWER_S = 10.0
"""So long a living member may take to answer that, on a busy machine too."""
CONNECT_S = 60.0
"""For all members to be there when a group is made; each has just said that it comes."""
_NEVER_SENT = (1 << 30) - 1
"""A tag. Those of turns are not negative, and small."""

MEASURED_NBYTES = 4 << 20
MEASURED_TIMES = 4


class GlooNetwork:
    """Makes channels, and the groups they need: one for the same members, until it has failed or `close`.

    The groups are known to nobody but their members: not to `torch.distributed`, whose names and barriers
    they would have to share, nor to ranks that do not need them. store: in which the members find each other.
    """

    def __init__(self, store: Any, transport: Transport, prefix: str, timeout_s: float) -> None:
        self._store = store
        self._transport = transport
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._groups: dict[tuple[int, ...], tuple[str, Any]] = {}

    def held(self, members: tuple[int, ...]) -> str:
        """See `ckptengine.read_once.Network`."""
        return self._groups.get(members, ("", None))[0]

    def open(
        self, members: tuple[int, ...], me: int, turns: list[Turn], nbytes: int, name: str, held: str
    ) -> GlooChannel:
        """See `ckptengine.read_once.Network`."""
        if not held or self.held(members) != held:
            self._groups.pop(members, None)
            group = dist.ProcessGroupGloo(
                PrefixStore(f"{self._prefix}/{name}", self._store),
                me,
                len(members),
                datetime.timedelta(seconds=min(self._timeout_s, CONNECT_S)),
            )
            self._groups[members] = (name, group)

        def on_close(healthy: bool) -> None:
            if not healthy:
                self._groups.pop(members, None)

        board = Board(self._transport, f"{self._prefix}/{name}", members, me)
        return GlooChannel(
            self._groups[members][1], members, me, turns, nbytes, self._timeout_s, board, on_close
        )

    def close(self) -> None:
        self._groups.clear()


class _Message:
    """Room for a block, page-aligned, and all of it as a tensor."""

    def __init__(self, nbytes: int) -> None:
        self._memory = AlignedBuffer(max(nbytes, PAGE))
        self.view = self._memory.view
        self.address = self._memory.address
        self._tensor = torch.frombuffer(self._memory.view, dtype=torch.uint8)

    def of(self, nbytes: int) -> torch.Tensor:
        return self._tensor[:nbytes]


class GlooChannel:
    """`Channel` among the members of a group. on_close: hears whether the group can be used again."""

    name = "gloo"

    def __init__(
        self,
        group: Any,
        members: tuple[int, ...],
        me: int,
        turns: list[Turn],
        nbytes: int,
        timeout_s: float,
        board: Board,
        on_close: Callable[[bool], None],
    ) -> None:
        self._group = group
        self._members = members
        self._me = me
        self._nbytes = nbytes
        self._timeout_s = timeout_s
        # gloo's own limit. The watcher keeps the time, and must have ended a wait long before.
        self._limit = datetime.timedelta(seconds=2 * timeout_s + 10 * ANSWER_S)
        self._board = board
        self._on_close = on_close
        own = sum(turn.reader == me for turn in turns)
        count = max(1, min(SLOTS, own, max(2, MAX_NBYTES // max(nbytes, 1))))
        self._slots = [_Message(nbytes) for _ in range(count)]
        # By number: what is on its way, and with whom.
        self._sent: dict[int, list[tuple[int, Any]]] = {}
        self._published: set[int] = set()
        self._lock = threading.Condition()
        # Of each wait that is going on: for whom, and since when.
        self._waits: dict[object, tuple[int, float]] = {}
        self._verdict: Verdict | None = None
        self._mine = threading.local()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ckptengine-exchange", daemon=True)
        self._watcher.start()

    def slot(self, turn: Turn) -> _Message:
        before = turn.number - len(self._slots)
        if before >= 0:
            with self._lock:
                # By another thread, which may still be reading it.
                self._lock.wait_for(lambda: before in self._published or self._verdict is not None)
            self._wait_sent(before)
        self._check()
        return self._slots[turn.number % len(self._slots)]

    def publish(self, turn: Turn, nbytes: int) -> None:
        message = self._slots[turn.number % len(self._slots)].of(nbytes)
        works: list[tuple[int, Any]] = []
        for member in turn.members:
            if member != self._me:
                self._check()
                with self._waiting(member):
                    works.append((member, self._group.send([message], member, turn.sequence)))
        with self._lock:
            self._sent[turn.number] = works
            self._published.add(turn.number)
            self._lock.notify_all()

    def receive(self, turn: Turn, nbytes: int) -> int:
        self._check()
        message: _Message | None = getattr(self._mine, "message", None)
        if message is None:
            message = self._mine.message = _Message(self._nbytes)
        with self._waiting(turn.reader):
            self._group.recv([message.of(nbytes)], turn.reader, turn.sequence).wait(self._limit)
        return int(message.address)

    def release(self, turn: Turn) -> None:
        pass

    def finish(self) -> None:
        for number in sorted(self._sent):
            self._wait_sent(number)

    def stop(self) -> None:
        if self._verdict is None:
            self._end(Verdict(self._members[self._me], "it has stopped reading"))

    def give_up(self, undone: list[Turn]) -> None:
        self.stop()

    def close(self) -> None:
        self._closed.set()
        self._watcher.join()
        self._sent.clear()
        self._group = None
        self._on_close(self._verdict is None)

    def rate_gbps(self) -> float:
        """Each member sends a little to the next, all at once."""
        count = len(self._members)
        after, before = (self._me + 1) % count, (self._me - 1) % count
        out, into = (torch.zeros(MEASURED_NBYTES, dtype=torch.uint8) for _ in range(2))
        began = 0.0
        for number in range(MEASURED_TIMES + 1):
            if number == 1:  # the first one only sees that all are there
                began = time.perf_counter()
            tag = _NEVER_SENT + 1 + number
            with self._waiting(after):
                sent = self._group.send([out], after, tag)
            with self._waiting(before):
                self._group.recv([into], before, tag).wait(self._limit)
            with self._waiting(after):
                sent.wait(self._limit)
        seconds = time.perf_counter() - began
        return MEASURED_TIMES * MEASURED_NBYTES / GB / max(seconds, 1e-9)

    def _wait_sent(self, number: int) -> None:
        # A wait in gloo takes what has been sent: the second one would have no end.
        for member, work in self._sent.pop(number, ()):
            with self._waiting(member):
                work.wait(self._limit)

    @contextlib.contextmanager
    def _waiting(self, member: int) -> Iterator[None]:
        """Around what waits for a member; what gloo says of it, in our words."""
        wait = object()
        self._waits[wait] = (member, time.monotonic())
        try:
            yield
        except RuntimeError as error:
            # A member that stops closes the connections after it has said why.
            self._check()
            with contextlib.suppress(ConnectionError):
                self._look()
            self._check()
            rank = self._members[member]
            text = f"rank {rank} ended, or was cut off, while blocks were exchanged"
            self._end(Verdict(rank, text, lost=True))
            raise self._error() from error
        finally:
            del self._waits[wait]

    def _check(self) -> None:
        if self._verdict is not None:
            raise self._error()

    def _error(self) -> Exception:
        verdict = self._verdict
        assert verdict is not None
        if verdict.lost:
            return PeerLostError(verdict.text, rank=verdict.rank)
        if verdict.rank == self._members[self._me]:
            return StoppedHereError()
        return StoppedByPeerError(verdict.text, rank=verdict.rank)

    def _end(self, verdict: Verdict) -> None:
        """All members stop, in all their waits."""
        with contextlib.suppress(ConnectionError):
            verdict = self._board.decide(verdict)
        with self._lock:
            if self._verdict is None:
                self._verdict = verdict
            self._lock.notify_all()
        into = torch.empty(1, dtype=torch.uint8)
        for member in range(len(self._members)):
            if member != self._me:
                # Of those that are closed already this says nothing to the others.
                with contextlib.suppress(RuntimeError):
                    self._group.recv([into], member, _NEVER_SENT).wait(datetime.timedelta(milliseconds=1))

    def _look(self) -> None:
        told = self._board.look()
        if isinstance(told, Verdict):
            if self._verdict is None:
                self._end(told)
        elif told:
            self._board.answer({member for member, _ in list(self._waits.values())})

    def _watch(self) -> None:
        while self._verdict is None and not self._closed.wait(LOOK_S):
            late = [member for member, began in list(self._waits.values()) if self._is_over(began)]
            try:
                self._look()
                if late and self._verdict is None:
                    self._settle(late[0])
            except ConnectionError:
                if late:
                    self._end(self._silent(late[0]))

    def _is_over(self, began: float) -> bool:
        return time.monotonic() - began > self._timeout_s

    def _settle(self, member: int) -> None:
        """Find whom this one really waits for, and have all stop."""
        self._board.ask()
        until = time.monotonic() + ANSWER_S
        while not self._closed.wait(LOOK_S / 2):
            self._look()
            if self._verdict is not None or not any(
                self._is_over(began) for _, began in list(self._waits.values())
            ):
                return
            answers = self._board.answers()
            if all(answers[one] is not None for one in reached_from(member, answers)) or (
                time.monotonic() > until
            ):
                self._end(self._silent(at_fault(member, answers)))
                return

    def _silent(self, member: int) -> Verdict:
        rank = self._members[member]
        return Verdict(rank, silent(rank, self._timeout_s).message, lost=True)
