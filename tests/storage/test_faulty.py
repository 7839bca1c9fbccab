"""The faulty store fails what it says, as it says, and a careful protocol survives it."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from ckptengine.errors import StorageError
from ckptengine.storage.posix import PosixStore
from ckptengine.testing.faulty import FaultyStore
from ckptengine.testing.nondurable import NonDurableStore
from tests.storage.protocol import ROOT, check, content, save

ERRORS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE]


def fresh() -> NonDurableStore:
    store = NonDurableStore()
    store.make_dirs(ROOT)
    save(store, ROOT, 1)
    return store


def count_operations() -> int:
    store = FaultyStore(fresh())
    save(store, ROOT, 2)
    assert store.failed is None
    return len(store.operations)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("sticky", [False, True])
def test_whatever_operation_fails_the_old_commit_stands(error: int, after: bool, sticky: bool) -> None:
    total = count_operations()
    assert total >= 7
    for n in range(1, total + 1):
        inner = fresh()
        store = FaultyStore(inner, fail_at=n, error=error, after=after, sticky=sticky)
        with pytest.raises(StorageError) as caught:
            save(store, ROOT, 2)
        assert caught.value.errno == error
        assert store.failed == store.operations[n - 1]
        assert check(inner, ROOT) in ({1}, {1, 2} if after and n == total else {1})


@pytest.mark.parametrize("seed", range(3))
def test_a_short_write_is_an_error_and_poisons_the_writer(seed: int) -> None:
    inner = fresh()
    store = FaultyStore(inner, fail_at=1, error="short write", seed=seed)
    writer = store.create(f"{ROOT}/file", nbytes=0)
    with pytest.raises(StorageError):
        writer.pwrite(0, memoryview(b"x" * 1000))
    with pytest.raises(StorageError):
        writer.pwrite(0, memoryview(b"x"))
    with pytest.raises(StorageError):
        writer.finish()
    assert inner.size(f"{ROOT}/file") < 1000
    writer.abort()
    assert "file" not in [entry.name for entry in inner.list(ROOT)]


def test_a_lost_write_is_silent() -> None:
    inner = fresh()
    store = FaultyStore(inner, fail_at=2, error="lost write")
    save(store, ROOT, 2)
    with pytest.raises(AssertionError):
        check(inner, ROOT)


def test_a_short_read_is_an_error() -> None:
    store = FaultyStore(fresh(), fail_at=1, error="short read")
    out = bytearray(4096)
    with store.open(f"{ROOT}/step-1/attempt/shard") as reader:
        with pytest.raises(StorageError):
            reader.pread_into(0, memoryview(out))
        reader.pread_into(0, memoryview(out))
    assert out == content(1)[:4096]


@pytest.mark.parametrize("seed", range(3))
def test_a_bit_flip_changes_one_bit(seed: int) -> None:
    path = f"{ROOT}/step-1/attempt/shard"
    good = content(1)
    out = bytearray(len(good))
    with FaultyStore(fresh(), fail_at=1, error="bit flip", seed=seed).open(path) as reader:
        reader.pread_into(0, memoryview(out))
    read = FaultyStore(fresh(), fail_at=1, error="bit flip", seed=seed).read(path, limit=1 << 20)
    for flipped in (bytes(out), read):
        difference = int.from_bytes(good, "big") ^ int.from_bytes(flipped, "big")
        assert difference.bit_count() == 1


def test_the_failed_operation_is_logged_and_only_chosen_ones_count(caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore(fresh(), fail_at=1, error=errno.EDQUOT, only={"publish"})
    with caplog.at_level(logging.WARNING), pytest.raises(StorageError):
        save(store, ROOT, 2)
    assert store.operations == [f"publish {ROOT}/step-2/MANIFEST"]
    assert f"publish {ROOT}/step-2/MANIFEST: EDQUOT" in caplog.text


@pytest.mark.parametrize("name", ["lock_shared", "try_lock_exclusive", "open", "list", "size", "remove_dir"])
def test_operations_outside_a_save_can_fail_too(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    PosixStore().publish(path, b"")
    target = {"list": str(tmp_path), "remove_dir": str(tmp_path / "dir")}.get(name, path)
    for after in (False, True):
        store = FaultyStore(PosixStore(), fail_at=1, only={name}, after=after)
        with pytest.raises(StorageError) as caught:
            call(store, name, target)
        assert caught.value.errno == errno.EIO


def call(store: FaultyStore, name: str, path: str) -> None:
    result = getattr(store, name)(path)
    if name.endswith(("shared", "exclusive")):
        with result:
            pass


def test_a_create_that_failed_afterwards_leaves_no_file(tmp_path: Path) -> None:
    store = FaultyStore(PosixStore(), fail_at=1, after=True)
    with pytest.raises(StorageError):
        store.create(str(tmp_path / "file"), nbytes=10)
    assert list(tmp_path.iterdir()) == []


def test_abort_removes_a_file_whose_finish_answered_with_an_error(tmp_path: Path) -> None:
    store = FaultyStore(PosixStore(), fail_at=1, only={"finish"}, after=True)
    writer = store.create(str(tmp_path / "file"), nbytes=10)
    with pytest.raises(StorageError):
        writer.finish()
    writer.abort()
    assert list(tmp_path.iterdir()) == []
