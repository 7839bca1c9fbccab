"""One or two ranks of a world whose other ranks are only said to be there, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from ckptengine import restorer
from ckptengine.comm.group import COORDINATOR, Group
from ckptengine.comm.transport import MemoryTransport
from ckptengine.config import Config
from ckptengine.info import RestoreInfo
from ckptengine.storage.store import Store

CALLS = 8
"""More than a restore makes."""

ALL_GOOD = msgspec.msgpack.encode({"value": None, "failure": None})


class CountingTransport(MemoryTransport):
    """heard: bytes that each thread got."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[int, int] = {}

    def get(self, key: str, timeout_s: float) -> bytes:
        value = super().get(key, timeout_s)
        me = threading.get_ident()
        self.heard[me] = self.heard.get(me, 0) + len(value)
        return value


def restore_two_ranks(
    root: str, ranks: int, other: int, state: Callable[[int], Any], store: Callable[[int], Store]
) -> dict[int, tuple[RestoreInfo, int]]:
    """The coordinator and `other` restore; the rest of the world agrees to everything beforehand.

    state, store: what each of the two restores into, and by which store. Returns for each its info, and the
    bytes it was told by others.
    """
    space = CountingTransport()
    for rank in range(ranks):
        for call in range(1, CALLS) if rank not in (COORDINATOR, other) else ():
            space.set(f"g/{call}/{rank}", ALL_GOOD)

    def work(rank: int) -> tuple[RestoreInfo, int]:
        before = space.heard.get(threading.get_ident(), 0)
        group = Group(rank, ranks, space, "g", 60.0)
        info = restorer.restore(
            root,
            state(rank),
            step=None,
            strict=True,
            verify=True,
            store=store(rank),
            group=group,
            config=Config(),
        )
        return info, space.heard.get(threading.get_ident(), 0) - before

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((COORDINATOR, other), pool.map(work, (COORDINATOR, other)), strict=True))
