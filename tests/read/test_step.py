from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ckptengine.errors import CheckpointNotFoundError, NotCommittedError
from ckptengine.format.names import MANIFEST_NAME
from ckptengine.read import step as step_module
from ckptengine.read.step import held_manifest
from ckptengine.storage.posix import PosixStore
from tests.helpers.checkpoints import write_checkpoint

STORE = PosixStore()


def test_a_step_is_held_until_the_end_and_by_many(tmp_path: Path) -> None:
    step = str(write_checkpoint(tmp_path, 3))
    with held_manifest(STORE, step) as manifest, held_manifest(STORE, step):
        assert manifest.step == 3
        with STORE.try_lock_exclusive(step) as free:
            assert not free
    with STORE.try_lock_exclusive(step) as free:
        assert free


def test_a_step_that_retention_only_tidies_is_waited_for(tmp_path: Path) -> None:
    step = str(write_checkpoint(tmp_path, 3))
    tidying = threading.Event()

    def tidy() -> None:
        with STORE.try_lock_exclusive(step) as free:
            assert free
            tidying.set()
            time.sleep(0.2)

    thread = threading.Thread(target=tidy)
    thread.start()
    tidying.wait()
    with held_manifest(STORE, step) as manifest:
        assert manifest.step == 3
    thread.join()


def test_a_step_whose_manifest_is_gone_already_is_not_waited_for(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 3)
    with STORE.try_lock_exclusive(str(step)):
        (step / MANIFEST_NAME).unlink()
        with pytest.raises(CheckpointNotFoundError, match="being removed"), held_manifest(STORE, str(step)):
            pass
    with pytest.raises(NotCommittedError), held_manifest(STORE, str(step)):
        pass


def test_the_wait_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "LOCK_WAIT_S", 0.05)
    step = str(write_checkpoint(tmp_path, 3))
    with STORE.try_lock_exclusive(step):
        with (
            pytest.raises(CheckpointNotFoundError, match=r"is committed, .* kept it locked for 0\.05 s"),
            held_manifest(STORE, step),
        ):
            pass


def test_a_missing_step_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no such directory"):
        with held_manifest(STORE, str(tmp_path / "step-0000000001")):
            pass
