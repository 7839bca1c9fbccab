"""Does the machine's condition say what a figure has to be read beside?"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from native_bench import page_cache
from native_bench.condition import GIB, Condition, condition_of
from native_bench.mounts import mount_of


@pytest.fixture(scope="module")
def condition() -> Condition:
    return condition_of(".")


def quiet(condition: Condition) -> Condition:
    return dataclasses.replace(
        condition,
        cores_usable=4,
        cgroup_cores=None,
        load=(0.1, 0.1, 0.1),
        pressure={"cpu": 0.0},
        dirty=0,
        writeback=0,
        memory_available=8 * GIB,
        cgroup_memory=None,
        swap_used=0,
        space_free=100 * GIB,
        governor=None,
        transparent_huge_pages="madvise",
        can_drop_caches=True,
        streaming="loaded",
    )


def test_it_agrees_with_the_system(condition: Condition, tmp_path: Path) -> None:
    assert condition.cores_usable == len(os.sched_getaffinity(0))
    assert 0 < condition.memory_available <= condition.memory_total
    assert condition.kernel == os.uname().release
    assert condition_of(tmp_path).directory == str(tmp_path.resolve())
    assert condition.packages["torch"]


def test_a_quiet_machine_has_no_warnings(condition: Condition) -> None:
    assert quiet(condition).warnings == ()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"load": (2.1, 0.0, 0.0)}, "load is 2.10"),
        ({"load": (0.6, 0.0, 0.0), "cgroup_cores": 1.0}, "on 1 cores"),
        ({"pressure": {"io": 79.0}}, "waited for io"),
        ({"dirty": 1 << 30}, "1.0 GiB wait to be written back"),
        ({"memory_available": 1 << 30}, "only 1.0 GiB of memory"),
        ({"cgroup_memory": 1 << 30}, "cgroup"),
        ({"swap_used": 1 << 30}, "swapped out"),
        ({"space_free": 1 << 30}, "are free in"),
        ({"governor": "powersave"}, "powersave"),
        ({"transparent_huge_pages": "never"}, "huge pages are off"),
        ({"can_drop_caches": False}, "posix_fadvise"),
        pytest.param(
            {"streaming": "not built"},
            "without its compiled helper (not built)",
            marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="nothing to be built"),
        ),
    ],
)
def test_it_warns_of_what_spoils_figures(condition: Condition, change: dict[str, object], word: str) -> None:
    (warning,) = dataclasses.replace(quiet(condition), **change).warnings
    assert word in warning


def test_the_cgroup_limits_the_cores(condition: Condition) -> None:
    assert dataclasses.replace(condition, cores_usable=4, cgroup_cores=1.5).cores == 1.5
    assert dataclasses.replace(condition, cores_usable=2, cgroup_cores=8.0).cores == 2


def test_as_json_and_as_markdown(condition: Condition) -> None:
    loud = dataclasses.replace(quiet(condition), load=(9.0, 9.0, 9.0), cpu_model="a|b")
    told = json.loads(json.dumps(loud.to_json()))
    assert told["mount"]["file_system"] == condition.mount.file_system
    assert len(told["warnings"]) == 1
    markdown = loud.to_markdown()
    assert r"| CPU | a\|b |" in markdown
    assert "**Warning:** load is 9.00" in markdown


def test_as_a_program(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "native_bench.condition", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert json.loads(run("--json", str(tmp_path)).stdout)["directory"] == str(tmp_path.resolve())
    absent = run(str(tmp_path / "absent"))
    assert (absent.returncode, absent.stdout) == (1, "")
    assert "absent: No such file or directory" in absent.stderr


def test_the_innermost_mount_is_found(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n"
        "28 27 0:30 / /fsx rw,noatime shared:1 - lustre 10.0.0.1@tcp:/abc rw,flock\n"
        "29 27 0:31 / /fsx\\040two ro - nfs4 server:/export ro,vers=4.2\n"
        "30 27 0:32 / /fsx rw - tmpfs tmpfs rw,size=1k\n"
        "garbage\n"
    )
    assert mount_of("/fsx/run/1", table).file_system == "tmpfs", "mounted over the first"
    two = mount_of("/fsx two/run", table)
    assert (two.point, two.file_system, two.source) == ("/fsx two", "nfs4", "server:/export")
    assert two.options == "ro; ro,vers=4.2"
    assert mount_of("/fsxother", table).point == "/"
    assert mount_of("/", tmp_path / "absent").file_system == "?"


def test_dropping_caches_says_how_it_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "below" / "file"
    file.parent.mkdir()
    file.write_bytes(os.urandom(1 << 20))
    monkeypatch.setattr(page_cache, "DROP_CACHES", tmp_path / "absent")
    assert not page_cache.can_drop_caches()
    before = page_cache.cached_bytes([file])
    assert page_cache.drop_caches() == "none"
    assert page_cache.drop_caches([tmp_path]) == "posix_fadvise"
    if before is None:
        pytest.skip("cachestat is Linux 6.5 and later")
    assert before == 1 << 20
    if condition_of(tmp_path).mount.file_system == "tmpfs":
        pytest.skip("tmpfs has its files in the page cache and nowhere else")
    assert page_cache.cached_bytes([tmp_path]) == 0


def test_files_that_go_while_the_cache_is_seen_to_are_passed_over(tmp_path: Path) -> None:
    """As the engine's old steps do, which it removes in the background."""
    root = tmp_path / "root"
    kept = root / "kept"
    gone = threading.Event()

    def come_and_go() -> None:
        step = root / "step"
        while not gone.is_set():
            step.mkdir()
            for name in "abc":
                (step / name).touch()
            shutil.rmtree(step)

    root.mkdir()
    kept.write_bytes(bytes(5000))
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(300):
            assert page_cache.evict([root]) >= 1
            page_cache.fill([root])
            assert page_cache.cached_bytes([root]) in (8192, None)
    finally:
        gone.set()
        thread.join()
    with pytest.raises(FileNotFoundError, match="never"):
        page_cache.fill([root / "never"])


def test_dropping_the_whole_cache_asks_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "drop_caches"
    asked.touch()
    synced: list[str] = []
    monkeypatch.setattr(page_cache, "DROP_CACHES", asked)
    monkeypatch.setattr(os, "sync", lambda: synced.append(asked.read_text()))
    assert page_cache.drop_caches() == "drop_caches"
    assert asked.read_text() == "1\n"
    assert synced == [""], "dirty pages are written back first, else they stay"
