"""What do many saves leave behind, in the trainer and in its writer? Nothing that grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptengine import Config
from native_bench.memory import BESIDE_ARENA_NBYTES, MIB, Held, arenas, beside_arena, growth, saves

KINDS = [("copy", "raw"), ("overlap", "raw"), ("copy", "zstd")]


def check(held: Held, codec: str, *, warm: int, window: int) -> None:
    for one in growth(held, warm=warm, window=window):
        assert one.flat, (
            f"{one.what} of the {one.process}: {one.then}, {len(held) - warm} saves later {one.now}"
        )
    assert arenas(held) <= held[0]["state"] * 1.01 + 4 * MIB, "one save at a time needs one arena"
    config = Config()
    # Each thread that compresses has a block as it is written.
    buffers = 0 if codec == "raw" else config.io_threads * config.block_nbytes
    assert beside_arena(held) <= BESIDE_ARENA_NBYTES + buffers


@pytest.mark.parametrize(("snapshot", "codec"), KINDS)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_saves_leave_nothing_behind(tmp_path: Path, snapshot: str, codec: str) -> None:
    held = saves(tmp_path / "root", 200, snapshot, codec)
    check(held, codec, warm=20, window=10)


@pytest.mark.parametrize(("snapshot", "codec"), KINDS)
@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.timeout(300)
def test_thirty_saves_leave_nothing_behind(tmp_path: Path, snapshot: str, codec: str) -> None:
    held = saves(tmp_path / "root", 30, snapshot, codec)
    check(held, codec, warm=12, window=6)
