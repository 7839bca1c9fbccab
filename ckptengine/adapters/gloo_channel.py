"""The channel of ranks on several hosts: a gloo group of their own, beside whatever the training uses.

gloo works wherever torch does, also where the job's group is NCCL alone, and takes nothing of the device. A
block goes from its reader to each other member, who all read as much as each other, so each sends and
receives what a ring would have it. gloo sends nothing before it is asked for, so what is on its way is
bounded by the receivers' buffers. A wait in gloo cannot be ended from outside. So a member that fails sends a
word instead of each of its blocks; and says so in the job's store, where the others look every half second.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in its __all__

from ckptengine.comm.failure import StoppedByPeerError
from ckptengine.comm.transport import Transport
from ckptengine.format.limits import PAGE
from ckptengine.phases import GB
from ckptengine.read.channel import StoppedHereError, lost, silent
from ckptengine.read.sharing import Turn
from ckptengine.storage.direct import AlignedBuffer

SLOTS = 4
MAX_NBYTES = 64 << 20
HEAD_NBYTES = 64
"""Before each block: the first byte says whether it is one."""
_GOOD, _STOPPED = 1, 2

LOOK_S = 0.5
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
        self._groups: dict[tuple[int, ...], Any] = {}

    def open(
        self, members: tuple[int, ...], me: int, turns: list[Turn], nbytes: int, name: str
    ) -> GlooChannel:
        """See `ckptengine.read_once.Network`."""
        group = self._groups.get(members)
        if group is None:
            group = dist.ProcessGroupGloo(
                PrefixStore(f"{self._prefix}/{name}", self._store),
                me,
                len(members),
                datetime.timedelta(seconds=self._timeout_s),
            )
            self._groups[members] = group

        def on_close(healthy: bool) -> None:
            if not healthy:
                self._groups.pop(members, None)

        return GlooChannel(
            group,
            members,
            me,
            turns,
            nbytes,
            self._timeout_s,
            self._transport,
            f"{self._prefix}/{name}/stopped",
            on_close,
        )

    def close(self) -> None:
        self._groups.clear()


class _Message:
    """Room for a block, page-aligned, with a head before it, and all of it as a tensor."""

    def __init__(self, nbytes: int) -> None:
        self._memory = AlignedBuffer(PAGE + max(nbytes, 1))
        self.view = self._memory.view[PAGE:]
        self.address = self._memory.address + PAGE
        self._tensor = torch.frombuffer(self._memory.view, dtype=torch.uint8)[PAGE - HEAD_NBYTES :]

    def of(self, nbytes: int, status: int | None = None) -> torch.Tensor:
        """Head and block; status: to send."""
        if status is not None:
            self._tensor[0] = status
        return self._tensor[: HEAD_NBYTES + nbytes]

    @property
    def status(self) -> int:
        return int(self._tensor[0])


class GlooChannel:
    """`Channel` among the members of a group. stopped: a key of the job's store, set by the first member that
    fails. on_close: hears whether the group can be used again."""

    name = "gloo"

    def __init__(
        self,
        group: Any,
        members: tuple[int, ...],
        me: int,
        turns: list[Turn],
        nbytes: int,
        timeout_s: float,
        transport: Transport,
        stopped: str,
        on_close: Callable[[bool], None],
    ) -> None:
        self._group = group
        self._members = members
        self._me = me
        self._nbytes = nbytes
        self._timeout_s = timeout_s
        self._transport = transport
        self._key = stopped
        self._on_close = on_close
        self._own = [turn for turn in turns if turn.reader == me]
        self._others = {turn.sequence: turn for turn in turns if turn.reader != me}
        count = max(1, min(SLOTS, len(self._own), max(2, MAX_NBYTES // max(nbytes, 1))))
        self._slots = [_Message(nbytes) for _ in range(count)]
        # By number: what is on its way, and with whom.
        self._sent: dict[int, list[tuple[int, Any]]] = {}
        self._published: set[int] = set()
        self._lock = threading.Condition()
        self._lost: set[int] = set()
        self._drain: threading.Thread | None = None
        self._stopped = False
        self._peer: int | None = None
        self._word = torch.full((HEAD_NBYTES,), _STOPPED, dtype=torch.uint8)
        self._words: list[tuple[int, Any]] = []
        self._mine = threading.local()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ckptengine-exchange", daemon=True)
        self._watcher.start()

    def slot(self, turn: Turn) -> _Message:
        before = turn.number - len(self._slots)
        if before >= 0:
            with self._lock:
                # By another thread, which may still be reading it.
                self._lock.wait_for(lambda: before in self._published or self._stopped)
            self._wait_sent(before)
        self._check()
        return self._slots[turn.number % len(self._slots)]

    def publish(self, turn: Turn, nbytes: int) -> None:
        message = self._slots[turn.number % len(self._slots)].of(nbytes, _GOOD)
        with self._lock:
            if self._stopped:
                return
            self._published.add(turn.number)
            self._sent[turn.number] = [
                (member, self._group.send([message], member, turn.sequence))
                for member in turn.members
                if member != self._me
            ]
            self._lock.notify_all()

    def receive(self, turn: Turn, nbytes: int) -> int:
        with self._lock:
            self._check()
            del self._others[turn.sequence]
        message = getattr(self._mine, "message", None)
        if message is None:
            message = self._mine.message = _Message(self._nbytes)
        with self._errors_of(turn.reader):
            work = self._group.recv([message.of(nbytes)], turn.reader, turn.sequence)
            work.wait(datetime.timedelta(seconds=self._timeout_s))
        self._check()
        if message.status != _GOOD:
            raise StoppedByPeerError("it has stopped reading", rank=self._members[turn.reader])
        return int(message.address)

    def release(self, turn: Turn) -> None:
        pass

    def finish(self) -> None:
        for number in sorted(self._sent):
            self._wait_sent(number)

    def stop(self) -> None:
        """All wait for one another, to send and to be sent to, and hear in the store that they must stop. So
        that these waits end, each sends a word for each of its blocks, and takes what others still send."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            for turn in self._own:
                if turn.number not in self._published:
                    for member in turn.members:
                        if member != self._me:
                            with contextlib.suppress(RuntimeError):  # that one is gone
                                self._words.append(
                                    (member, self._group.send([self._word], member, turn.sequence))
                                )
            self._lock.notify_all()
            self._drain = threading.Thread(target=self._take_rest, name="ckptengine-drain", daemon=True)
            self._drain.start()
        with contextlib.suppress(ConnectionError):
            self._transport.set_if_absent(self._key, str(self._members[self._me]).encode())

    def give_up(self, undone: list[Turn]) -> None:
        self.stop()

    def close(self) -> None:
        self._closed.set()
        self._watcher.join()
        if self._drain is not None:
            self._drain.join()
            # What is dropped before it was taken would be waited for.
            for member, work in [*self._words, *(one for some in self._sent.values() for one in some)]:
                if member not in self._lost:
                    try:
                        work.wait(datetime.timedelta(seconds=self._timeout_s))
                    except RuntimeError:
                        self._lost.add(member)
        self._sent.clear()
        self._words.clear()
        self._group = None
        self._on_close(not self._stopped)

    def rate_gbps(self) -> float:
        """Each member sends a little to the next, all at once."""
        count = len(self._members)
        after, before = (self._me + 1) % count, (self._me - 1) % count
        out, into = (torch.zeros(MEASURED_NBYTES, dtype=torch.uint8) for _ in range(2))
        limit = datetime.timedelta(seconds=self._timeout_s)
        began = 0.0
        for number in range(MEASURED_TIMES + 1):
            if number == 1:  # the first one only sees that all are there
                began = time.perf_counter()
            with self._errors_of(before):
                # Tags of turns are not negative, and small.
                sent = self._group.send([out], after, (1 << 30) + number)
                self._group.recv([into], before, (1 << 30) + number).wait(limit)
                sent.wait(limit)
        seconds = time.perf_counter() - began
        return MEASURED_TIMES * MEASURED_NBYTES / GB / max(seconds, 1e-9)

    def _wait_sent(self, number: int) -> None:
        # A wait in gloo takes what has been sent: the second one would have no end.
        for member, work in self._sent.pop(number, ()):
            with self._errors_of(member):
                work.wait(datetime.timedelta(seconds=self._timeout_s))

    def _take_rest(self) -> None:
        limit = datetime.timedelta(seconds=self._timeout_s)
        scratch = torch.empty(HEAD_NBYTES + self._nbytes, dtype=torch.uint8)
        for turn in list(self._others.values()):
            if turn.reader not in self._lost:
                try:
                    self._group.recv([scratch], turn.reader, turn.sequence).wait(limit)
                except RuntimeError:
                    self._lost.add(turn.reader)

    @contextlib.contextmanager
    def _errors_of(self, member: int) -> Any:
        """What gloo says of a member, in our words."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not self._stopped:
                # Its connection may be closed because it has failed, and said so.
                self._look()
            self._check()
            rank = self._members[member]
            self._lost.add(member)
            if time.monotonic() - began >= self._timeout_s:
                raise silent(rank, self._timeout_s) from error
            raise lost(rank) from error

    def _check(self) -> None:
        if self._peer is not None:
            raise StoppedByPeerError("it has stopped reading", rank=self._peer)
        if self._stopped:
            raise StoppedHereError

    def _look(self) -> None:
        with contextlib.suppress(ConnectionError):
            told = self._transport.peek(self._key)
            if told is not None and not self._stopped:
                self._peer = int(told)
                self.stop()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            self._look()
