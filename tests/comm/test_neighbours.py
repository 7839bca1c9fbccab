"""Is it seen at once that the process of another rank has ended, and never of one that has not?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from ckptengine.comm import neighbours as module
from ckptengine.comm.neighbours import Neighbours
from ckptengine.comm.transport import FileTransport, MemoryTransport
from tests.helpers.ranks import wait_until

_RANK = """
import sys
from ckptengine.comm.neighbours import Neighbours
from ckptengine.comm.transport import FileTransport
one = Neighbours(int(sys.argv[1]), 99, FileTransport(sys.argv[2]), "at")
one.publish()
print("published", flush=True)
sys.stdin.read()
if len(sys.argv) > 3:
    one.close()
"""


@contextmanager
def process(rank: int, directory: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", _RANK, str(rank), str(directory), *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as started:
        assert started.stdout is not None
        try:
            assert started.stdout.readline() == b"published\n"
            yield started
        finally:
            started.kill()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Neighbours]:
    one = Neighbours(1, 99, FileTransport(str(tmp_path)), "at")
    one.publish()
    yield one
    one.close()


@pytest.mark.parametrize("rank", [0, 2])
def test_one_that_is_killed_is_seen_before_it_is_waited_for(
    here: Neighbours, tmp_path: Path, rank: int
) -> None:
    with process(rank, tmp_path) as other:
        assert here.ended() == []
        os.kill(other.pid, signal.SIGKILL)
        # It is a zombie for as long as its parent has not asked.
        assert wait_until(here.ended) == [rank]
    assert here.ended() == [rank]


def test_one_that_had_ended_before_anybody_looked_is_seen_too(here: Neighbours, tmp_path: Path) -> None:
    with process(0, tmp_path) as other:
        other.kill()
        other.wait()
        assert here.ended() == [0]


def test_one_that_is_stopped_has_not_ended(here: Neighbours, tmp_path: Path) -> None:
    with process(0, tmp_path) as other:
        os.kill(other.pid, signal.SIGSTOP)
        assert here.ended() == []


def test_one_that_has_left_in_good_order_is_not_known_as_ended(here: Neighbours, tmp_path: Path) -> None:
    with process(0, tmp_path, "closes") as other:
        other.communicate()
        assert here.ended() == []


def test_another_process_with_the_number_of_one_that_has_ended_is_not_it() -> None:
    space = MemoryTransport()
    one, other = (Neighbours(rank, 2, space, "at") for rank in range(2))
    one.publish()
    other.publish()
    host, pid, started = msgspec.msgpack.decode(space.peek("at/1") or b"")
    space.set("at/1", msgspec.msgpack.encode((host, pid, started - 1)))
    assert one.ended() == [1]
    assert other.ended() == []
    other.close()


def test_a_process_of_another_host_is_not_looked_for() -> None:
    space = MemoryTransport()
    one, other = (Neighbours(rank, 2, space, "at") for rank in range(2))
    one.publish()
    other.publish()
    _, pid, _ = msgspec.msgpack.decode(space.peek("at/1") or b"")
    space.set("at/1", msgspec.msgpack.encode((b"another", pid, 1)))
    assert one.ended() == []


def test_where_the_system_cannot_tell_nobody_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError("no such call")

    monkeypatch.setattr(module.os, "pidfd_open", refuse)
    space = MemoryTransport()
    one = Neighbours(0, 2, space, "at")
    one.publish()
    assert one.ended() == []
    assert space.peek("at/0") is None
    one.close()
