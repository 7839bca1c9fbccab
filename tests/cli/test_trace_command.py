"""Does `ckpt trace` put traces together, and say what is wrong with one?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptengine.tracing.recorder import Recorder
from tests.cli.conftest import Run
from tests.helpers.trace_events import check, load, spans


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    made = tmp_path / "t"
    for rank in range(2):
        for role in ("trainer", "writer"):
            trace = Recorder(str(made), rank, role)  # type: ignore[arg-type]
            for i in range(3):
                trace.add("write", "io", i * 10**9, i * 10**9 + (rank + 1) * 10**8, {"bytes": 1 << 20})
            trace.add("save", "whole", 0, 3 * 10**9)
            trace.close()
    return made


def test_a_table_says_who_was_how_long_at_what(ckpt: Run, traces: Path) -> None:
    done = ckpt("trace", traces)
    assert done.code == 0
    rows = [line.split() for line in done.out.splitlines()]
    assert ["of", "2", "ranks,", "4", "traces,", "1", "machine"] in rows
    expected = "trainer io write 6 0.900 s 0.600 s 1 6.0 MiB 6.7 MiB/s"
    assert expected.split() in rows


def test_one_trace_of_all_is_written(ckpt: Run, traces: Path, tmp_path: Path) -> None:
    done = ckpt("trace", traces, "-o", tmp_path / "out.json", "--svg", tmp_path / "out.svg")
    assert done.code == 0
    assert "ui.perfetto.dev" in done.err
    events = load(tmp_path / "out.json")
    check(events)
    assert len(spans(events)) == 16
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {f"rank {rank} {role}" for rank in range(2) for role in ("trainer", "writer")}
    assert (tmp_path / "out.svg").read_text().startswith("<svg ")


def test_json_has_the_same(ckpt: Run, traces: Path) -> None:
    found = ckpt("trace", traces, "--json").json
    assert found["seconds"] == 3.0
    assert [one["rank"] for one in found["processes"]] == [0, 0, 1, 1]
    (writes,) = [one for one in found["totals"] if one["role"] == "writer" and one["name"] == "write"]
    assert (writes["count"], writes["longest_rank"], writes["nbytes"]) == (6, 1, 6 << 20)


def test_ranks_and_times_can_be_chosen(ckpt: Run, traces: Path) -> None:
    found = ckpt("trace", traces, "--json", "--rank", "1", "--start", "0.5", "--stop", "1.5").json
    assert {one["rank"] for one in found["processes"]} == {1}
    assert [one["count"] for one in found["totals"]] == [1, 1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--rank 7", "no trace is of rank 7"),
        ("--rank 0 --rank 7 --rank 8", "no trace is of rank 7-8"),
        ("--start -1", "-1"),
        ("--start nan", "must be a number of seconds"),
        ("--stop nan", "must be a number of seconds"),
        ("--start 5 --stop 1", "nothing can begin before 1 s and not before 5 s"),
        ("--stop 0", "nothing can begin before 0 s and not before 0 s"),
        ("--start 2.5", "nothing begins between these times; the trace is 3 s long"),
        ("--start inf", "nothing begins between these times"),
    ],
)
def test_a_choice_of_nothing_is_wrong_usage(ckpt: Run, traces: Path, options: str, why: str) -> None:
    found = ckpt("trace", traces, *options.split())
    assert (found.code, found.out) == (2, "")
    assert why in " ".join(found.err.replace("│", " ").split())


def test_the_last_event_can_be_chosen(ckpt: Run, traces: Path) -> None:
    found = ckpt("trace", traces, "--json", "--start", "2", "--stop", "inf").json
    assert [(one["name"], one["count"]) for one in found["totals"]] == [("write", 2), ("write", 2)]


def test_a_single_file_and_a_running_process_will_do(ckpt: Run, traces: Path) -> None:
    path = sorted(traces.iterdir())[0]
    path.write_bytes(path.read_bytes()[:-20])
    assert ckpt("trace", path).code == 0


def test_exit_codes(ckpt: Run, traces: Path, tmp_path: Path) -> None:
    assert ckpt("trace", tmp_path / "missing").code == 5
    assert ckpt("trace", tmp_path).code == 5
    assert ckpt("trace").code == 2
    path = sorted(traces.iterdir())[1]
    lines = path.read_text().splitlines()
    lines[5] = ",{}"
    path.write_text("\n".join(lines) + "\n")
    done = ckpt("trace", traces)
    assert done.code == 3
    assert "line 6 " in done.err
    assert path.name in done.err
    assert ckpt("trace", traces, "--json").json["error"]["kind"] == "damaged"
    lines[1] = lines[1].replace('"version":1', '"version":9')
    path.write_text("\n".join(lines) + "\n")
    assert ckpt("trace", traces).code == 6


def test_what_cannot_be_written_fails(ckpt: Run, traces: Path, tmp_path: Path) -> None:
    done = ckpt("trace", traces, "-o", tmp_path / "no" / "out.json")
    assert done.code != 0
    assert os.path.basename("out.json") in done.err


def test_names_of_a_hostile_trace_cannot_move_the_cursor(ckpt: Run, tmp_path: Path) -> None:
    trace = Recorder(str(tmp_path / "t"), 0, "trainer")
    trace.add("\x1b[2J", "io\x07", 0, 1000)  # type: ignore[arg-type]
    trace.close()
    done = ckpt("trace", tmp_path / "t")
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "\x07" not in done.out
