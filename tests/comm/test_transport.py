"""Every transport keeps one contract; run over all three."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from ckptengine.adapters.c10d import StoreTransport
from ckptengine.comm.transport import FileTransport, MemoryTransport, Transport

Connect = Callable[[], Transport]


@pytest.fixture(params=["memory", "file", "tcp"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Makes further connections to one space."""
    if request.param == "memory":
        space = MemoryTransport()
        yield lambda: space
    elif request.param == "file":
        yield lambda: FileTransport(str(tmp_path / "exchange"))
    else:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield lambda: StoreTransport("127.0.0.1", server.port, "test/")


def test_a_value_is_seen_by_another_connection(connect: Connect) -> None:
    connect().set("a/b", b"\x00value\xff")
    assert connect().get("a/b", 1.0) == b"\x00value\xff"


def test_get_waits_for_a_value_that_comes_later(connect: Connect) -> None:
    reader, writer = connect(), connect()
    timer = threading.Timer(0.2, writer.set, ("late", b"x"))
    timer.start()
    assert reader.get("late", 10.0) == b"x"
    timer.join()


def test_peek_does_not_wait(connect: Connect) -> None:
    transport = connect()
    assert transport.peek("k") is None
    connect().set("k", b"v")
    assert transport.peek("k") == b"v"


def test_a_wait_can_be_interrupted(connect: Connect) -> None:
    """As Ctrl-C does, or NVRx's in-process restart: nothing else would end a wait for a rank that is gone."""
    transport = connect()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        transport.get("never", 60.0)
    assert time.monotonic() - started < 10
    timer.join()


def test_waiting_in_vain_is_silent(connect: Connect, capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own blocking wait writes two warnings to stderr each time its deadline passes."""
    transport = connect()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            transport.get("never", 0.05)
    assert capfd.readouterr().err == ""


def test_get_ends_at_its_deadline_and_the_connection_still_works(connect: Connect) -> None:
    transport = connect()
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="never"):
        transport.get("never", 0.2)
    assert time.monotonic() - started >= 0.15
    transport.set("now", b"y")
    assert transport.get("now", 1.0) == b"y"


def test_only_the_first_of_many_set_if_absent_wins(connect: Connect) -> None:
    results: list[bytes] = []
    start = threading.Barrier(8)

    def race(value: bytes) -> None:
        transport = connect()
        start.wait()
        results.append(transport.set_if_absent("winner", value))

    threads = [threading.Thread(target=race, args=(b"%d" % i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert set(results) == {connect().get("winner", 1.0)}


def test_a_deleted_value_is_gone_and_deleting_again_is_no_error(connect: Connect) -> None:
    transport = connect()
    transport.set("k", b"1")
    transport.delete("k")
    transport.delete("k")
    with pytest.raises(TimeoutError):
        transport.get("k", 0.05)


def test_odd_keys_stay_apart(connect: Connect) -> None:
    transport = connect()
    for key in ("a/b", "a%2Fb", "a b", "..", "ä"):
        transport.set(key, key.encode())
    for key in ("a/b", "a%2Fb", "a b", "..", "ä"):
        assert transport.get(key, 1.0) == key.encode()


def test_a_store_that_is_gone_is_a_connection_error_in_time(tmp_path: Path) -> None:
    program = (
        "import time, torch.distributed as d\n"
        "s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(s.port, flush=True)\n"
        "time.sleep(60)\n"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        transport = StoreTransport("127.0.0.1", int(server.stdout.readline()), "test/")
        transport.set("k", b"1")
    finally:
        server.kill()
        server.wait()
        server.stdout.close()  # type: ignore[union-attr]
    started = time.monotonic()
    with pytest.raises((ConnectionError, TimeoutError)):
        transport.get("other", 1.0)
    with pytest.raises(ConnectionError):
        transport.set("k", b"2")
    assert time.monotonic() - started < 30


def test_a_file_exchange_that_cannot_be_made_is_a_connection_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConnectionError, match="file"):
        FileTransport(str(tmp_path / "file" / "exchange"))
