"""Arenas are shared between processes, bounded, reused, and safe to close under whoever still looks."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptengine.errors import SaveFailedError, StorageError
from ckptengine.staging import arena as arena_module
from ckptengine.staging.arena import Arena, attach
from ckptengine.staging.status import STATUS_NBYTES
from ckptengine.storage.direct import HUGE_PAGE
from ckptengine.storage.failures import storage_error
from ckptengine.storage.linux import address_of
from ckptengine.storage.posix import PosixStore

MIB = 1 << 20
GRAIN = 2 * MIB


def open_descriptors() -> set[str]:
    gc.collect()  # what earlier tests dropped must not go while this one counts
    return set(os.listdir("/proc/self/fd"))


def resident_nbytes() -> int:
    with open("/proc/self/smaps") as file:
        lines = file.read().split("\n")
    total, ours = 0, False
    for line in lines:
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            ours = "/memfd:ckptengine-arena" in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def huge_nbytes(address: int) -> int:
    """How much of the mapping at an address is in huge pages, as the kernel tells."""
    lines = iter(Path("/proc/self/smaps").read_text().split("\n"))
    next(line for line in lines if line.startswith(f"{address:x}-"))
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("ShmemPmdMapped:"))


class TestArena:
    def test_layout(self) -> None:
        with Arena(5 * MIB) as arena:
            assert arena.capacity == 6 * MIB
            assert len(arena.view) == STATUS_NBYTES + arena.capacity
            assert len(arena.payload) == arena.capacity
            assert address_of(arena.view) == arena.address
            assert address_of(arena.payload) == arena.payload_address
            assert arena.payload_address % 4096 == 0
            assert not arena.payload.readonly
            assert arena.status.read() is None
            arena.payload[:] = b"\xff" * arena.capacity
            assert arena.status.read() is None, "payload and status do not overlap"
        with Arena(0) as empty:
            assert len(empty.payload) == 0
        with pytest.raises(ValueError, match="negative"):
            Arena(-1)

    @pytest.mark.parametrize("kernel", ["this", "without huge pages", "of before 5.14"])
    def test_every_page_is_there_before_it_is_used(
        self, kernel: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if kernel == "of before 5.14":

            def refuse(*args: int) -> None:
                raise OSError(errno.EINVAL, "an old kernel")

            monkeypatch.setattr(arena_module, "madvise", refuse)
        if kernel != "this":
            monkeypatch.setattr(arena_module, "collapse", lambda *args: False)
        gc.collect()
        before = resident_nbytes()
        # More than one piece, so that several threads are at it.
        with Arena(150 * MIB) as arena:
            assert resident_nbytes() - before == STATUS_NBYTES + arena.capacity
            assert not any(arena.payload[::MIB])

    def test_it_says_whether_it_is_in_huge_pages(self) -> None:
        with Arena(64 * MIB) as arena:
            assert arena.address % HUGE_PAGE == 0
            whole = STATUS_NBYTES + arena.capacity
            assert arena.huge == (huge_nbytes(arena.address) >= 0.9 * whole)
            with attach(os.getpid(), arena.fd, arena.capacity) as again:
                assert again.address % HUGE_PAGE == 0
                arena.payload[-3:] = b"end"
                assert bytes(again.payload[-3:]) == b"end"

    def test_it_does_not_go_on_asking_for_huge_pages_in_vain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []
        monkeypatch.setattr(arena_module, "collapse", lambda address, nbytes: asked.append(address))
        with Arena(300 * MIB) as arena:
            assert not arena.huge
        # As many as are tried, and one more for each thread that was at it.
        assert len(asked) <= 16 + 8

    def test_huge_pages_that_take_too_long_are_done_without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []
        monkeypatch.setattr(arena_module, "_COLLAPSE_GRACE_S", -1.0)
        monkeypatch.setattr(arena_module, "collapse", lambda address, nbytes: asked.append(address))
        gc.collect()
        before = resident_nbytes()
        with Arena(64 * MIB) as arena:
            assert (arena.huge, asked) == (False, [])
            assert resident_nbytes() - before == STATUS_NBYTES + arena.capacity

    def test_close_under_views_and_tensors_leaves_them_usable(self) -> None:
        torch = pytest.importorskip("torch")
        before = open_descriptors()
        arena = Arena(GRAIN)
        view = arena.payload[:100]
        tensor = torch.frombuffer(arena.payload, dtype=torch.uint8)
        arena.close()
        arena.close()
        assert arena.fd == -1
        view[:3] = b"abc"
        tensor[3] = 7
        assert tensor[:4].tolist() == [97, 98, 99, 7]
        for attribute in ("view", "payload", "status"):
            with pytest.raises(ValueError, match="closed"):
                getattr(arena, attribute)
        del view, tensor
        gc.collect()
        assert open_descriptors() == before
        assert resident_nbytes() == 0

    def test_nobody_can_shrink_it_under_a_mapping(self) -> None:
        with Arena(GRAIN) as arena, pytest.raises(PermissionError):
            os.ftruncate(arena.fd, 0)

    def test_no_memory_is_a_named_error_and_leaks_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: int) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        monkeypatch.setattr(arena_module, "madvise", refuse)
        before = open_descriptors()
        with pytest.raises(SaveFailedError, match="no memory for a snapshot"):
            Arena(GRAIN)
        gc.collect()
        assert open_descriptors() == before

    def test_a_limit_of_the_process_is_a_named_error(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MIB, hard))
        try:
            with pytest.raises(SaveFailedError, match="no memory for a snapshot"):
                Arena(512 * MIB)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def test_a_limit_on_file_sizes_is_named_and_leaks_nothing(self) -> None:
        before = open_descriptors()
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limit[1]))
        try:
            with pytest.raises(SaveFailedError, match=r"^the limit on file sizes does not allow") as caught:
                Arena(4 * MIB)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert "ulimit -f" in (caught.value.hint or "")
        assert open_descriptors() == before

    @pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
    def test_no_descriptor_is_said_to_be_that_with_the_same_advice_as_for_a_file(
        self, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*args: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "memfd_create", refuse)
        with pytest.raises(SaveFailedError, match=r"^no file descriptor for a snapshot") as caught:
            Arena(GRAIN)
        assert caught.value.hint == storage_error(OSError(number, ""), "/file", "open").hint

    def test_direct_writes_go_straight_from_it(self, tmp_path: Path) -> None:
        with Arena(GRAIN) as arena:
            arena.payload[:] = os.urandom(GRAIN)
            writer = PosixStore().create(str(tmp_path / "file"), nbytes=GRAIN)
            writer.pwrite(0, arena.payload)
            assert writer.finish() == GRAIN
            assert (tmp_path / "file").read_bytes() == bytes(arena.payload)


class TestAttach:
    def test_both_processes_see_the_same_bytes(self) -> None:
        code = """
import sys
from ckptengine.staging.arena import attach
with attach(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])) as arena:
    assert bytes(arena.payload[:5]) == b"hello"
    arena.payload[-5:] = b"world"
    arena.status.write({"pid": "child"})
"""
        with Arena(3 * MIB) as arena:
            arena.payload[:5] = b"hello"
            command = [sys.executable, "-c", code, str(os.getpid()), str(arena.fd), str(arena.capacity)]
            subprocess.run(command, check=True)
            assert bytes(arena.payload[-5:]) == b"world"
            assert arena.status.read_json() == {"pid": "child"}

    def test_a_killed_owner_leaves_the_memory_to_whoever_is_attached(self) -> None:
        code = """
import time
from ckptengine.staging.arena import Arena
arena = Arena(1 << 20)
arena.payload[:4] = b"live"
print(arena.fd, arena.capacity, flush=True)
time.sleep(600)
"""
        owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        try:
            assert owner.stdout is not None
            fd, capacity = map(int, owner.stdout.readline().split())
            arena = attach(owner.pid, fd, capacity)
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.communicate()
        with arena:
            assert bytes(arena.payload[:4]) == b"live"
        with pytest.raises(StorageError, match="could not attach") as caught:
            attach(owner.pid, fd, capacity)
        assert caught.value.errno == errno.ENOENT

    def test_what_is_not_the_announced_arena_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(STATUS_NBYTES + GRAIN))
        before = open_descriptors()
        with open(tmp_path / "file", "r+b") as file, Arena(GRAIN) as arena:
            with pytest.raises(StorageError, match="not an arena"):
                attach(os.getpid(), file.fileno(), GRAIN)
            with pytest.raises(StorageError, match="another size"):
                attach(os.getpid(), arena.fd, 2 * GRAIN)
            with pytest.raises(StorageError, match="could not attach"):
                attach(os.getpid(), 987_654, GRAIN)
        assert open_descriptors() == before

    def test_it_is_not_inherited_by_programs_started_from_here(self) -> None:
        with Arena(GRAIN) as arena:
            code = f"import os; print(os.path.exists('/proc/self/fd/{arena.fd}'))"
            done = subprocess.run(
                [sys.executable, "-c", code], close_fds=False, capture_output=True, text=True, check=True
            )
            assert done.stdout == "False\n"


def test_who_was_told_of_the_memory_is_called_once_before_it_goes() -> None:
    arena = Arena(4096)
    seen = []
    arena.before_close = lambda: seen.append(len(arena.view))
    arena.close()
    arena.close()
    assert seen == [STATUS_NBYTES + arena.capacity]
