"""Steps are found by directory and manifest, ordered as numbers, and nothing else is taken for one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckptengine.catalog.catalog import (
    StepEntry,
    attempt_dirs,
    latest,
    list_steps,
    newest_first,
    next_life,
    read_manifest,
    resolve,
)
from ckptengine.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotCommittedError,
    StorageError,
    UnsupportedFormatError,
)
from ckptengine.format.names import MANIFEST_NAME, step_dirname
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import Entry
from ckptengine.testing.faulty import FaultyStore
from tests.catalog.steps import attempt_id, begin, commit, manifest
from tests.helpers.counting import CountingStore

store = PosixStore()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)


def numbers(root: str, **options: bool) -> list[int]:
    return [entry.step for entry in list_steps(store, root, **options)]


class TestListing:
    def test_the_newest_is_found_with_one_listing_and_one_look(self, root: str) -> None:
        for step in range(50):
            Path(root, step_dirname(step)).mkdir()
            Path(root, step_dirname(step), MANIFEST_NAME).touch()
        counting = CountingStore()
        newest = latest(counting, root)
        assert newest is not None
        assert newest.step == 49
        assert counting.calls == {"list": 1, "size": 1}

    def test_those_before_the_newest_are_looked_at_one_by_one(self, root: str) -> None:
        for step in (1, 2, 4):
            commit(store, root, step)
        begin(store, root, 3, attempt_id())
        steps = newest_first(store, root)
        assert next(steps).step == 4
        shutil.rmtree(os.path.join(root, step_dirname(2)))
        assert [entry.step for entry in steps] == [1]

    def test_steps_are_ordered_as_numbers(self, root: str) -> None:
        steps = [1000, 9, 500, 12_345_678_901, 10, 0, 2**63 - 1]
        for step in steps:
            commit(store, root, step)
        assert numbers(root) == sorted(steps)
        newest = latest(store, root)
        assert newest == StepEntry(2**63 - 1, os.path.join(root, step_dirname(2**63 - 1)), True)

    def test_uncommitted_steps_are_listed_on_request_and_never_newest(self, root: str) -> None:
        commit(store, root, 1)
        begin(store, root, 2, attempt_id())
        assert numbers(root) == [1]
        assert [entry.committed for entry in list_steps(store, root, committed_only=False)] == [True, False]
        newest = latest(store, root)
        assert newest is not None
        assert newest.step == 1

    @pytest.mark.parametrize(
        "name",
        ["step-5", "step-abc", "step_0000000500", "step-0000000005.tmp", "step-00000000005",
        "step--000000005",
         "Step-0000000005", "step-", ".step-0000000005", "step-9999999999999999999", "step-０000000005", "5"],
    )  # fmt: skip
    def test_other_names_are_ignored(self, root: str, name: str) -> None:
        commit(store, root, 1)
        shutil.copytree(os.path.join(root, step_dirname(1)), os.path.join(root, name))
        assert numbers(root, committed_only=False) == [1]

    def test_files_and_links_with_a_steps_name_are_ignored(self, root: str, tmp_path: Path) -> None:
        path = commit(store, root, 1)
        (tmp_path / step_dirname(2)).write_bytes(b"")
        (tmp_path / step_dirname(3)).symlink_to(path)
        (tmp_path / step_dirname(4)).symlink_to("missing")
        assert numbers(root, committed_only=False) == [1]
        newest = latest(store, root)
        assert newest is not None
        assert newest.step == 1

    def test_a_root_given_as_a_link_is_followed(self, root: str, tmp_path: Path) -> None:
        commit(store, os.path.join(root, "real"), 1)
        (tmp_path / "link").symlink_to("real")
        assert numbers(os.path.join(root, "link")) == [1]

    def test_something_odd_in_place_of_the_manifest_is_not_passed_over(
        self, root: str, tmp_path: Path
    ) -> None:
        commit(store, root, 1)
        (tmp_path / step_dirname(2) / MANIFEST_NAME).mkdir(parents=True)
        (tmp_path / step_dirname(3)).mkdir()
        (tmp_path / step_dirname(3) / MANIFEST_NAME).symlink_to(f"../{step_dirname(1)}/{MANIFEST_NAME}")
        assert numbers(root) == [1, 2, 3]
        for step in (2, 3):
            with pytest.raises(CorruptCheckpointError):
                read_manifest(store, str(tmp_path / step_dirname(step)))

    def test_no_root_no_steps(self, root: str) -> None:
        missing = os.path.join(root, "missing")
        assert list_steps(store, root) == []
        assert latest(store, root) is None
        assert latest(store, missing) is None
        assert next_life(store, missing) == 1
        with pytest.raises(CheckpointNotFoundError) as caught:
            list_steps(store, missing)
        assert caught.value.path == missing

    def test_a_root_that_is_a_file_is_not_found(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(CheckpointNotFoundError, match="not a directory"):
            list_steps(store, str(tmp_path / "file"))

    def test_a_failing_file_system_is_an_error_and_not_an_empty_list(self, root: str) -> None:
        commit(store, root, 1)
        for fail_at in (1, 2):
            for listing in (list_steps, latest):
                with pytest.raises(StorageError):
                    listing(FaultyStore(store, fail_at=fail_at), root)
        with pytest.raises(StorageError):
            next_life(FaultyStore(store, fail_at=2), root)


class TestManifest:
    def test_it_is_read_and_checked(self, root: str) -> None:
        path = commit(store, root, 7, attempt_id(3, 4))
        found = read_manifest(store, path)
        assert (found.step, found.attempt) == (7, str(attempt_id(3, 4)))
        assert len(found.fingerprint) == 32

    def test_missing_directory_and_missing_manifest_are_told_apart(self, root: str) -> None:
        path = begin(store, root, 7, attempt_id())
        with pytest.raises(NotCommittedError) as caught:
            read_manifest(store, path)
        assert caught.value.path == path
        with pytest.raises(CheckpointNotFoundError):
            read_manifest(store, os.path.join(root, step_dirname(8)))
        (Path(root) / "file").write_bytes(b"")
        with pytest.raises(CheckpointNotFoundError):
            read_manifest(store, os.path.join(root, "file"))

    def test_a_manifest_of_another_step_is_refused(self, root: str) -> None:
        commit(store, root, 7)
        os.rename(os.path.join(root, step_dirname(7)), os.path.join(root, step_dirname(8)))
        with pytest.raises(CorruptCheckpointError, match="another step") as caught:
            read_manifest(store, os.path.join(root, step_dirname(8)) + "/")
        assert (caught.value.expected, caught.value.actual) == (8, 7)

    def test_a_copy_under_a_name_of_the_users_is_fine(self, root: str) -> None:
        commit(store, root, 7)
        shutil.copytree(os.path.join(root, step_dirname(7)), os.path.join(root, "best"))
        assert read_manifest(store, os.path.join(root, "best")).step == 7

    def test_damage_and_newer_formats_have_their_names(self, root: str) -> None:
        path = commit(store, root, 7)
        good = Path(path, MANIFEST_NAME).read_bytes()
        for bad in (b"", good[:-1], good.replace(b'"step": 7', b'"step": 8')):
            Path(path, MANIFEST_NAME).write_bytes(bad)
            with pytest.raises(CorruptCheckpointError):
                read_manifest(store, path)
        Path(path, MANIFEST_NAME).write_bytes(good.replace(b'"version": 1', b'"version": 2'))
        with pytest.raises(UnsupportedFormatError):
            read_manifest(store, path)


class TestLives:
    def test_the_next_life_is_beyond_every_attempt_committed_or_not(self, root: str) -> None:
        assert next_life(store, root) == 1
        commit(store, root, 5, attempt_id(2))
        assert next_life(store, root) == 3
        begin(store, root, 4, attempt_id(7))
        begin(store, root, 4, attempt_id(6))
        assert next_life(store, root) == 8
        store.make_dirs(os.path.join(root, step_dirname(4), "a999999-nonsense"))
        store.make_dirs(os.path.join(root, "elsewhere", str(attempt_id(100))))
        store.publish(os.path.join(root, step_dirname(4), str(attempt_id(50))), b"a file")
        assert next_life(store, root) == 8

    def test_attempt_dirs(self) -> None:
        names = [str(attempt_id(2)), str(attempt_id(1, 10)), str(attempt_id(1, 9, 2)), "a1", "other"]
        entries = [Entry(name, True) for name in names] + [Entry(str(attempt_id(9)), False)]
        assert [name for _, name in attempt_dirs(entries)] == [names[2], names[1], names[0]]


class TestResolve:
    def test_a_root_a_step_and_a_manifest(self, root: str) -> None:
        commit(store, root, 1)
        path = commit(store, root, 20)
        assert resolve(store, root) == (root, path)
        assert resolve(store, path) == (None, path)
        assert resolve(store, path + "/") == (None, path + "/")
        assert resolve(store, os.path.join(path, MANIFEST_NAME)) == (None, path)

    def test_relative_paths(self, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
        path = commit(store, root, 1)
        monkeypatch.chdir(path)
        assert resolve(store, ".") == (None, ".")
        assert resolve(store, MANIFEST_NAME) == (None, ".")
        assert read_manifest(store, ".").step == 1
        monkeypatch.chdir(root)
        assert resolve(store, ".") == (".", f"./{step_dirname(1)}")

    def test_links_and_copies_given_by_the_user(self, root: str, tmp_path: Path) -> None:
        path = commit(store, root, 1)
        (tmp_path / "best").symlink_to(path)
        assert resolve(store, str(tmp_path / "best")) == (None, str(tmp_path / "best"))
        assert read_manifest(store, str(tmp_path / "best")).step == 1

    def test_an_uncommitted_step_resolves_and_says_so_when_read(self, root: str) -> None:
        path = begin(store, root, 1, attempt_id())
        assert resolve(store, path) == (None, path)
        with pytest.raises(NotCommittedError):
            read_manifest(store, path)

    def test_a_root_with_nothing_committed(self, root: str) -> None:
        begin(store, root, 1, attempt_id())
        with pytest.raises(NotCommittedError):
            resolve(store, root)

    def test_what_is_no_checkpoint(self, root: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        for path in (root, os.path.join(root, "missing"), os.path.join(root, "file")):
            with pytest.raises(CheckpointNotFoundError) as caught:
                resolve(store, path)
            assert caught.value.path == path
        with pytest.raises(CheckpointNotFoundError):
            read_manifest(store, resolve(store, os.path.join(root, "missing", MANIFEST_NAME))[1])

    def test_the_manifest_module_agrees(self) -> None:
        assert manifest(3, attempt_id()).startswith(b"{")
