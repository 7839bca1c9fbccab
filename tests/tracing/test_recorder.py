"""Is what a process did recorded, whatever becomes of the process, and within bounds?"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptengine.tracing import recorder
from ckptengine.tracing.files import read_trace
from ckptengine.tracing.recorder import Recorder, clock, span
from tests.helpers.trace_events import check, load, spans


@pytest.fixture(autouse=True)
def _not_traced() -> Iterator[None]:
    assert recorder.current is None
    yield
    assert recorder.current is None


def only_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_nothing_is_recorded_and_no_file_made_where_nothing_is_traced(tmp_path: Path) -> None:
    with span("read", "io"):
        recorder.flush()
        recorder.flush_if_due()
    trace = recorder.start(str(tmp_path / "t"), 0, "trainer")
    recorder.stop(trace)
    assert not (tmp_path / "t").exists()


def test_events_come_back_with_their_threads_and_arguments(tmp_path: Path) -> None:
    trace = recorder.start(str(tmp_path), 3, "writer")
    with span("save", "whole", {"step": 7}):
        with span("write", "io", {"bytes": 5, "file": "a/b"}):
            pass

    def work() -> None:
        with span("digest", "cpu"):
            time.sleep(0.002)

    helper = threading.Thread(target=work, name="helper")
    helper.start()
    helper.join()
    recorder.stop(trace)
    events = load(only_file(tmp_path))
    check(events)
    assert [event["name"] for event in spans(events)] == ["write", "save", "digest"]
    assert {event["args"]["name"] for event in events if event["name"].endswith("_name")} == {
        "rank 3 writer",
        "MainThread",
        "helper",
    }
    found = read_trace(str(only_file(tmp_path)))
    assert (found.rank, found.role, found.os_pid, found.ended) == (3, "writer", os.getpid(), True)
    assert [found.threads[one.thread] for one in found.spans] == ["MainThread", "MainThread", "helper"]
    assert found.spans[0].nbytes == 5
    assert found.spans[2].ended - found.spans[2].began >= 2000
    # The file says what the wall clock showed.
    assert abs(found.offset_us + clock() // 1000 - time.time_ns() // 1000) < 1_000_000


def test_what_fails_is_recorded_too(tmp_path: Path) -> None:
    trace = recorder.start(str(tmp_path), 0, "trainer")
    with pytest.raises(KeyError), span("write", "io"):
        raise KeyError
    recorder.stop(trace)
    assert len(spans(load(only_file(tmp_path)), "write")) == 1


def test_whole_microseconds_keep_events_within_each_other(tmp_path: Path) -> None:
    trace = Recorder(str(tmp_path), 0, "trainer")
    at = 0
    generator = random.Random(5)
    for _ in range(500):
        began, middle, ended = sorted(generator.sample(range(at, at + 5000), 3))
        trace.add("inner", "cpu", began, middle)
        trace.add("next", "cpu", middle, ended)
        trace.add("outer", "whole", began, ended)
        at = ended
    trace.close()
    check(load(only_file(tmp_path)))


def test_a_later_thread_of_the_same_name_goes_on_in_the_same_row_and_one_beside_it_does_not(
    tmp_path: Path,
) -> None:
    trace = recorder.start(str(tmp_path), 0, "trainer")
    meet = threading.Barrier(2)

    def work(together: bool) -> None:
        if together:
            meet.wait(10)
        with span("read", "io"):
            pass
        if together:
            meet.wait(10)

    for together, count in ((False, 1), (False, 1), (True, 2)):
        threads = [threading.Thread(target=work, args=(together,), name="same") for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    recorder.stop(trace)
    found = read_trace(str(only_file(tmp_path)))
    first, second, *both = [one.thread for one in found.spans]
    assert first == second
    assert len(set(both)) == 2
    assert [*found.threads.values()] == ["same", "same"]


def test_memory_is_bounded_and_what_was_left_out_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_EVENTS", 100)
    trace = Recorder(str(tmp_path), 0, "trainer")
    for i in range(150):
        trace.add("read", "io", i, i + 1)
    trace.close()
    events = load(only_file(tmp_path))
    check(events)
    assert len(spans(events)) == 100
    assert read_trace(str(only_file(tmp_path))).dropped == 50


def test_events_are_written_when_there_are_many_or_a_second_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10_000_000_000]
    monkeypatch.setattr(recorder, "clock", lambda: now[0])
    monkeypatch.setattr(recorder, "FLUSH_EVENTS", 10)
    trace = Recorder(str(tmp_path), 0, "trainer")
    trace.add("read", "io", 1, 2)
    trace.flush_if_due()
    assert trace.path is None
    now[0] += recorder.FLUSH_NS
    trace.flush_if_due()
    assert trace.path is not None
    assert len(read_trace(trace.path).spans) == 1
    for _ in range(9):
        trace.add("read", "io", 1, 2)
        trace.flush_if_due()
    assert len(read_trace(trace.path).spans) == 1
    trace.add("read", "io", 1, 2)
    trace.flush_if_due()
    assert len(read_trace(trace.path).spans) == 11
    trace.close()


def test_a_file_that_grows_too_large_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "MAX_FILE_NBYTES", 2000)
    trace = Recorder(str(tmp_path), 0, "trainer")
    for _ in range(100):
        trace.add("read", "io", 1, 2)
        trace.flush()
    trace.close()
    assert only_file(tmp_path).stat().st_size < 2200
    check(load(only_file(tmp_path)))
    assert len([one for one in caplog.messages if "ends here" in one]) == 1


def test_a_directory_that_cannot_be_made_is_said_once_and_breaks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    trace = recorder.start(str(tmp_path / "file" / "t"), 0, "trainer")
    for _ in range(3):
        with span("read", "io"):
            pass
        recorder.flush()
    recorder.stop(trace)
    assert len([one for one in caplog.messages if "Not a directory" in one]) == 1


def test_threads_that_record_and_write_at_once_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "FLUSH_EVENTS", 50)
    trace = Recorder(str(tmp_path), 0, "trainer")

    def work(number: int) -> None:
        for i in range(2000):
            trace.add(f"n{number}", "cpu", i, i + 1)
            trace.flush_if_due()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    found = read_trace(str(only_file(tmp_path)))
    assert found.dropped == 0
    for number in range(4):
        assert [one.began for one in found.spans if one.name == f"n{number}"] == [0] * 1000 + [1] * 1000


def test_two_that_want_a_trace_share_it_and_the_last_ends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = recorder.start(str(tmp_path / "a"), 0, "trainer")
    other = recorder.start(str(tmp_path / "b"), 0, "trainer")
    assert one is other
    assert any("already" in text for text in caplog.messages)
    recorder.stop(one)
    assert recorder.current is one
    with span("read", "io"):
        pass
    recorder.stop(other)
    assert len(spans(load(only_file(tmp_path / "a")))) == 1
    assert not (tmp_path / "b").exists()


def test_a_writer_process_follows_its_tasks(tmp_path: Path) -> None:
    for directory, name in (("a", "1"), ("a", "2"), (None, "3"), ("b", "4")):
        recorder.follow(None if directory is None else str(tmp_path / directory), 0, "writer")
        with span(name, "io"):
            pass
    recorder.follow(None, 0, "writer")
    assert [event["name"] for event in spans(load(only_file(tmp_path / "a")))] == ["1", "2"]
    assert [event["name"] for event in spans(load(only_file(tmp_path / "b")))] == ["4"]


def test_a_path_that_is_not_utf8_does_not_break_the_trace(tmp_path: Path) -> None:
    trace = Recorder(str(tmp_path), 0, "trainer")
    trace.add("read", "io", 1, 2, {"file": os.fsdecode(b"caf\xe9")})
    trace.close()
    check(load(only_file(tmp_path)))


class Odd:
    def __str__(self) -> str:
        raise KeyError("odd")


def test_arguments_that_json_has_no_word_for_become_text(tmp_path: Path) -> None:
    trace = Recorder(str(tmp_path), 0, "trainer")
    trace.add("save", "whole", 1, 2, {"step": np.int64(7)})
    trace.add("save", "whole", 3, 4, {"step": 1 << 80})
    trace.flush()
    trace.add("save", "whole", 5, 6, {"step": Odd()})
    trace.close()  # gives the trace up, and raises nothing
    events = load(only_file(tmp_path))
    check(events)
    assert [event["args"]["step"] for event in spans(events)] == ["7", 1 << 80]


def test_a_disk_that_is_full_at_the_end_breaks_nothing(tmp_path: Path) -> None:
    trace = Recorder(str(tmp_path), 0, "trainer")
    trace.add("save", "whole", 1, 2)
    trace.flush()
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), trace._fd)
    trace.close()
    check(load(only_file(tmp_path)))


KILLED = """
import os, signal, sys, time
from ckptengine.tracing import recorder
trace = recorder.start(sys.argv[1], 5, "writer")
for i in range(3000):
    trace.add("write", "io", i * 1000, i * 1000 + 500, {"bytes": 1})
trace.flush()
trace.add("lost", "io", 9_000_000, 9_000_001)
pid = os.fork()
if pid == 0:
    assert recorder.current is None  # the child's copy would write the parent's events a second time
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_what_it_had_written_readable(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    events = load(only_file(tmp_path))
    check(events)
    assert len(spans(events)) == 3000
    found = read_trace(str(only_file(tmp_path)))
    assert len(found.spans) == 3000
    assert not found.ended
