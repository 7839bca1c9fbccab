"""Are damaged and hostile traces refused with the file's name and the line, and cut-off ones read?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptengine.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from ckptengine.tracing.files import find, read_trace
from ckptengine.tracing.recorder import Recorder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    trace = Recorder(str(tmp_path), 2, "trainer")
    for i in range(5):
        trace.add("read", "io", i * 10_000, i * 10_000 + 4000, {"bytes": 100, "file": "x"})
    trace.close()
    assert trace.path is not None
    return Path(trace.path)


def event(**changes: Any) -> str:
    return "," + json.dumps(
        {"name": "read", "cat": "io", "ph": "X", "ts": 1, "dur": 2, "pid": 5, "tid": 1} | changes
    )


def replace_line(path: Path, number: int, text: str | bytes) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(b"\n".join(lines))


def about(path: Path, **changes: Any) -> str:
    first = json.loads(path.read_text().split("\n")[1])
    first["args"] |= changes
    return json.dumps(first)


def test_the_written_file_is_read(path: Path) -> None:
    found = read_trace(str(path))
    assert [(one.began, one.ended, one.nbytes) for one in found.spans] == [
        (i * 10, i * 10 + 4, 100) for i in range(5)
    ]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "{"),
        (1, ""),
        (2, "{}"),
        (2, event()[1:]),
        (4, "not json"),
        (6, ",{"),
        (6, ","),
        (6, "[]"),
        (6, ",[1]"),
        (6, event()[1:]),
        (6, event(ts=-1)),
        (6, ',{"name":"a","ph":"X","pid":5,"tid":1,"ts":4}'),
        (6, ',{"name":"a","ph":"X","pid":5,"tid":1,"dur":4}'),
        (6, event(dur=-1)),
        (6, event(ts=1 << 60)),
        (6, event(ts=1.5)),
        (6, event(dur="1")),
        (6, event(tid=-1)),
        (6, event(tid=1 << 40)),
        (6, event(pid=6)),
        (6, event(ph="Q")),
        (6, event(name=3)),
        (6, event(args=[1])),
        (6, event(args={"bytes": -4})),
        (6, event(args={"bytes": "many"})),
        (6, event(args={"bytes": 1 << 60})),
        (6, event(ph="i", args={})),
        (6, event(ph="M", name="thread_name", args={"name": 4})),
        (6, b',{"name":"caf\xe9","ph":"X","pid":5,"tid":1}'),
        (6, b',{"name":"a","ph":"X","pid":5,"tid":1,"args":{"file":"caf\xe9"}}'),
        (6, "," + "[" * 100_000),
        (6, event(args={"x": "y" * (1 << 20)})),
        (6, "]"),
    ],
)
def test_a_damaged_line_is_named(path: Path, number: int, text: str | bytes) -> None:
    replace_line(path, number, text)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_trace(str(path))
    # What comes after an end is on the next line.
    wrong = number + 1 if text == "]" else number
    assert f"line {wrong} " in str(caught.value)
    assert caught.value.path == str(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 0},
        {"version": "1"},
        {"rank": -1},
        {"rank": 1 << 40},
        {"role": "king"},
        {"monotonic_us": -1},
        {"unix_us": 1 << 60},
        {"boot_id": None},
    ],
)
def test_a_beginning_that_cannot_be_is_refused(path: Path, changes: dict[str, Any]) -> None:
    replace_line(path, 2, about(path, **changes))
    with pytest.raises(CorruptCheckpointError, match="line 2 "):
        read_trace(str(path))


def test_a_later_versions_trace_is_said_to_be_one(path: Path) -> None:
    replace_line(path, 2, about(path, version=2, role="helper"))
    with pytest.raises(UnsupportedFormatError, match="version 2"):
        read_trace(str(path))


def test_an_empty_file_is_no_trace(path: Path) -> None:
    path.write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match="line 1 "):
        read_trace(str(path))


def test_wherever_a_file_is_cut_off_its_whole_lines_are_read(path: Path) -> None:
    data = path.read_bytes()
    begun = data.index(b"\n", 3) + 1
    for length in range(begun, len(data)):
        path.write_bytes(data[:length])
        found = read_trace(str(path))
        assert len(found.spans) == data[:length].count(b'"ph":"X"') - (
            b'"ph":"X"' in data[:length].rpartition(b"\n")[2]
        )
        assert not found.ended


def test_what_comes_after_the_end_is_damage(path: Path) -> None:
    path.write_bytes(path.read_bytes() + event().encode() + b"\n")
    with pytest.raises(CorruptCheckpointError, match="comes after the end"):
        read_trace(str(path))


def test_paths_stand_for_files(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    assert find([str(tmp_path)]) == [str(path)]
    assert find([str(path), str(tmp_path)]) == [str(path)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="no trace"):
        find([str(tmp_path / "empty")])
    with pytest.raises(CheckpointNotFoundError, match="no such"):
        find([str(tmp_path / "missing")])
