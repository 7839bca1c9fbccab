"""Every store passes the one contract suite."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import Store
from ckptengine.storage.traced import TracedStore
from ckptengine.testing.faulty import FaultyStore
from ckptengine.testing.nondurable import NonDurableStore
from ckptengine.testing.store_contract import StoreContract
from ckptengine.tracing import recorder


class TestPosixAuto(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return PosixStore()

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path)


class TestPosixBuffered(TestPosixAuto):
    @pytest.fixture
    def store(self) -> Store:
        return PosixStore("off")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs at /dev/shm")
class TestPosixOnTmpfs(TestPosixAuto):
    @pytest.fixture
    def root(self):
        path = tempfile.mkdtemp(dir="/dev/shm", prefix="ckptengine-test-")
        yield path
        shutil.rmtree(path)


class TestPosixRelativePaths(TestPosixAuto):
    @pytest.fixture
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        (tmp_path / "below").mkdir()
        monkeypatch.chdir(tmp_path)
        return "below"

    def symlink(self, target: str, path: str) -> None:
        os.symlink(os.path.abspath(target) if "/" in target else target, path)


class TestFaultyWithoutFault(TestPosixAuto):
    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(PosixStore())


class TestTraced(TestPosixAuto):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with tempfile.TemporaryDirectory() as elsewhere:
            trace = recorder.start(elsewhere, 0, "trainer")
            yield TracedStore(PosixStore(), str(tmp_path))
            recorder.stop(trace)


class TestNonDurable(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        store = NonDurableStore()
        store.make_dirs("/root")
        return store

    @pytest.fixture
    def root(self) -> str:
        return "/root"

    def symlink(self, target: str, path: str) -> None:
        pytest.skip("this store has no symbolic links")
