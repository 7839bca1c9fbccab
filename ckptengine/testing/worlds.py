"""One or two ranks of a world whose other ranks are only said to be there, in one process."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from ckptengine import phases, restorer
from ckptengine.comm.group import COORDINATOR, Group
from ckptengine.comm.transport import MemoryTransport
from ckptengine.config import Config
from ckptengine.info import RestoreInfo
from ckptengine.restore_options import RestoreOptions, SameRestoreOptions
from ckptengine.storage.store import Store

CALLS = 8
"""More than a restore makes."""


def all_good(rank: int) -> bytes:
    """What a rank reports that took no time."""
    figures = phases.encode(phases.RankPhases(rank, phases.RestorePhases()))
    return msgspec.msgpack.encode({"value": figures, "failure": None})


class _Space(MemoryTransport):
    """heard: bytes that each thread got. As a job's store does, it wakes only who waits for the key that is
    set."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: Counter[int] = Counter()
        self._set: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._set[key].set()

    def get(self, key: str, timeout_s: float) -> bytes:
        if not self._set[key].wait(timeout_s):
            raise TimeoutError(f"no value for {key!r} within {timeout_s:g} s")
        value = self._values[key]
        self.heard[threading.get_ident()] += len(value)
        return value


def restore_two_ranks(
    root: str, ranks: int, other: int, state: Callable[[int], Any], store: Callable[[int], Store]
) -> dict[int, tuple[RestoreInfo, int]]:
    """The coordinator and `other` restore; the rest of the world agrees to everything beforehand.

    state, store: what each of the two restores into, and by which store. Returns for each its info, and the
    bytes it was told by others.
    """
    space = _Space()
    options = RestoreOptions()
    same = SameRestoreOptions()
    same.options = options.to_compare(None, streaming=False)
    agreed = msgspec.msgpack.encode({"value": same.own(), "failure": None})
    for rank in range(ranks):
        report = all_good(rank)
        for call in range(1, CALLS) if rank not in (COORDINATOR, other) else ():
            space.set(f"g/{call}/{rank}", agreed if call == 1 else report)

    def work(rank: int) -> tuple[RestoreInfo, int]:
        before = space.heard[threading.get_ident()]
        group = Group(rank, ranks, space, "g", 60.0)
        info = restorer.restore(
            root,
            state(rank),
            step=None,
            options=options,
            store=store(rank),
            group=group,
            config=Config(),
        )
        return info, space.heard[threading.get_ident()] - before

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((COORDINATOR, other), pool.map(work, (COORDINATOR, other)), strict=True))
