"""How is a part of a restore done on all ranks, or an error on all?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ckptengine.candidates import DAMAGE
from ckptengine.comm.failure import Failure, StoppedByPeerError
from ckptengine.comm.group import Group
from ckptengine.errors import CheckpointError
from ckptengine.phases import Stopwatch


class Told(Protocol):
    """What travels with the word that a rank has done its part: each rank's `own`, and to all what the
    coordinator makes of them."""

    def own(self) -> bytes: ...

    def summary(self, values: list[bytes]) -> bytes: ...

    def learn(self, answer: bytes) -> None: ...


def on_all_ranks(
    group: Group,
    watch: Stopwatch,
    work: Callable[[], Any],
    what: str,
    timeout_s: float | None = None,
    tell: Told | None = None,
) -> Any:
    """Do `work` on every rank; return its result only if it succeeded on all, else raise the failing rank's
    error on all. tell: to exchange with the others on the way."""
    result: Any = None
    failure: Failure | None = None
    own: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure, own = Failure.of(error, group.rank), error
    try:
        with watch.measure("agree"):
            if tell is None:
                group.agree(failure, what=what, timeout_s=timeout_s)
            else:
                tell.learn(group.summarise(tell.own(), tell.summary, failure, what=what, timeout_s=timeout_s))
    except CheckpointError as error:
        # The rank itself raises what it caught, with its traceback, unless another rank's failure came first.
        told = (*DAMAGE, StoppedByPeerError)
        if own is not None and error.rank == group.rank and not isinstance(own, told):
            raise own from own.__cause__
        raise error from own
    return result
