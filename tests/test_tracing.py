"""Is all I/O of real saves and restores in the trace, of trainer and writer process, and nothing where it is
off?"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import ckptengine as ck
from ckptengine.format.names import step_dirname
from ckptengine.tracing import recorder
from ckptengine.tracing.files import find, read_trace
from ckptengine.tracing.merge import align, merged
from tests.helpers.checkpoints import flip, read_manifest
from tests.helpers.trace_events import Event, check, load, spans

BLOCK = 65536


@pytest.fixture(autouse=True)
def _one_writer(lent_writer: None) -> None:
    pass


def state() -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((50_000,), float(i)) for i in range(6)} | {
        "turned": torch.ones(9, 200).T
    }


def traced(tmp_path: Path, **options: object) -> ck.Checkpointer:
    config = {"block_nbytes": BLOCK, "trace": str(tmp_path / "t"), **options}
    return ck.Checkpointer(tmp_path / "root", config=ck.Config(**config))  # type: ignore[arg-type]


def events_of(tmp_path: Path, role: str) -> list[Event]:
    found = []
    for path in sorted((tmp_path / "t").glob(f"rank-00000-{role}-*")):
        events = load(path)
        check(events)
        found += events
    return found


def until(condition: Callable[[], object], what: str) -> None:
    # The writer puts its events down when it has told how the save ended.
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def writer_saved(tmp_path: Path, steps: int) -> bool:
    return len(spans(events_of(tmp_path, "writer"), "save")) == steps


def covered(events: list[Event], file: str) -> list[tuple[int, int]]:
    found = [event["args"] for event in events if event["args"].get("file") == file]
    return sorted({(args["offset"], args["offset"] + args["bytes"]) for args in found})


def whole(pieces: list[tuple[int, int]]) -> tuple[int, int]:
    """Pieces that follow one another, as one."""
    for (_, stop), (start, _) in pairwise(pieces):
        assert stop == start, pieces
    return pieces[0][0], pieces[-1][1]


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_every_byte_written_and_read_is_in_the_trace(tmp_path: Path, direct_io: str) -> None:
    with traced(tmp_path, direct_io=direct_io) as ckpt:
        ckpt.save(1, state())
        until(lambda: writer_saved(tmp_path, 1), "the writer's trace of the save")
        ckpt.restore(state())
    manifest = read_manifest(tmp_path / "root" / step_dirname(1))
    file = f"{step_dirname(1)}/{manifest.shards[0].path}"
    size, header = manifest.shards[0].size, manifest.shards[0].header_nbytes
    written = events_of(tmp_path, "writer")
    read = events_of(tmp_path, "trainer")
    assert whole(covered(spans(written, "write"), file)) == (0, size)
    assert whole(covered(spans(read, "read"), file)) == (0, size)
    assert {event["args"]["way"] for event in spans(read, "read")} <= {"cache", "direct", "buffered"}
    # The header is written last, and after it comes the fsync.
    last = max(spans(written, "write"), key=lambda event: event["ts"])
    assert (last["args"]["offset"], last["args"]["bytes"]) == (0, header)
    (sync,) = spans(written, "fsync")
    assert sync["ts"] >= last["ts"] + last["dur"]
    published = [event["args"]["file"] for event in spans(written, "publish")]
    assert published == [f"{step_dirname(1)}/INDEX", f"{step_dirname(1)}/MANIFEST.json"]
    blocks = spans(read, "block")
    assert len(blocks) == len(spans(written, "block")) == -(-(size - header) // BLOCK)
    assert sum(event["args"]["bytes"] for event in blocks) == size - header
    assert blocks[0]["args"]["first"]
    digested = sum(event["args"]["bytes"] for event in read if event["name"].startswith("digest"))
    assert digested == size - header
    for name in ("restore", "plan", "metadata", "apply", "read the shards", "flatten", "get arena"):
        assert spans(read, name), name


def test_a_compressed_shards_codec_is_in_the_trace(tmp_path: Path) -> None:
    with traced(tmp_path, codec="zstd") as ckpt:
        ckpt.save(1, state())
        until(lambda: writer_saved(tmp_path, 1), "the writer's trace of the save")
        ckpt.restore(state())
    assert spans(events_of(tmp_path, "writer"), "compress")
    assert spans(events_of(tmp_path, "trainer"), "decompress")


@pytest.mark.parametrize("snapshot", ["copy", "overlap"])
def test_the_trace_of_all_processes_has_one_clock(tmp_path: Path, snapshot: str) -> None:
    with traced(tmp_path, snapshot=snapshot) as ckpt:
        for step in (1, 2):
            ckpt.async_save(step, state()).result()
        until(lambda: writer_saved(tmp_path, 2), "the writer's trace of the saves")
        ckpt.restore(state())
    timeline = align([read_trace(path) for path in find([str(tmp_path / "t")])])
    (tmp_path / "all.json").write_bytes(b"".join(merged(timeline)))
    events = load(tmp_path / "all.json")
    check(events)
    # A writer's save lies within what the trainer's monitor saw of it; the copy comes before the write.
    ours = [event for event in spans(events, "save") if event["pid"] == 1]
    writers = [event for event in spans(events, "save") if event["pid"] == 2]
    assert len(ours) == len(writers) == 2
    for outer, inner in zip(ours, writers, strict=True):
        assert outer["ts"] <= inner["ts"] <= outer["ts"] + outer["dur"]
    (restored,) = spans(events, "restore")
    assert restored["ts"] >= writers[-1]["ts"]


def test_a_failed_restore_is_in_the_trace(tmp_path: Path) -> None:
    with traced(tmp_path) as ckpt:
        ckpt.save(1, state())
        shard = read_manifest(tmp_path / "root" / step_dirname(1)).shards[0]
        flip(tmp_path / "root" / step_dirname(1) / shard.path, shard.header_nbytes + 5000)
        with pytest.raises(ck.CorruptCheckpointError):
            ckpt.restore(state(), step=1)
        assert spans(events_of(tmp_path, "trainer"), "restore")


def test_a_killed_writer_leaves_its_trace_and_the_next_one_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # a writer of its own
    with traced(tmp_path, retries=1) as ckpt:
        ckpt.save(1, state())
        until(lambda: writer_saved(tmp_path, 1), "the writer's trace of the save")
        assert ckpt.writer_pid is not None
        os.kill(ckpt.writer_pid, signal.SIGKILL)
        ckpt.save(2, state())
        until(lambda: writer_saved(tmp_path, 2), "the next writer's trace of the save")
    files = [file for file in map(read_trace, find([str(tmp_path / "t")])) if file.role == "writer"]
    assert len({file.os_pid for file in files}) == 2
    assert not files[0].ended


def test_without_it_nothing_is_recorded(tmp_path: Path) -> None:
    with ck.Checkpointer(tmp_path / "root", config=ck.Config(block_nbytes=BLOCK)) as ckpt:
        ckpt.save(1, state())
        ckpt.restore(state())
        assert recorder.current is None
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_trace_that_cannot_be_written_fails_no_save_and_no_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t").write_text("in the way")
    with traced(tmp_path) as ckpt:
        ckpt.save(1, state())
        assert ckpt.restore(state()).step == 1
    assert any("the trace in" in text for text in caplog.messages)


def test_what_a_trace_may_be_is_checked() -> None:
    for wrong in ("", 5, Path("/tmp")):
        with pytest.raises(ValueError, match="trace must be"):
            ck.Config(trace=wrong)  # type: ignore[arg-type]
    for wrong in (0, -1.0, float("nan"), float("inf"), "fast", True):
        with pytest.raises(ValueError, match="storage_gbps must be"):
            ck.Config(storage_gbps=wrong)  # type: ignore[arg-type]
