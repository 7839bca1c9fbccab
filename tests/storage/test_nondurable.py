"""The non-durable store forgets what the contract does not promise, and finds protocols that rely on it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ckptengine.testing.nondurable import NonDurableStore, SimulatedCrash
from tests.storage.protocol import NBYTES, ROOT, check, content, delete, save

SEEDS: list[int | None] = [None, *range(8)]


def rng(seed: int | None) -> random.Random | None:
    return None if seed is None else random.Random(seed)


def fresh(*steps: int) -> NonDurableStore:
    store = NonDurableStore()
    store.make_dirs(ROOT)
    for step in steps:
        save(store, ROOT, step)
    return store


def crash_everywhere(
    protocol: Callable[[NonDurableStore], None], steps: tuple[int, ...], check: Callable[[set[int]], None]
) -> int:
    """Crash at each moment of `protocol` and with several choices of what survives; the number of moments."""
    store = fresh(*steps)
    before = store.moments
    protocol(store)
    moments = store.moments - before
    for n in range(1, moments + 1):
        for seed in SEEDS:
            store = fresh(*steps)
            store.crash_at = store.moments + n
            with pytest.raises(SimulatedCrash):
                protocol(store)
            store.crash(rng(seed))
            check(committed(store))
    return moments


def committed(store: NonDurableStore) -> set[int]:
    return check(store, ROOT)


def test_a_save_cut_short_anywhere_leaves_old_or_new() -> None:
    def old_or_new(steps: set[int]) -> None:
        assert steps in ({1}, {1, 2})

    assert crash_everywhere(lambda store: save(store, ROOT, 2), (1,), old_or_new) > 10


def test_a_delete_cut_short_anywhere_leaves_all_or_nothing() -> None:
    def rest(steps: set[int]) -> None:
        assert steps in ({2}, {1, 2})

    assert crash_everywhere(lambda store: delete(store, ROOT, 1), (1, 2), rest) > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_committed_survives(seed: int | None) -> None:
    store = fresh(1, 2)
    store.crash(rng(seed))
    assert committed(store) == {1, 2}


@pytest.mark.parametrize("without", ["finish", "sync_dir"])
def test_a_save_that_skips_a_precaution_is_caught(without: str) -> None:
    store = fresh()
    save(store, ROOT, 1, without=without)
    assert committed(store) == {1}
    store.crash()
    with pytest.raises((AssertionError, FileNotFoundError)):
        committed(store)


def test_a_delete_that_skips_the_sync_is_caught() -> None:
    with pytest.raises((AssertionError, FileNotFoundError)):
        crash_everywhere(lambda store: delete(store, ROOT, 1, without="sync_dir"), (1, 2), lambda steps: None)


def test_a_file_never_finished_is_empty_or_torn_after_a_crash() -> None:
    seen = set()
    for seed in range(20):
        store = fresh()
        writer = store.create(f"{ROOT}/file", nbytes=0)
        writer.pwrite(0, memoryview(content(7)))
        store.sync_dir(ROOT)
        store.crash(rng(seed))
        data = store.read(f"{ROOT}/file", limit=NBYTES)
        assert set(data) <= {0, 7}
        seen.add(data)
    assert len(seen) > 2


def test_a_removal_not_synced_may_come_back() -> None:
    store = fresh(1)
    store.remove(f"{ROOT}/step-1/MANIFEST")
    assert committed(store) == set()
    store.crash()
    assert committed(store) == {1}


def test_a_directory_made_before_a_crash_of_its_maker_is_made_durable_by_the_next() -> None:
    store = NonDurableStore(crash_at=2)
    with pytest.raises(SimulatedCrash):
        store.make_dirs("/step/attempt")
    # Only the process died, not the machine: the directory is there and not durable.
    store.crash_at, store._down = None, False
    store.make_dirs("/step/attempt")
    store.crash()
    assert store.list("/step/attempt") == []


def test_a_machine_that_is_down_does_nothing_and_comes_back_without_locks() -> None:
    store = fresh(1)
    with store.try_lock_exclusive(ROOT) as held:
        assert held
        store.crash_at = store.moments + 1
        with pytest.raises(SimulatedCrash):
            store.publish(f"{ROOT}/x", b"")
        with pytest.raises(SimulatedCrash):
            store.list(ROOT)
        store.crash()
        with store.lock_shared(ROOT) as reading:
            assert reading


def test_a_crash_is_not_to_be_handled() -> None:
    assert not issubclass(SimulatedCrash, Exception)
