"""How do the traces of all processes become one, on one time axis, that Perfetto opens?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec

from ckptengine.tracing.files import Span, TraceFile

_THREADS_OF_A_FILE = 1 << 20
"""Numbers of one file's threads; a rank that was started again has several files."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Trace files whose clocks have been set beside each other.

    shifts: for each file, what makes its times microseconds from the first event of all on. began_us: that
    event, in Unix microseconds. length_us: from it to the last one's end.
    """

    files: tuple[TraceFile, ...]
    shifts: tuple[int, ...]
    began_us: int
    length_us: int

    def each(self) -> Iterator[tuple[TraceFile, int]]:
        return zip(self.files, self.shifts, strict=True)


def align(files: Sequence[TraceFile]) -> Timeline:
    """Processes of one machine have one clock, and get one offset to the wall clock: that which the first of
    them saw. Machines are as far apart as their wall clocks say."""
    ordered = sorted(files, key=lambda file: (file.process, file.monotonic_us, file.path))
    offsets: dict[str, int] = {}
    for file in sorted(files, key=lambda file: file.monotonic_us):
        offsets.setdefault(file.boot_id, file.offset_us)
    began = min(
        (min(span.began for span in file.spans) + offsets[file.boot_id] for file in ordered if file.spans),
        default=0,
    )
    ended = max(
        (max(span.ended for span in file.spans) + offsets[file.boot_id] for file in ordered if file.spans),
        default=began,
    )
    return Timeline(
        tuple(ordered),
        tuple(offsets[file.boot_id] - began for file in ordered),
        began,
        ended - began,
    )


def window(timeline: Timeline, start_us: int, stop_us: int) -> Timeline:
    """The events that begin within a part of the timeline, which begins anew with it."""
    files = tuple(
        replace(file, spans=[one for one in file.spans if start_us <= one.began + shift < stop_us])
        for file, shift in timeline.each()
    )
    ends = [
        one.ended + shift for file, shift in zip(files, timeline.shifts, strict=True) for one in file.spans
    ]
    return Timeline(
        files,
        tuple(shift - start_us for shift in timeline.shifts),
        timeline.began_us + start_us,
        max(ends, default=start_us) - start_us,
    )


def merged(timeline: Timeline) -> Iterator[bytes]:
    """One JSON object with all events, in pieces: a process for each rank's trainer and writer, a counter of
    the bytes that it has under way to and from storage."""
    about = {
        "began_unix_us": timeline.began_us,
        "processes": [
            {
                "name": file.name,
                "host": file.host,
                "os_pid": file.os_pid,
                "file": file.path,
                "ended": file.ended,
            }
            for file in timeline.files
        ],
    }
    yield b'{"displayTimeUnit":"ms","otherData":' + _json(about) + b',"traceEvents":[\n'
    first = True
    for event in _events(timeline):
        yield (b"" if first else b",\n") + event
        first = False
    yield b"\n]}\n"


def _events(timeline: Timeline) -> Iterator[bytes]:
    named: set[int] = set()
    in_storage: dict[int, list[tuple[int, int]]] = {}
    files_of: dict[int, int] = {}
    for file, shift in timeline.each():
        process = file.process
        number = files_of[process] = files_of.get(process, -1) + 1
        if process not in named:
            named.add(process)
            yield _meta(process, 0, "process_name", {"name": file.name})
            yield _meta(process, 0, "process_sort_index", {"sort_index": process})
        base = number * _THREADS_OF_A_FILE
        for thread, name in sorted(file.threads.items()):
            yield _meta(process, base + thread, "thread_name", {"name": name})
            yield _meta(process, base + thread, "thread_sort_index", {"sort_index": base + thread})
        for span in file.spans:
            yield _complete(span, process, base + span.thread, span.began + shift)
        in_storage.setdefault(process, []).extend(_changes(file.spans, shift))
        if file.dropped:
            args = {"events": file.dropped}
            yield _json(
                {"name": "events not recorded", "ph": "i", "s": "p", "ts": 0, "pid": process, "tid": base}
                | {"args": args}
            )
    for process, changes in in_storage.items():
        level = 0
        # What begins and ends in one microsecond must not make it negative.
        for at, now in groupby(sorted(changes), key=itemgetter(0)):
            level += sum(change for _, change in now)
            yield _json(
                {"name": "bytes in flight", "ph": "C", "ts": at, "pid": process, "args": {"bytes": level}}
            )


def _changes(spans: Iterable[Span], shift: int) -> Iterator[tuple[int, int]]:
    for span in spans:
        if span.category == "io" and span.name in ("read", "write"):
            yield span.began + shift, span.nbytes
            yield span.ended + shift, -span.nbytes


def _meta(process: int, thread: int, name: str, args: dict[str, Any]) -> bytes:
    return _json({"name": name, "ph": "M", "pid": process, "tid": thread, "args": args})


def _complete(span: Span, process: int, thread: int, began: int) -> bytes:
    event: dict[str, Any] = {
        "name": span.name,
        "cat": span.category,
        "ph": "X",
        "ts": began,
        "dur": span.ended - span.began,
        "pid": process,
        "tid": thread,
    }
    if span.args:
        event["args"] = msgspec.Raw(span.args)
    return _json(event)


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # the path of a trace file
        return msgspec.json.encode(_escaped(value))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _escaped(one) for key, one in value.items()}
    return [_escaped(one) for one in value] if isinstance(value, list) else value
