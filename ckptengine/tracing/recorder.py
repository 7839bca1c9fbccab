"""What does this process do when? Recorded in memory, written as a file of Chrome trace events.

A process is traced or not, as it logs or not: `current` is its recorder, or None. Whoever has something to
tell looks at it once for each block, and does nothing else where it is None.

One process writes one file, a line for each event, in the form that ui.perfetto.dev and chrome://tracing
open. It is an array that need not end: whatever was written before a crash can be read. Times are
microseconds of CLOCK_MONOTONIC, which all processes of a machine share; the first event says what the wall
clock showed at some such time, and the machine's boot id, so that machines can be set beside each other as
well as their wall clocks agree. Events are written when a save or restore has ended, when there are many, and
else every second, by a thread that does I/O anyway; a process that is killed leaves all but the last second.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

logger = logging.getLogger(__name__)

Role = Literal["trainer", "writer"]
ROLES: tuple[Role, ...] = ("trainer", "writer")
Category = Literal["io", "cpu", "wait", "whole"]
"""Storage, copying and digesting, waiting for others; and what contains other events."""

VERSION = 1
SUFFIX = ".trace.json"
ABOUT = "ckptengine trace"
"""The name of a file's first event."""

FLUSH_EVENTS = 4096
FLUSH_NS = 1_000_000_000
MAX_EVENTS = 32768
"""Kept in memory, some 16 MiB; what comes beyond is counted, not kept. Only where no thread that does I/O
comes by in time."""
MAX_FILE_NBYTES = 1 << 30
"""Of one process: five million events, more than can be looked at."""

clock = time.monotonic_ns

_Event = tuple[str, str, int, int, int, "Mapping[str, Any] | None"]

current: Recorder | None = None
"""The process's recorder."""

_lock = threading.Lock()


class Recorder:
    """Keeps the events of one process, and writes them. All methods may be called from any thread.

    Nothing here raises: a trace that cannot be written is given up, and that is logged once.
    """

    def __init__(self, directory: str, rank: int, role: Role) -> None:
        self.directory = directory
        self.rank = rank
        self.role: Role = role
        self.users = 1
        self.path: str | None = None
        """Of the file, once there is one."""
        self._pid = process_number(rank, role)
        # Appending to it and taking from it are atomic: no thread ever waits for another.
        self._events: deque[_Event] = deque()
        self._dropped = 0
        self._lanes = threading.local()
        self._names: list[tuple[threading.Thread, str]] = []
        self._named = 0
        self._naming = threading.Lock()
        self._flushed_ns = clock()
        self._flushing = threading.Lock()
        self._fd = -1
        self._nbytes = 0
        self._given_up = False

    def add(
        self,
        name: str,
        category: Category,
        began_ns: int,
        ended_ns: int,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Something that the calling thread did from one time of `clock` to another."""
        try:
            lane = self._lanes.number
        except AttributeError:
            lane = self._lanes.number = self._new_lane()
        if len(self._events) < MAX_EVENTS:
            self._events.append((name, category, began_ns, ended_ns, lane, args))
        else:
            self._dropped += 1

    def flush_if_due(self) -> None:
        """Write the events if there are many, or the last time was long ago; for threads that may do I/O."""
        due = len(self._events) >= FLUSH_EVENTS or clock() - self._flushed_ns >= FLUSH_NS
        if due and self._flushing.acquire(blocking=False):
            try:
                self._write()
            finally:
                self._flushing.release()

    def flush(self) -> None:
        """Write what there is; nothing if that is nothing."""
        with self._flushing:
            self._write()

    def close(self) -> None:
        """Write what there is and end the file."""
        with self._flushing:
            self._write()
            if self._fd >= 0:
                try:
                    self._put(b"]\n")
                except OSError:  # nothing is lost: a file need not end
                    pass
                self._give_up(None)

    def _new_lane(self) -> int:
        """A number for the calling thread: that of an earlier thread of this name, if it has ended."""
        thread = threading.current_thread()
        with self._naming:
            for i, (other, name) in enumerate(self._names):
                if name == thread.name and (other is thread or not other.is_alive()):
                    self._names[i] = thread, name
                    return i + 1
            self._names.append((thread, thread.name))
            return len(self._names)

    def _write(self) -> None:
        # First, so that it is not tried again at once if it fails.
        self._flushed_ns = clock()
        taken = [self._events.popleft() for _ in range(len(self._events))]
        dropped, self._dropped = self._dropped, 0
        if not (taken or dropped) or self._given_up:
            return
        try:
            if self._fd < 0:
                self._open()
            self._put(self._encoded(taken, dropped))
            if self._nbytes > MAX_FILE_NBYTES:
                self._give_up(f"it has more than {MAX_FILE_NBYTES} bytes")
        except Exception as error:  # whatever it is, no save or restore is to fail for it
            self._give_up(str(error) or type(error).__name__)

    def _open(self) -> None:
        os.makedirs(self.directory, exist_ok=True)
        began_ms = time.time_ns() // 1_000_000
        while True:
            name = f"rank-{self.rank:05d}-{self.role}-{began_ms}-{os.getpid()}{SUFFIX}"
            self.path = os.path.join(self.directory, name)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self.path, flags, 0o666)
                break
            except FileExistsError:  # this process has ended one within the millisecond
                began_ms += 1
        self._put(b"[\n" + _line(_about(self._pid, self.rank, self.role)))
        for name, value in (
            ("process_name", {"name": f"rank {self.rank} {self.role}"}),
            ("process_sort_index", {"sort_index": self._pid}),
        ):
            self._put(b"," + _line({"name": name, "ph": "M", "pid": self._pid, "tid": 0, "args": value}))

    def _encoded(self, events: list[_Event], dropped: int) -> bytes:
        with self._naming:
            names = [name for _, name in self._names]
        lines = []
        for lane in range(self._named, len(names)):
            for name, value in (
                ("thread_name", {"name": names[lane]}),
                ("thread_sort_index", {"sort_index": lane + 1}),
            ):
                lines.append({"name": name, "ph": "M", "pid": self._pid, "tid": lane + 1, "args": value})
        self._named = len(names)
        for name, category, began_ns, ended_ns, lane, args in events:
            # Both ends are cut to whole microseconds: what lay within another event still does.
            began = began_ns // 1000
            event: dict[str, Any] = {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": began,
                "dur": ended_ns // 1000 - began,
                "pid": self._pid,
                "tid": lane,
            }
            if args:
                event["args"] = args
            lines.append(event)
        if dropped:
            lines.append(
                {
                    "name": "events not recorded",
                    "ph": "i",
                    "s": "p",
                    "ts": clock() // 1000,
                    "pid": self._pid,
                    "tid": 0,
                    "args": {"events": dropped},
                }
            )
        return b"".join([b"," + _line(line) for line in lines])

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self._nbytes += len(data)

    def _give_up(self, reason: str | None) -> None:
        self._given_up = True
        if reason is not None:
            logger.warning("the trace in %s ends here: %s", self.path or self.directory, reason)
        if self._fd >= 0:
            try:
                os.close(self._fd)
            except OSError:  # a lost write shows when the file is read
                pass
            self._fd = -1


def process_number(rank: int, role: Role) -> int:
    """The `pid` that stands for a rank's trainer or writer: 0 would be taken for the idle process."""
    return 2 * rank + 1 + ROLES.index(role)


def start(directory: str, rank: int, role: Role) -> Recorder:
    """Trace this process from now on. For the trainer: each call takes a `stop`."""
    global current
    with _lock:
        if current is None:
            current = Recorder(directory, rank, role)
            return current
        if (current.directory, current.rank) != (directory, rank):
            logger.warning(
                "this process is traced as rank %d to %s already: that is where everything goes",
                current.rank,
                current.directory,
            )
        current.users += 1
        return current


def stop(trace: Recorder) -> None:
    """The trace ends with the last one that wanted it."""
    global current
    with _lock:
        trace.users -= 1
        if trace.users:
            return
        if current is trace:
            current = None
    trace.close()


def follow(directory: str | None, rank: int, role: Role) -> None:
    """Trace this process to there from now on, or not at all; for the writer process, before each task."""
    trace = current
    if trace is not None and (trace.directory, trace.rank) != (directory, rank):
        stop(trace)
    if directory is not None and current is None:
        start(directory, rank, role)


@contextmanager
def span(name: str, category: Category, args: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Record what is done within, also if it fails."""
    trace = current
    if trace is None:
        yield
        return
    began = clock()
    try:
        yield
    finally:
        trace.add(name, category, began, clock(), args)


def flush() -> None:
    """At the end of a save or restore."""
    trace = current
    if trace is not None:
        trace.flush()


def flush_if_due() -> None:
    trace = current
    if trace is not None:
        trace.flush_if_due()


def _about(pid: int, rank: int, role: Role) -> dict[str, Any]:
    before = clock()
    wall = time.time_ns()
    monotonic = (before + clock()) // 2
    args = {
        "version": VERSION,
        "rank": rank,
        "role": role,
        "os_pid": os.getpid(),
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "monotonic_us": monotonic // 1000,
        "unix_us": wall // 1000,
    }
    return {"name": ABOUT, "ph": "M", "pid": pid, "tid": 0, "args": args}


def _boot_id() -> str:
    """What CLOCK_MONOTONIC counts from: processes with the same one share the clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _line(event: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(event, enc_hook=str) + b"\n"
    except (UnicodeEncodeError, OverflowError):  # a path that is not UTF-8, a step of more than 64 bits
        return json.dumps(event, default=str).encode() + b"\n"


def _forget_in_child() -> None:
    """A fork has its parent's events and file: they are the parent's to write."""
    global current, _lock
    current = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
