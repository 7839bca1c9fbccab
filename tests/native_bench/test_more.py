"""What is measured beside the comparison: each part comes to tables and targets; what fails, fails alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckptengine.write.methods import History
from native_bench import more, sections
from native_bench.memory import SavePeak, growth
from native_bench.memory import _section as memory_section
from native_bench.reshard import _section as reshard_section
from native_bench.slow_device import Device, Shard

ROOT = Path(__file__).parents[2]
# Each is a measurement of its own, of up to a minute where nothing else runs.
IN_A_SAMPLE = (pytest.mark.slow, pytest.mark.sample, pytest.mark.timeout(400))
SLOW_PARTS = ("step-time", "streaming", "codecs", "growth", "reshard", "exchange")


@pytest.mark.parametrize(
    "name",
    [
        "slow-device",
        *(pytest.param(name, marks=IN_A_SAMPLE) for name in SLOW_PARTS),
    ],
)
def test_every_part_comes_to_tables_and_targets(tmp_path: Path, name: str) -> None:
    section = more.run(name, tmp_path, tmp_path / "section.json", quick=True)
    assert section.error is None
    assert section.tables
    assert all(len(row) == len(table.head) for table in section.tables for row in table.rows)
    assert section.targets
    assert section.started
    assert section.seconds > 0
    assert [path.name for path in tmp_path.iterdir()] == ["section.json"]


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.timeout(400)
def test_memory_comes_to_tables_and_targets(tmp_path: Path) -> None:
    section = more.run("memory", tmp_path, tmp_path / "section.json", quick=True)
    assert section.error is None
    assert [target.met for target in section.targets] == [True] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["section.json"]


def test_the_row_of_a_save_s_memory_is_that_of_the_worst_codec() -> None:
    process = {"anonymous": 0, "shared": 0, "fds": 5, "threads": 3, "shm": 0}
    line = {"trainer": process, "writer": process, "arenas": 0, "state": 0}
    restores = {(codec, layout): 1 << 20 for codec in ("raw", "zstd") for layout in ("straight", "turned")}
    mib = 1 << 20
    for most, met in ((60, True), (61, False)):
        beside = {
            ("raw", "huge"): SavePeak(0, 63 * mib, True),
            ("zstd", "small"): SavePeak(4 * mib, most * mib, False),
        }
        made = memory_section(mib, restores, mib, beside, {"copy": [line] * 9}, warm=2, window=2)
        (row,) = (one for one in made.targets if one.figure == "memory of a save beside its arena")
        assert row.met is met
        assert row.measured.startswith(f"{most + 4} MiB at the peak (zstd, ")


def test_growth_is_that_of_the_least_of_each_window() -> None:
    def line(nbytes: int, fds: int) -> dict[str, object]:
        process = {"anonymous": nbytes, "shared": 0, "fds": fds, "threads": 3, "shm": 0}
        return {"trainer": process, "writer": process, "arenas": 0}

    held = [
        line(0, 0),
        line(9 << 20, 9),
        line(1 << 20, 5),
        line(8 << 20, 6),
        line(4 << 20, 5),
        line(9 << 20, 7),
    ]
    of = {one.what: one for one in growth(held, warm=2, window=2) if one.process == "writer"}
    assert (of["anonymous"].then, of["anonymous"].now, of["anonymous"].flat) == (1 << 20, 4 << 20, False)
    assert (of["fds"].then, of["fds"].now, of["fds"].flat) == (5, 5, True)


def test_a_slow_device_takes_its_time_and_gets_the_right_bytes(tmp_path: Path) -> None:
    shard = Shard(4 << 20)
    seconds = shard.write(Device(40 << 20), tmp_path / "raw", "raw", History())
    assert seconds > len(shard.data) / (40 << 20)
    assert shard.check(tmp_path / "raw") == (0.0, pytest.approx(1.0, rel=0.01))
    shard.write(Device(40 << 20), tmp_path / "zstd", "zstd", History())
    packed, ratio = shard.check(tmp_path / "zstd")
    assert packed == 1.0
    assert ratio > 1.1
    shard.data[5] ^= 1
    with pytest.raises(AssertionError, match="came back as something else"):
        shard.check(tmp_path / "raw")


def test_a_part_that_fails_or_hangs_is_an_error_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(more.sys, "executable", str(tmp_path / "python"))
    path = tmp_path / "out.json"
    said: list[str] = []
    for script, deadline_s, error in (
        ("echo the reason >&2; exit 3", 60.0, "the reason"),
        (f"sleep 3600 & echo $! > {tmp_path}/pid; wait", 1.0, "not done after 1 s"),
    ):
        (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "python").chmod(0o755)
        part = more.Part("A part", "nowhere", 1, deadline_s)
        monkeypatch.setitem(more.PARTS, "fake", part)
        section = more.run("fake", tmp_path, path, quick=True, say=said.append)
        assert section == sections.read(path)
        assert section.error == error
        assert said[-1] == f"fake failed: {error}"
    helper = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    assert not helper.exists() or helper.read_text().split()[2] == "Z"


def test_a_reshard_row_that_is_short_says_what_the_same_layout_comes_to() -> None:
    seconds = {"4 → 4, same layout": 2.0, "2 → 4": 4.0}
    for dcp, told in ((8.0, "the same layout's restore itself is 4.0 × DCP's"), (12.0, "")):
        samples = {
            f"{name}.{state}_s": [value]
            for name, value in {**seconds, "2 → 4, DCP": dcp}.items()
            for state in ("cold", "hot")
        }
        layout, peer = reshard_section(samples, quick=False).targets
        assert (layout.measured, layout.met) == ("0.50 × the same layout's rate", False)
        assert (peer.met, peer.note) == (not told, told)


def test_other_files_are_no_sections(tmp_path: Path) -> None:
    (tmp_path / "growth.json").write_text("[]")
    with pytest.raises(ValueError, match=r"growth\.json is no section"):
        more.found(tmp_path)


def test_programs_that_need_torch_start_without_its_warnings() -> None:
    script = "import warnings; from native_bench import growth; warnings.warn('mine')"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert "pynvml" not in done.stderr
    assert "mine" in done.stderr
