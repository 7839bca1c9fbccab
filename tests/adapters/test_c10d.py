"""How ranks find each other over a process group's store, which may remember an earlier life. Ranks are
threads here."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptengine.adapters import c10d
from ckptengine.adapters.c10d import Membership
from ckptengine.comm.transport import wait_for
from ckptengine.errors import CheckpointError, CommitTimeoutError
from tests.helpers.ranks import wait_until

RANKS = 3


def meet(store: Any, word: bytes, *, late: int | None = None, timeout_s: float = 20.0) -> list[Any]:
    """What each rank hears, or raises; rank `late` comes after the others."""

    def run(rank: int) -> Any:
        if rank == late:
            time.sleep(0.3)
        try:
            return Membership(rank, RANKS, store).say_hello(word if rank == 0 else None, timeout_s)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


@pytest.fixture(params=["tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "file":
        base: Any = dist.FileStore(str(tmp_path / "store"), -1)
    else:
        base = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return dist.PrefixStore("default_pg", base)


@pytest.mark.parametrize("late", [None, 0, 2])
def test_every_life_hears_its_own_coordinator(store: Any, late: int | None) -> None:
    for life in range(3):
        word = b"life %d" % life
        assert meet(store, word, late=late) == [word] * RANKS


def test_a_rank_that_does_not_come_is_named_to_all_others(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(look: Callable[[], bytes | None], timeout_s: float) -> bytes | None:
        """The coordinator's deadline passes when the other two have met, however long that takes."""
        if timeout_s == short:
            # Looking answers.
            wait_until(lambda: look() is None and store.check([f"{c10d.HELLO}/heard/1"]))
            return look()
        return wait_for(look, timeout_s)

    short = 2.0
    monkeypatch.setattr(c10d, "wait_for", wait)
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(Membership(0, RANKS, store).say_hello, b"word", short),
            pool.submit(Membership(1, RANKS, store).say_hello, None, 30.0),
        ]
        for future in waiting:
            with pytest.raises(CommitTimeoutError) as caught:
                future.result(60)
            assert caught.value.rank == 2
    # The next time all come, and nothing of this is left between them.
    assert meet(store, b"again") == [b"again"] * RANKS


def test_a_coordinator_that_does_not_come_is_named(store: Any) -> None:
    started = time.monotonic()
    with pytest.raises(CommitTimeoutError) as caught:
        Membership(1, RANKS, store).say_hello(None, 0.3)
    assert caught.value.rank == 0
    assert time.monotonic() - started < 5


def test_a_store_that_is_gone_is_a_checkpoint_error(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    with pytest.raises(CheckpointError, match="does not answer"):
        Membership(1, RANKS, client).say_hello(None, 5.0)
