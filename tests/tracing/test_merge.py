"""Do the traces of several processes and machines come together on one time axis?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptengine.tracing import merge
from ckptengine.tracing.files import Span, TraceFile
from ckptengine.tracing.merge import align, merged, window
from ckptengine.tracing.picture import MAX_PROCESSES, picture
from ckptengine.tracing.totals import totals
from tests.helpers.trace_events import check, spans


def trace(
    rank: int = 0,
    role: str = "trainer",
    boot: str = "m",
    seen: int = 0,
    offset: int = 1_000_000,
    **changes: Any,
) -> TraceFile:
    """seen: when the file was begun, by its clock."""
    made = [
        Span("read", "io", 1, 100, 150, 4000, b'{"bytes":4000}'),
        Span("digest", "cpu", 1, 150, 170, 0, b""),
    ]
    values: dict[str, Any] = {
        "path": f"{rank}-{role}-{seen}",
        "rank": rank,
        "role": role,
        "os_pid": 10 + rank,
        "host": boot,
        "boot_id": boot,
        "monotonic_us": seen,
        "offset_us": offset,
        "threads": {1: "MainThread"},
        "spans": made,
        "dropped": 0,
        "ended": True,
    }
    return TraceFile(**values | changes)


def events_of(files: list[TraceFile]) -> list[dict[str, Any]]:
    found = json.loads(b"".join(merged(align(files))))
    check(found["traceEvents"])
    return found["traceEvents"]


def test_processes_of_one_machine_keep_their_clock_though_the_wall_clock_was_set_meanwhile() -> None:
    # The writer began later, and saw a wall clock that was an hour ahead.
    events = events_of([trace(), trace(role="writer", seen=50, offset=1_000_000 + 3_600_000_000)])
    assert {event["ts"] for event in spans(events, "read")} == {0}


def test_machines_are_set_beside_each_other_by_their_wall_clocks() -> None:
    events = events_of([trace(), trace(rank=1, boot="n", offset=1_000_030)])
    reads = {event["pid"]: event["ts"] for event in spans(events, "read")}
    assert reads == {1: 0, 3: 30}
    assert align([trace(), trace(rank=1, boot="n", offset=1_000_030)]).length_us == 100
    assert align([trace()]).began_us == 1_000_100


def test_a_rank_that_was_started_again_gets_threads_of_its_own() -> None:
    events = events_of([trace(seen=1), trace(seen=2)])
    reads = spans(events, "read")
    assert len({event["tid"] for event in reads}) == 2
    assert len([event for event in events if event["name"] == "process_name"]) == 1


def test_bytes_in_flight_go_up_and_down() -> None:
    made = [
        Span("read", "io", 1, 0, 10, 100, b""),
        Span("read", "io", 2, 5, 12, 50, b""),
        Span("read", "io", 3, 12, 12, 7, b""),
        Span("list", "io", 1, 20, 30, 0, b""),
    ]
    events = events_of([trace(spans=made)])
    counted = [(event["ts"], event["args"]["bytes"]) for event in events if event["ph"] == "C"]
    assert counted == [(0, 100), (5, 150), (10, 50), (12, 0)]


def test_arguments_go_through_as_they_are_and_dropped_events_are_told() -> None:
    events = events_of([trace(dropped=3)])
    assert spans(events, "read")[0]["args"] == {"bytes": 4000}
    assert "args" not in spans(events, "digest")[0]
    (note,) = [event for event in events if event["ph"] == "i"]
    assert note["args"] == {"events": 3}


def test_nothing_recorded_is_a_trace_too() -> None:
    assert events_of([trace(spans=[])])
    assert picture(align([trace(spans=[])])).endswith("</svg>\n")


def test_a_path_that_is_not_utf8_is_escaped() -> None:
    events_of([trace(path="caf\udce9")])


def test_a_window_begins_anew() -> None:
    made = [Span(f"s{i}", "io", 1, 1000 * i, 1000 * i + 500, 0, b"") for i in range(5)]
    part = window(align([trace(spans=made)]), 1000, 3000)
    assert [(one.name, one.began + part.shifts[0]) for one in part.files[0].spans] == [
        ("s1", 0),
        ("s2", 1000),
    ]
    assert (part.began_us, part.length_us) == (1_001_000, 1500)
    assert window(part, 5_000_000, 6_000_000).length_us == 0


def test_totals_name_the_rank_that_was_longest() -> None:
    slow = [Span("read", "io", 1, 0, 5_000_000, 1000, b""), Span("read", "io", 2, 0, 1_000_000, 1000, b"")]
    found = totals([trace(), trace(rank=4, spans=slow), trace(role="writer")])
    assert [(one.role, one.category, one.name) for one in found] == [
        ("trainer", "io", "read"),
        ("trainer", "cpu", "digest"),
        ("writer", "io", "read"),
        ("writer", "cpu", "digest"),
    ]
    first = found[0]
    assert (first.count, first.ranks, first.nbytes) == (3, 2, 6000)
    assert first.seconds == pytest.approx(6.00005)
    assert (first.longest_rank, first.longest_seconds) == (4, 6.0)


def test_a_picture_has_a_row_for_each_thread_and_stays_small() -> None:
    # Reads and digests that take turns, as in a restore from the page cache.
    made = []
    for thread in range(1, 9):
        for i in range(0, 1_000_000, 100):
            made.append(Span("read", "io", thread, i, i + 60, 1, b""))
            made.append(Span("digest", "cpu", thread, i + 60, i + 99, 0, b""))
    text = picture(align([trace(spans=made, threads={n: f"<{n}>" for n in range(1, 9)})]), title="a & b")
    assert len(text) < 20_000
    assert text.count('class="read" d=') == text.count('class="digest" d=') == 8
    assert "&lt;8&gt;" in text
    assert "a &amp; b" in text
    assert "<script" not in text


def test_shares_of_a_column_are_heights(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Span("read", "io", 1, 0, 750, 1, b""), Span("digest", "cpu", 1, 750, 1000, 0, b"")]
    monkeypatch.setattr("ckptengine.tracing.picture._COLUMN", 838)
    text = picture(align([trace(spans=made)]))
    # Of a row of 12, in steps of 2.
    assert "v8h-838z" in text.split('class="read" d="')[1].split('"')[0]
    assert "v4h-838z" in text.split('class="digest" d="')[1].split('"')[0]


def test_a_picture_of_many_ranks_says_how_many_are_not_in_it() -> None:
    text = picture(align([trace(rank=rank) for rank in range(MAX_PROCESSES + 5)]))
    assert "and 5 more processes" in text
    assert f"rank {MAX_PROCESSES} trainer" not in text


def test_a_hostile_name_or_thread_stays_text(tmp_path: Path) -> None:
    made = [Span('"/><script>', "io", 1, 0, 5, 0, b"")]
    text = picture(align([trace(spans=made, threads={1: '"/><script>'})]), title="</title><script>")
    assert "<script" not in text


def test_files_of_one_process_are_in_the_order_they_were_begun() -> None:
    assert [file.monotonic_us for file in align([trace(seen=9), trace(seen=3)]).files] == [3, 9]
    assert merge.align([]).length_us == 0
