"""Is this a trace as the trace event format has it?

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: an array of objects, which
need not be ended, or an object with `traceEvents`; complete events (`X`) of one thread lie within each other
or apart, and Perfetto drops those that do not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def load(path: Path | str) -> list[Event]:
    """The events of a trace, which a crash, or the moment in which it is looked at, may have left without its
    end: also in the middle of a line."""
    text = Path(path).read_text()
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = json.loads(text[: text.rfind("\n")].removesuffix(",") + "]")
    return found["traceEvents"] if isinstance(found, dict) else found


def check(events: list[Event]) -> None:
    """Raises AssertionError for whatever breaks a rule."""
    threads: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    named: set[int] = set()
    for event in events:
        assert type(event) is dict, event
        assert type(event["name"]) is str, event
        # 0 is taken for the idle process.
        assert _is_number(event["pid"]) > 0, event
        assert event.keys() <= {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args", "s"}, event
        assert type(event.get("args", {})) is dict, event
        kind = event["ph"]
        if kind == "M":
            key = {
                "process_name": "name",
                "thread_name": "name",
                "process_sort_index": "sort_index",
                "thread_sort_index": "sort_index",
                "ckptengine trace": "version",
            }[event["name"]]
            assert type(event["args"][key]) is (str if key == "name" else int), event
            if event["name"] == "process_name":
                named.add(event["pid"])
            continue
        assert _is_number(event["ts"]) >= 0, event
        if kind == "C":
            assert all(_is_number(value) >= 0 for value in event["args"].values()), event
        elif kind == "i":
            assert event["s"] in ("g", "p", "t"), event
        else:
            assert kind == "X", event
            assert _is_number(event["dur"]) >= 0, event
            assert _is_number(event["tid"]) > 0, event
            lane = threads.setdefault((event["pid"], event["tid"]), [])
            lane.append((event["ts"], -event["dur"], event["name"]))
    assert {event["pid"] for event in events} <= named, "a process has no name"
    for lane in threads.values():
        around: list[tuple[int, str]] = []
        for began, minus, name in sorted(lane):
            ended = began - minus
            while around and around[-1][0] <= began:
                around.pop()
            assert not around or ended <= around[-1][0], (
                f"{name} ends after {around[-1][1]}, in which it began"
            )
            around.append((ended, name))


def _is_number(value: Any) -> int:
    assert type(value) is int, value
    return value


def spans(events: list[Event], name: str | None = None) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and name in (None, event["name"])]
