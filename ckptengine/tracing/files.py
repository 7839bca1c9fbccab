"""What is in the trace files of a job, and does all of it make sense?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ckptengine.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from ckptengine.tracing.recorder import ABOUT, ROLES, SUFFIX, VERSION, process_number

MAX_LINE_NBYTES = 1 << 20
MAX_RANK = 1 << 30
MAX_US = 1 << 53
"""Two centuries, and what a JSON number holds exactly."""


class Span(msgspec.Struct, frozen=True, gc=False):
    """Something that a thread did: microseconds of its file's clock from `began` to `ended`.

    args: as they are in the file, a JSON object; empty if there are none.
    """

    name: str
    category: str
    thread: int
    began: int
    ended: int
    nbytes: int
    args: bytes


@dataclass(frozen=True, slots=True)
class TraceFile:
    """What one process recorded.

    offset_us: from its clock to Unix microseconds, as it saw them. boot_id: processes with the same one have
    the same clock. threads: their names by number. dropped: events that there was no room for.
    ended: False where the process was killed, or is still running.
    """

    path: str
    rank: int
    role: str
    os_pid: int
    host: str
    boot_id: str
    monotonic_us: int
    offset_us: int
    threads: dict[int, str]
    spans: list[Span]
    dropped: int
    ended: bool

    @property
    def process(self) -> int:
        return process_number(self.rank, self.role)  # type: ignore[arg-type]  # checked when it was read

    @property
    def name(self) -> str:
        return f"rank {self.rank} {self.role}"


class _About(msgspec.Struct):
    version: int
    rank: int
    role: str
    os_pid: int
    host: str
    boot_id: str
    monotonic_us: int
    unix_us: int


class _Event(msgspec.Struct):
    name: str
    ph: str
    pid: int
    tid: int
    cat: str = ""
    ts: int = -1
    dur: int = -1
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Nbytes(msgspec.Struct):
    bytes: int = 0


class _Name(msgspec.Struct):
    name: str


class _Dropped(msgspec.Struct):
    events: int


_event = msgspec.json.Decoder(_Event).decode
_nbytes = msgspec.json.Decoder(_Nbytes).decode


def find(paths: Sequence[str]) -> list[str]:
    """The trace files that paths stand for: files as they are, directories for those in them.

    Raises `CheckpointNotFoundError` for a path that is not there, or a directory without a trace.
    """
    found = []
    for path in paths:
        if os.path.isdir(path):
            names = sorted(name for name in os.listdir(path) if name.endswith(SUFFIX))
            if not names:
                raise CheckpointNotFoundError(
                    "there is no trace in the directory",
                    path=path,
                    hint="Config(trace=DIRECTORY) makes them, from the first save or restore that ends",
                )
            found += [os.path.join(path, name) for name in names]
        elif os.path.exists(path):
            found.append(path)
        else:
            raise CheckpointNotFoundError("there is no such file or directory", path=path)
    return list(dict.fromkeys(found))


def read_trace(path: str) -> TraceFile:
    """One process's file.

    Raises `CorruptCheckpointError`, with the number of the line, for whatever this package cannot have
    written; `UnsupportedFormatError` for what a later version wrote. A last line that was cut off by the end
    of the process is left out.
    """
    lines = _Lines(path)
    about: _About | None = None
    threads: dict[int, str] = {}
    spans: list[Span] = []
    dropped = 0
    for data in lines:
        try:
            event = _event(str(data, "utf-8"))
            if about is None:
                about = _about(event, path)
                continue
            if event.pid != process_number(about.rank, about.role):  # type: ignore[arg-type]
                raise ValueError(f"it is of process {event.pid}, not of rank {about.rank}'s {about.role}")
            if event.ph == "X":
                spans.append(_span(event))
            elif event.ph == "i":
                dropped += msgspec.json.decode(event.args, type=_Dropped).events
            elif event.ph != "M":
                raise ValueError(f"it is of a kind that is not recorded, {event.ph!r}")
            elif event.name == "thread_name":
                threads[event.tid] = msgspec.json.decode(event.args, type=_Name).name
        except (msgspec.MsgspecError, UnicodeError, ValueError, RecursionError) as error:
            raise lines.damaged(f"is not an event: {error}") from None
    if about is None:
        raise lines.damaged("is not the beginning of a trace")
    return TraceFile(
        path,
        about.rank,
        about.role,
        about.os_pid,
        about.host,
        about.boot_id,
        about.monotonic_us,
        about.unix_us - about.monotonic_us,
        threads,
        spans,
        dropped,
        lines.ended,
    )


class _Lines:
    """The events of a file, as bytes; knows the number of the line it is at."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._number = 0
        self.ended = False

    def __iter__(self) -> Iterator[bytes]:
        with open(self._path, "rb") as file:
            while data := file.readline(MAX_LINE_NBYTES):
                self._number += 1
                if not data.endswith(b"\n"):
                    if len(data) == MAX_LINE_NBYTES:
                        raise self.damaged(f"is longer than {MAX_LINE_NBYTES} bytes")
                    if self._number > 2:
                        return  # the process ended while it wrote this one
                if self.ended:
                    raise self.damaged("comes after the end")
                if self._number == 1:
                    if data != b"[\n":
                        raise self.damaged("is not the beginning of a trace")
                elif data == b"]\n":
                    self.ended = True
                elif self._number == 2:
                    yield data
                elif data.startswith(b","):
                    yield data[1:]
                else:
                    raise self.damaged("does not begin with a comma")

    def damaged(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"the trace is damaged: line {max(self._number, 1)} {what}",
            path=self._path,
            hint="move the file out of the directory to see the others",
        )


def _about(event: _Event, path: str) -> _About:
    if event.name != ABOUT:
        raise ValueError(f"a trace begins with {ABOUT!r}, not with {event.name!r}")
    version = msgspec.json.decode(event.args, type=dict[str, Any]).get("version")
    if type(version) is int and version > VERSION:
        raise UnsupportedFormatError(
            f"the trace has version {version}; this ckptengine reads up to {VERSION}", path=path
        )
    about = msgspec.json.decode(event.args, type=_About)
    if about.version != VERSION or about.role not in ROLES or not 0 <= about.rank <= MAX_RANK:
        raise ValueError(f"version {about.version}, rank {about.rank}, role {about.role!r} cannot be")
    if not (0 <= about.monotonic_us <= MAX_US and 0 <= about.unix_us <= MAX_US):
        raise ValueError("its clocks show impossible times")
    return about


def _span(event: _Event) -> Span:
    if not (0 <= event.ts <= MAX_US and 0 <= event.dur <= MAX_US):
        raise ValueError(f"it begins at {event.ts} µs and takes {event.dur} µs")
    if not 0 <= event.tid < 1 << 31:
        raise ValueError(f"its thread has the number {event.tid}")
    args = bytes(event.args)
    # Most events have some, and few a number of bytes.
    nbytes = _nbytes(args).bytes if b'"bytes"' in args else 0
    if not 0 <= nbytes <= MAX_US:
        raise ValueError(f"it is about {nbytes} bytes")
    empty = args == b"{}"
    if not empty and not args.startswith(b"{"):
        raise ValueError("its arguments are not an object")
    return Span(
        event.name, event.cat, event.tid, event.ts, event.ts + event.dur, nbytes, b"" if empty else args
    )
