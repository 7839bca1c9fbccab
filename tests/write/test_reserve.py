"""Is as much memory held back for a writer process as one takes?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckptengine as ck
from ckptengine.write import reserve
from ckptengine.write.reserve import WRITER_NBYTES, check_room, needed_nbytes, working_nbytes
from native_bench.memory import BESIDE_ARENA_NBYTES
from native_bench.save_peak import memory_of

MIB = 1 << 20


def test_a_writer_that_has_saved_has_no_more_than_was_held_back_for_it(tmp_path: Path) -> None:
    with ck.Checkpointer(tmp_path, config=ck.Config(codec="zstd")) as ckpt:
        ckpt.save(1, {"nothing": None})
        assert ckpt.writer_pid is not None
        own = memory_of(ckpt.writer_pid)["RssAnon"]
        assert WRITER_NBYTES / 4 < own < WRITER_NBYTES * 0.8
        assert Path(f"/proc/{ckpt.writer_pid}/oom_score_adj").read_text() == "1000\n"
        assert ckpt._saver is not None
        monitor = ckpt._saver._monitor
        assert monitor.needed_nbytes() == working_nbytes(ckpt.config), "it has its own already"
        os.kill(ckpt.writer_pid, 9)
        monitor._writer._process.join()  # type: ignore[union-attr]
        assert monitor.needed_nbytes() == WRITER_NBYTES + working_nbytes(ckpt.config)


def test_a_process_that_is_starting_will_only_take_what_it_has_not_yet() -> None:
    config = ck.Config()
    nothing_yet = needed_nbytes(config, None)
    assert nothing_yet == WRITER_NBYTES + working_nbytes(config)
    code = "held = bytearray(b'1') * (100 << 20); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starting:
        assert starting.stdout is not None
        starting.stdout.readline()
        assert 100 * MIB <= nothing_yet - needed_nbytes(config, starting.pid) < 120 * MIB
        starting.kill()
    assert needed_nbytes(config, starting.pid) == nothing_yet, "it is gone"


@pytest.mark.parametrize("codec", ["raw", "zstd", "auto"])
def test_by_default_what_is_held_back_is_what_a_save_may_take(codec: str) -> None:
    assert BESIDE_ARENA_NBYTES * 0.75 < working_nbytes(ck.Config(codec=codec)) <= BESIDE_ARENA_NBYTES  # type: ignore[arg-type]


def test_threads_blocks_and_levels_make_it_more() -> None:
    assert working_nbytes(ck.Config(io_threads=16)) == (24 * 8 + 16) * MIB
    assert working_nbytes(ck.Config(block_nbytes=1 * MIB)) == (6 + 16) * MIB
    large = ck.Config(codec="zstd", block_nbytes=256 * MIB)
    assert working_nbytes(large) > 4 * 256 * MIB
    strong = ck.Config(codec="zstd", zstd_level=19)
    assert working_nbytes(strong) > working_nbytes(ck.Config(codec="zstd")) + 4 * 64 * MIB


def test_no_room_says_what_is_needed_and_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "available_memory", lambda: 10)
    check_room(10, 3)
    with pytest.raises(ck.SaveFailedError, match=r"10 bytes are available.* needs 11 .*rank 3.*free memory"):
        check_room(11, 3)
    monkeypatch.setattr(reserve, "available_memory", lambda: None)
    check_room(1 << 60, 3)
