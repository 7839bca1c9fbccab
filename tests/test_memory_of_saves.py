"""How much memory do the trainer and its writer need beside the arena while saves run, and what do many leave
behind? Nothing that grows."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from native_bench import save_peak
from native_bench.memory import (
    BESIDE_ARENA_NBYTES,
    CODECS,
    MIB,
    Held,
    arenas,
    beside_arena,
    growth,
    saves,
)
from native_bench.memory import save_peak as peak_of_saves

KINDS = [("copy", "raw"), ("overlap", "raw"), ("copy", "zstd")]


def check(held: Held, *, warm: int, window: int) -> None:
    for one in growth(held, warm=warm, window=window):
        assert one.flat, (
            f"{one.what} of the {one.process}: {one.then}, {len(held) - warm} saves later {one.now}"
        )
    assert arenas(held) <= held[0]["state"] * 1.01 + 4 * MIB, "one save at a time needs one arena"
    # The buffers are gone; what is left is the C library's and zstd's.
    assert beside_arena(held) <= BESIDE_ARENA_NBYTES // 2


@pytest.mark.parametrize(("snapshot", "codec"), KINDS)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_saves_leave_nothing_behind(tmp_path: Path, snapshot: str, codec: str) -> None:
    held = saves(tmp_path / "root", 200, snapshot, codec)
    check(held, warm=20, window=10)


@pytest.mark.parametrize(("snapshot", "codec"), KINDS)
@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.timeout(300)
def test_thirty_saves_leave_nothing_behind(tmp_path: Path, snapshot: str, codec: str) -> None:
    held = saves(tmp_path / "root", 30, snapshot, codec)
    check(held, warm=12, window=6)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("pages", save_peak.PAGES)
@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.timeout(300)
def test_a_save_needs_little_beside_its_arena(tmp_path: Path, codec: str, pages: str) -> None:
    peak = peak_of_saves(tmp_path / "root", codec, pages, 128 * MIB, 2)
    told = f"trainer {peak.trainer / MIB:.1f} MiB, writer {peak.writer / MIB:.1f} MiB"
    assert peak.both <= BESIDE_ARENA_NBYTES, told
    if pages == "small" or codec == "zstd":
        assert peak.writer >= 16 * MIB, f"its buffers were not seen: {told}"


def test_what_is_freed_before_a_save_has_ended_is_seen(tmp_path: Path) -> None:
    def use(_: int) -> None:
        with mmap.mmap(-1, 40 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            for at in range(0, len(memory), mmap.PAGESIZE):
                memory[at] = 1

    without = save_peak.peaks(str(tmp_path / "without"), "raw", "huge", 4 * MIB, 1)
    used = save_peak.peaks(str(tmp_path / "used"), "raw", "huge", 4 * MIB, 1, during=use)
    assert without["trainer"] < 20 * MIB
    assert used["trainer"] - without["trainer"] > 30 * MIB
    assert used["arena"] < 30 * MIB


CHILD = """
import mmap, sys
shared = mmap.mmap(-1, 64 << 20)
shared.write(bytes(64 << 20))
for line in sys.stdin:
    own = mmap.mmap(-1, 48 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    own.write(bytes(48 << 20))
    own.close()
    print("freed", flush=True)
"""


def test_another_process_s_short_peak_is_seen_and_shared_memory_is_not_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for _ in range(2):
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "freed\n"
            before = save_peak.memory_of(child.pid)
            peak = save_peak.Peak(child.pid)
            quiet = peak.nbytes() - before["RssAnon"] - before["RssFile"]
            assert abs(quiet) < 2 * MIB
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "freed\n"
            seen = peak.nbytes() - before["RssAnon"] - before["RssFile"]
            assert 47 * MIB < seen < 52 * MIB
        child.stdin.close()
    assert child.returncode == 0
