"""Arenas are shared between processes, bounded, reused, and safe to close under whoever still looks."""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ckptengine.errors import CommitTimeoutError, SaveFailedError, StorageError
from ckptengine.staging import arena as arena_module
from ckptengine.staging.arena import Arena, ArenaPool, attach
from ckptengine.staging.status import STATUS_NBYTES
from ckptengine.storage.direct import HUGE_PAGE
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
            with pytest.raises(SaveFailedError, match="no memory for a snapshot") as caught:
                Arena(4 * MIB)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert "ulimit -f" in (caught.value.hint or "")
        assert open_descriptors() == before

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


class TestPool:
    def test_an_arena_is_reused(self) -> None:
        with ArenaPool() as pool:
            first = pool.acquire(MIB, 1)
            pool.release(first)
            assert pool.acquire(2 * MIB, 1) is first
            assert pool.nbytes == STATUS_NBYTES + GRAIN

    def test_the_smallest_that_fits_is_taken(self) -> None:
        with ArenaPool(3) as pool:
            arenas = [pool.acquire(size * GRAIN, 1) for size in (3, 1, 2)]
            for arena in arenas:
                pool.release(arena)
            assert pool.acquire(2 * GRAIN, 1) is arenas[2]
            assert pool.acquire(1, 1) is arenas[1]

    def test_one_too_small_is_replaced_only_when_the_bounds_ask(self) -> None:
        with ArenaPool(2) as pool:
            small = pool.acquire(GRAIN, 1)
            pool.release(small)
            large = pool.acquire(4 * GRAIN, 1)
            assert small.fd >= 0, "there was room for both"
            larger = pool.acquire(8 * GRAIN, 1)
            assert small.fd == -1
            assert pool.nbytes == 2 * STATUS_NBYTES + 12 * GRAIN
            pool.release(large)
            pool.release(larger)

    def test_the_budget_bounds_all_arenas(self) -> None:
        with ArenaPool(5, budget_nbytes=2 * (STATUS_NBYTES + GRAIN)) as pool:
            first, second = pool.acquire(GRAIN, 1), pool.acquire(GRAIN, 1)
            with pytest.raises(CommitTimeoutError, match="became free"):
                pool.acquire(1, 0.01)
            pool.release(first)
            pool.release(second)
            # Both must go for one that takes their place.
            pool.acquire(GRAIN + 1, 1)
            assert first.fd == second.fd == -1
            with pytest.raises(SaveFailedError, match="does not fit") as caught:
                pool.acquire(2 * GRAIN + STATUS_NBYTES, 1)
            assert "arena_budget_nbytes" in str(caught.value)

    def test_free_ones_go_when_the_budget_needs_their_bytes(self) -> None:
        with ArenaPool(5, budget_nbytes=STATUS_NBYTES * 4 + 4 * GRAIN) as pool:
            small = [pool.acquire(GRAIN, 1) for _ in range(3)]
            for arena in small:
                pool.release(arena)
            pool.acquire(3 * GRAIN, 1)
            assert sum(arena.fd >= 0 for arena in small) == 1

    @pytest.mark.parametrize("wait_s", [0.0, 0.8])
    def test_a_wait_ends_with_a_release_and_is_logged_if_it_is_long(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, wait_s: float
    ) -> None:
        if not wait_s:
            monkeypatch.setattr("ckptengine.staging.arena.QUIET_WAIT_S", 60.0)
        with ArenaPool(1) as pool, caplog.at_level(logging.WARNING):
            arena = pool.acquire(1, 1)
            timer = threading.Timer(wait_s, pool.release, [arena])
            timer.start()
            assert pool.acquire(1, 30) is arena
            timer.join()
        if not wait_s:
            assert not caplog.text
            return
        assert "save waits for snapshot memory: 1 of 1 arenas are busy" in caplog.text
        assert "save waited 0." in caplog.text

    def test_a_wait_has_a_deadline(self) -> None:
        with ArenaPool(1) as pool:
            pool.acquire(1, 1)
            started = time.monotonic()
            with pytest.raises(CommitTimeoutError) as caught:
                pool.acquire(1, 0.1)
            assert 0.1 <= time.monotonic() - started < 5
            assert isinstance(caught.value, TimeoutError)

    def test_closing_ends_waits_and_frees_as_arenas_come_back(self) -> None:
        before = open_descriptors()
        pool = ArenaPool(2)
        busy, free = pool.acquire(1, 1), pool.acquire(1, 1)
        failures: list[Exception] = []

        def wait() -> None:
            try:
                pool.acquire(1, 30)
            except SaveFailedError as exc:
                failures.append(exc)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        pool.close()
        pool.close()
        thread.join(30)
        assert len(failures) == 1
        busy.payload[0] = 1
        pool.release(busy)
        pool.discard(free)
        assert open_descriptors() == before
        with pytest.raises(SaveFailedError, match="closed"):
            pool.acquire(1, 1)

    def test_only_what_was_acquired_can_be_given_back_and_once(self) -> None:
        with ArenaPool() as pool, Arena(0) as stranger:
            arena = pool.acquire(1, 1)
            pool.release(arena)
            for wrong in (arena, stranger):
                with pytest.raises(ValueError, match="not acquired"):
                    pool.release(wrong)

    def test_a_discarded_arena_is_never_reused(self) -> None:
        with ArenaPool(1) as pool:
            arena = pool.acquire(1, 1)
            pool.discard(arena)
            assert arena.fd == -1
            assert pool.nbytes == 0
            assert pool.acquire(1, 1) is not arena

    def test_a_failure_to_make_one_gives_its_place_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with ArenaPool(1) as pool:
            with monkeypatch.context() as patch:
                patch.setattr(arena_module, "_prefault", lambda *args: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    pool.acquire(1, 1)
            assert pool.nbytes == 0
            pool.acquire(1, 1)

    def test_many_threads_never_share_an_arena_nor_pass_the_bounds(self) -> None:
        budget = 2 * (STATUS_NBYTES + 2 * GRAIN)
        errors: list[BaseException] = []
        with ArenaPool(2, budget_nbytes=budget) as pool:

            def work(index: int) -> None:
                try:
                    for turn in range(15):
                        arena = pool.acquire((1 + (index + turn) % 2) * GRAIN, 60)
                        mark = bytes([index + 1]) * 16
                        arena.payload[:16] = mark
                        assert pool.nbytes <= budget
                        time.sleep(0.0005)
                        assert bytes(arena.payload[:16]) == mark
                        pool.release(arena)
                except BaseException as exc:
                    errors.append(exc)

            threads = [threading.Thread(target=work, args=[index]) for index in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(100)
        assert errors == []

    def test_nonsense_is_refused(self) -> None:
        with pytest.raises(ValueError, match="max_arenas"):
            ArenaPool(0)


def test_who_was_told_of_the_memory_is_called_once_before_it_goes() -> None:
    arena = Arena(4096)
    seen = []
    arena.before_close = lambda: seen.append(len(arena.view))
    arena.close()
    arena.close()
    assert seen == [STATUS_NBYTES + arena.capacity]
