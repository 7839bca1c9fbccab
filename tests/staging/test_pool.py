"""Are arenas bounded, reused, and waited for?"""

from __future__ import annotations

import gc
import logging
import os
import re
import threading
import time

import pytest

from ckptengine.errors import CommitTimeoutError, SaveFailedError
from ckptengine.staging import arena as arena_module
from ckptengine.staging.arena import Arena
from ckptengine.staging.pool import ArenaPool
from ckptengine.staging.status import STATUS_NBYTES
from tests.helpers.ranks import wait_until

MIB = 1 << 20
GRAIN = 2 * MIB


def open_descriptors() -> set[str]:
    gc.collect()  # what earlier tests dropped must not go while this one counts
    return set(os.listdir("/proc/self/fd"))


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

    @pytest.mark.parametrize("long", [False, True])
    def test_a_wait_ends_with_a_release_and_is_logged_if_it_is_long(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, long: bool
    ) -> None:
        monkeypatch.setattr("ckptengine.staging.pool.QUIET_WAIT_S", 0.1 if long else 60.0)
        waits = "save waits for snapshot memory: 1 of 1 arenas are busy"
        with ArenaPool(1) as pool, caplog.at_level(logging.WARNING):
            arena = pool.acquire(1, 1)

            def release() -> None:
                wait_until(lambda: not long or waits in caplog.text)
                pool.release(arena)

            releasing = threading.Thread(target=release)
            releasing.start()
            assert pool.acquire(1, 60) is arena
            releasing.join()
        if not long:
            assert not caplog.text
            return
        assert waits in caplog.text
        assert re.search(r"save waited \d+\.\d", caplog.text)

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
