"""A status message is whole or not there, also when its writer is killed half way."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from ckptengine.staging.arena import Arena
from ckptengine.staging.status import STATUS_NBYTES, StatusPage

WRITER = """
import sys
from ckptengine.staging.arena import attach
arena = attach(int(sys.argv[1]), int(sys.argv[2]), 0)
print("ready", flush=True)
n = int(sys.argv[3])
while True:
    # Long, so that a kill is likely to fall into the copy.
    arena.status.write(b"%020d" % n * 1500)
    n += 1
"""


def whole(message: bytes | None) -> int:
    """The number a message of `WRITER` holds; fails if it is a mixture."""
    assert message is not None
    assert len(message) == 30_000
    assert message == message[:20] * 1500
    return int(message[:20])


def test_the_newest_message_is_read() -> None:
    page = StatusPage(memoryview(bytearray(STATUS_NBYTES)))
    assert page.read() is None
    assert page.read_json() is None
    for number in range(5):
        page.write({"bytes": number, "phase": "write"})
        assert page.read_json() == {"bytes": number, "phase": "write"}
    page.write(b"raw")
    assert page.read() == b"raw"
    page.write(b"")
    assert page.read() == b""
    page.clear()
    assert page.read() is None


def test_a_message_that_does_not_fit_is_refused_and_the_old_one_stays() -> None:
    page = StatusPage(memoryview(bytearray(STATUS_NBYTES)))
    page.write(b"x" * page.max_nbytes)
    with pytest.raises(ValueError, match="status message"):
        page.write(b"y" * (page.max_nbytes + 1))
    assert page.read() == b"x" * page.max_nbytes
    assert page.max_nbytes > 30_000
    with pytest.raises(ValueError, match="status page needs"):
        StatusPage(memoryview(bytearray(8)))


def test_two_pages_over_the_same_memory_continue_each_other() -> None:
    memory = memoryview(bytearray(STATUS_NBYTES))
    first, second = StatusPage(memory), StatusPage(memory)
    for number in range(6):
        (first if number % 2 else second).write(b"%d" % number)
        assert first.read() == second.read() == b"%d" % number


@pytest.mark.parametrize("seed", range(20))
def test_any_damage_to_the_newer_slot_gives_the_message_before(seed: int) -> None:
    memory = bytearray(4096)
    page = StatusPage(memoryview(memory))
    page.write(b"old" * 100)
    page.write(b"new" * 100)
    chance = random.Random(seed)
    # The second message is in the slot of even numbers, the first half.
    memory[chance.randrange(32 + 300)] ^= 1 << chance.randrange(8)
    assert page.read() == b"old" * 100
    page.write(b"newer")
    assert page.read() == b"newer"


def test_damage_everywhere_gives_nothing() -> None:
    page = StatusPage(memoryview(bytearray(random.Random(0).randbytes(4096))))
    assert page.read() is None
    page.write(b"again")
    assert page.read() == b"again"


def test_readers_beside_a_writer_see_whole_messages_in_order() -> None:
    page = StatusPage(memoryview(bytearray(STATUS_NBYTES)))
    page.write(b"%020d" % 0 * 1500)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            page.write(b"%020d" % number * 1500)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        last = 0
        for _ in range(300):
            number = whole(page.read())
            assert number >= last
            last = number
    finally:
        stop.set()
        thread.join()


def test_a_reader_overtaken_between_the_slots_does_not_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = bytearray(4096)
    writer, reader = StatusPage(memoryview(memory)), StatusPage(memoryview(memory))
    for number in range(1, 6):
        writer.write(b"%d" % number)
    assert reader.read() == b"5"
    real = StatusPage._slot
    overtaken = []

    def slot(page: StatusPage, index: int) -> tuple[int, bytes] | None:
        if page is reader and index == 1 and not overtaken:
            # After message 4 was read from slot 0, number 6 replaces it, and number 7 has begun to replace 5.
            overtaken.append(True)
            writer.write(b"6")
            memory[2048 + 32] ^= 0xFF
        return real(page, index)

    monkeypatch.setattr(StatusPage, "_slot", slot)
    assert reader.read() == b"6"


def test_a_writer_process_killed_at_any_moment_leaves_a_whole_message() -> None:
    chance = random.Random(1)
    last = 0
    with Arena(0) as arena:
        for _ in range(6):
            child = subprocess.Popen(
                [sys.executable, "-c", WRITER, str(os.getpid()), str(arena.fd), str(last)],
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                assert child.stdout is not None
                assert child.stdout.readline() == "ready\n"
                deadline = time.monotonic() + 0.02 + 0.05 * chance.random()
                while arena.status.read() is None or time.monotonic() < deadline:
                    if arena.status.read() is not None:
                        number = whole(arena.status.read())
                        assert number >= last
                        last = number
            finally:
                child.send_signal(signal.SIGKILL)
                child.communicate()
            number = whole(arena.status.read())
            assert number >= last
            last = number
        assert last > 10
        arena.status.write(b"the next writer goes on")
        assert arena.status.read() == b"the next writer goes on"
