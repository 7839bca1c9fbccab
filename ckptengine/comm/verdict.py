"""Which rank is at fault, when some ranks wait for one another and nothing moves? They tell each other here.

Who waits longest need not wait for the one that holds all up: that one may well only wait itself. So a rank
whose time is up asks the others whom they wait for, and follows that to one that does not answer, or does not
wait. Whoever knows why all must stop says so, and the first word stands: all raise the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from ckptengine.comm.transport import Transport


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """All stop because of `rank`. lost: it has ended or gone silent, and will say nothing itself."""

    rank: int
    text: str
    lost: bool = False


def reached_from(member: int, waits: Mapping[int, Collection[int] | None]) -> list[int]:
    """Whom one waits for that waits for `member`: that one, whom it waits for, and so on; the nearest
    first."""
    reached = [member]
    for one in reached:
        reached += [other for other in waits.get(one) or () if other not in reached]
    return reached


def at_fault(member: int, waits: Mapping[int, Collection[int] | None]) -> int:
    """Which member holds up one that waits for `member`. waits: for whom each member waits; None, or no
    entry, for one that does not answer."""
    reached = reached_from(member, waits)
    mute = [one for one in reached if waits.get(one) is None]
    busy = [one for one in reached if not waits.get(one)]
    return (mute or busy or reached)[0]


class Board:
    """What some ranks tell each other of what goes wrong. key: which no other board of the run has. members:
    ranks. me: this process's position in them.

    As long as all goes well nothing is written, and a look asks for one key. The methods raise
    `ConnectionError` if the transport does not answer.
    """

    def __init__(self, transport: Transport, key: str, members: Sequence[int], me: int) -> None:
        self._transport = transport
        self._key = key
        self._members = range(len(members))
        self._me = me

    def decide(self, verdict: Verdict) -> Verdict:
        """Returns the one that counts."""
        first = self._transport.set_if_absent(f"{self._key}/verdict", msgspec.msgpack.encode(verdict))
        self.ask()
        return msgspec.msgpack.decode(first, type=Verdict)

    def ask(self) -> None:
        """Have all members look for a verdict, and say whom they wait for."""
        self._transport.set_if_absent(f"{self._key}/trouble", b"")

    def look(self) -> Verdict | bool:
        """The verdict; until there is one, whether somebody asks."""
        if self._transport.peek(f"{self._key}/trouble") is None:
            return False
        data = self._transport.peek(f"{self._key}/verdict")
        return True if data is None else msgspec.msgpack.decode(data, type=Verdict)

    def answer(self, waits: Collection[int]) -> None:
        """The members that this one waits for. Again and again: it changes."""
        self._transport.set(f"{self._key}/waits/{self._me}", msgspec.msgpack.encode(sorted(waits)))

    def answers(self) -> dict[int, list[int] | None]:
        """What each member has answered; None where it has not."""
        told = {one: self._transport.peek(f"{self._key}/waits/{one}") for one in self._members}
        return {
            one: None if data is None else msgspec.msgpack.decode(data, type=list[int])
            for one, data in told.items()
        }
