"""Retention deletes by policy, in the safe order, and never what is newest, current, read or not ours."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.catalog.catalog import list_steps, read_manifest
from ckptengine.catalog.retention import (
    RetentionPolicy,
    RetentionReport,
    apply_retention,
    delete_step,
    plan_retention,
)
from ckptengine.errors import CorruptCheckpointError
from ckptengine.format.names import MANIFEST_NAME, step_dirname
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import Store
from ckptengine.testing.faulty import FaultyStore
from ckptengine.testing.nondurable import NonDurableStore, SimulatedCrash
from tests.catalog.steps import SHARD, attempt_id, begin, commit, manifest

store = PosixStore()
KEEP_2 = RetentionPolicy(keep_last=2)
KEEP_ALL = RetentionPolicy()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)


def committed(root: str, store: Store = store) -> list[int]:
    return [entry.step for entry in list_steps(store, root)]


def everything(root: str) -> list[int]:
    return [entry.step for entry in list_steps(store, root, committed_only=False)]


def check_whole(store: Store, root: str) -> set[int]:
    """The committed steps, all of whose shards must be there."""
    found = set()
    for entry in list_steps(store, root):
        named = read_manifest(store, entry.path)
        for shard in named.shards:
            assert store.read(f"{entry.path}/{shard.path}", limit=len(SHARD)) == SHARD
        found.add(entry.step)
    return found


class TestPlan:
    steps = st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 50), max_size=40)
    limits = st.none() | st.integers(1, 12)

    @given(steps, limits, limits)
    def test_it_keeps_what_the_policy_says_and_nothing_else(
        self, steps: list[int], keep_last: int | None, keep_every: int | None
    ) -> None:
        doomed = plan_retention(steps, RetentionPolicy(keep_last, keep_every))
        kept = set(steps) - set(doomed)
        assert doomed == sorted(set(doomed))
        assert set(doomed) <= set(steps)
        if steps:
            assert max(steps) in kept
        if keep_last is None and keep_every is None:
            assert doomed == []
            return
        newest = sorted(set(steps))[-(keep_last or 1) :]
        every = {step for step in steps if keep_every is not None and step % keep_every == 0}
        assert kept == set(newest) | every

    @given(steps, limits, limits)
    def test_it_is_stable_once_applied(
        self, steps: list[int], keep_last: int | None, keep_every: int | None
    ) -> None:
        policy = RetentionPolicy(keep_last, keep_every)
        kept = set(steps) - set(plan_retention(steps, policy))
        assert plan_retention(kept, policy) == []

    def test_examples(self) -> None:
        assert plan_retention([100, 9, 1000], RetentionPolicy(keep_last=1)) == [9, 100]
        assert plan_retention(range(0, 60, 10), RetentionPolicy(2, 20)) == [10, 30]
        assert plan_retention([1, 2, 3], RetentionPolicy(keep_every=10)) == [1, 2]
        assert plan_retention([], KEEP_2) == []

    @pytest.mark.parametrize("bad", [{"keep_last": 0}, {"keep_every": 0}, {"keep_last": -1}])
    def test_nonsense_is_refused(self, bad: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="must be at least 1"):
            RetentionPolicy(**bad)


class TestDelete:
    def test_the_manifest_goes_first(self, root: str) -> None:
        path = commit(store, root, 1)
        recorder = FaultyStore(store)
        delete_step(recorder, path, root=root)
        assert [operation.split()[0] for operation in recorder.operations] == [
            "list", "remove", "sync_dir", "remove_tree", "sync_dir",
        ]  # fmt: skip
        assert recorder.operations[1:3] == [f"remove {path}/{MANIFEST_NAME}", f"sync_dir {path}"]
        assert os.listdir(root) == []
        delete_step(store, path, root=root)

    def test_a_power_cut_anywhere_leaves_all_or_nothing(self) -> None:
        def make() -> NonDurableStore:
            made = NonDurableStore()
            made.make_dirs("/root")
            commit(made, "/root", 1)
            commit(made, "/root", 2)
            return made

        probe = make()
        before = probe.moments
        delete_step(probe, f"/root/{step_dirname(1)}")
        moments = probe.moments - before
        assert moments >= 7
        for n in range(1, moments + 1):
            for seed in (None, *range(6)):
                store = make()
                store.crash_at = store.moments + n
                with pytest.raises(SimulatedCrash):
                    delete_step(store, f"/root/{step_dirname(1)}")
                store.crash(None if seed is None else random.Random(seed))
                assert check_whole(store, "/root") in ({2}, {1, 2})
                # The next run of retention clears what is left.
                apply_retention(store, "/root", RetentionPolicy(keep_last=1), current=attempt_id(save=2))
                assert check_whole(store, "/root") == {2}
                assert [entry.name for entry in store.list("/root")] == [step_dirname(2)]

    def test_a_failure_anywhere_leaves_all_or_nothing(self, tmp_path: Path) -> None:
        for n in range(1, 6):
            root = str(tmp_path / str(n))
            path = commit(store, root, 1)
            with pytest.raises(OSError, match="injected"):
                delete_step(FaultyStore(store, fail_at=n, error=errno.EIO), path)
            assert check_whole(store, root) == ({1} if n <= 2 else set())
            delete_step(store, path)
            assert os.listdir(root) == []

    def test_what_is_not_a_step_of_the_root_is_refused(self, root: str, tmp_path: Path) -> None:
        path = commit(store, root, 1)
        precious = commit(store, os.path.join(root, "other"), 2)
        (tmp_path / step_dirname(3)).symlink_to(precious)
        (tmp_path / step_dirname(4)).write_bytes(b"")
        for bad in (
            os.path.join(root, "other"),
            root,
            "/",
            precious,
            os.path.join(root, step_dirname(3)),
            os.path.join(root, step_dirname(4)),
            os.path.join(path, "..", "other", step_dirname(2)),
            os.path.join(path, ".."),
        ):
            with pytest.raises(CorruptCheckpointError, match="refused to delete"):
                delete_step(store, bad, root=root)
        assert check_whole(store, root) == {1}
        assert check_whole(store, os.path.join(root, "other")) == {2}
        delete_step(store, path + "/", root=root + "/")
        assert committed(root) == []

    def test_relative_paths(self, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
        commit(store, root, 1)
        monkeypatch.chdir(root)
        delete_step(store, step_dirname(1), root=".")
        assert os.listdir(root) == []

    def test_links_inside_a_step_are_removed_and_not_followed(self, root: str, tmp_path: Path) -> None:
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "file").write_bytes(b"x")
        path = commit(store, root, 1)
        os.symlink(tmp_path / "precious", os.path.join(path, "link"))
        delete_step(store, path)
        assert (tmp_path / "precious" / "file").read_bytes() == b"x"


class TestApply:
    def test_the_policy_is_carried_out(self, root: str) -> None:
        for step in (9, 10, 100, 1000):
            commit(store, root, step)
        report = apply_retention(store, root, KEEP_2, current=attempt_id(save=1000))
        assert report == RetentionReport(deleted_steps=(9, 10))
        assert everything(root) == [100, 1000]
        assert apply_retention(store, root, KEEP_2, current=attempt_id(save=1000)) == RetentionReport()

    def test_left_overs_of_earlier_attempts_go(self, root: str) -> None:
        path = commit(store, root, 5, attempt_id(2, 5))
        begin(store, root, 5, attempt_id(1, 9))
        begin(store, root, 5, attempt_id(2, 4))
        abandoned = begin(store, root, 4, attempt_id(1, 8))
        report = apply_retention(store, root, KEEP_ALL, current=attempt_id(2, 5))
        assert set(report.deleted_attempts) == {
            os.path.join(path, str(attempt_id(1, 9))),
            os.path.join(path, str(attempt_id(2, 4))),
            os.path.join(abandoned, str(attempt_id(1, 8))),
        }
        assert everything(root) == [5]
        assert check_whole(store, root) == {5}

    def test_a_replaced_attempt_of_the_step_goes(self, root: str) -> None:
        commit(store, root, 5, attempt_id(1, 1))
        path = commit(store, root, 5, attempt_id(1, 2))
        apply_retention(store, root, KEEP_ALL, current=attempt_id(1, 2))
        assert sorted(os.listdir(path)) == sorted(["INDEX", MANIFEST_NAME, str(attempt_id(1, 2))])

    def test_the_current_attempt_and_later_ones_are_never_touched(self, root: str) -> None:
        current = attempt_id(2, 5)
        for other in (current, attempt_id(2, 5, 1), attempt_id(2, 6), attempt_id(3, 1)):
            begin(store, root, 7, other)
        begin(store, root, 7, attempt_id(2, 4, 9))
        path = os.path.join(root, step_dirname(7))
        apply_retention(store, root, KEEP_2, current=current)
        assert len(os.listdir(path)) == 4

    def test_what_is_not_ours_is_never_touched(self, root: str, tmp_path: Path) -> None:
        step = tmp_path / step_dirname(3)
        for name in ("notes", "a000001-short", str(attempt_id(1)) + ".old"):
            (step / name).mkdir(parents=True)
        (step / str(attempt_id(1, 2))).write_bytes(b"a file")
        (tmp_path / "precious").mkdir()
        (step / str(attempt_id(1, 3))).symlink_to(tmp_path / "precious")
        (tmp_path / "step-7").mkdir()
        for step_number in (8, 9, 10):
            commit(store, root, step_number, attempt_id(2, step_number))
        before = sorted(os.listdir(step))
        apply_retention(store, root, RetentionPolicy(keep_last=1), current=attempt_id(2, 10))
        assert sorted(os.listdir(step)) == before
        assert (tmp_path / "step-7").is_dir()
        assert committed(root) == [10]

    def test_an_interrupted_deletion_is_finished(self, root: str, tmp_path: Path) -> None:
        commit(store, root, 9, attempt_id(1, 9))
        for step in (1, 2, 3):
            commit(store, root, step, attempt_id(1, step))
            os.unlink(tmp_path / step_dirname(step) / MANIFEST_NAME)
        shutil.rmtree(tmp_path / step_dirname(2) / str(attempt_id(1, 2)))
        shutil.rmtree(tmp_path / step_dirname(3))
        (tmp_path / step_dirname(3)).mkdir()
        (tmp_path / step_dirname(2) / f".{MANIFEST_NAME}.0123456789abcdef.tmp").write_bytes(b"")
        apply_retention(store, root, KEEP_ALL, current=attempt_id(1, 9))
        assert everything(root) == [9]

    def test_a_publish_that_was_cut_short_leaves_nothing_in_a_step_that_is_committed_later(
        self, root: str, tmp_path: Path
    ) -> None:
        temporary = tmp_path / step_dirname(9) / f".{MANIFEST_NAME}.0123456789abcdef.tmp"
        commit(store, root, 9, attempt_id(2, 1))
        temporary.write_bytes(b"")
        for current, left in ((attempt_id(1, 9), True), (attempt_id(2, 1), False)):
            # Another run's, later than the one that tidies, may be under way.
            apply_retention(store, root, KEEP_ALL, current=current)
            assert temporary.exists() == left
            assert committed(root) == [9]

    def test_a_commit_by_the_current_run_below_abandoned_steps_stays(self, root: str) -> None:
        for step in (400, 500):
            commit(store, root, step, attempt_id(1, step))
        commit(store, root, 310, attempt_id(2, 1))
        report = apply_retention(store, root, KEEP_2, current=attempt_id(2, 1))
        assert committed(root) == [310, 400, 500]
        assert [skipped.path for skipped in report.skipped] == [os.path.join(root, step_dirname(310))]

    def test_a_damaged_manifest_goes_by_policy_but_keeps_its_attempts_otherwise(self, root: str) -> None:
        for step in (1, 2, 3):
            path = commit(store, root, step)
            begin(store, root, step, attempt_id(0, 1))
            if step < 3:
                Path(path, MANIFEST_NAME).write_bytes(b"damaged")
        report = apply_retention(store, root, KEEP_2, current=attempt_id(save=3))
        assert report.deleted_steps == (1,)
        assert "cannot be read" in report.skipped[0].reason
        assert len(os.listdir(os.path.join(root, step_dirname(2)))) == 4
        assert len(os.listdir(os.path.join(root, step_dirname(3)))) == 3

    def test_a_manifest_of_another_step_protects_its_attempts(self, root: str) -> None:
        path = commit(store, root, 1)
        Path(path, MANIFEST_NAME).write_bytes(manifest(2, attempt_id(save=2)))
        apply_retention(store, root, KEEP_ALL, current=attempt_id(save=9))
        assert str(attempt_id(save=1)) in os.listdir(path)

    def test_a_failure_is_reported_and_the_rest_goes_on(self, root: str) -> None:
        for step in (1, 2, 3, 4):
            commit(store, root, step)
        faulty = FaultyStore(store, fail_at=1, only={"remove_tree"})
        report = apply_retention(faulty, root, KEEP_2, current=attempt_id(save=4))
        assert report.deleted_steps == (2,)
        assert "Input/output error" in report.skipped[0].reason
        assert committed(root) == [3, 4]
        apply_retention(store, root, KEEP_2, current=attempt_id(save=4))
        assert everything(root) == [3, 4]

    def test_a_step_another_process_reads_is_left_until_it_is_done(self, root: str) -> None:
        for step in (1, 2, 3):
            commit(store, root, step)
        begin(store, root, 1, attempt_id(0, 1))
        path = os.path.join(root, step_dirname(1))
        code = f"""
import time
from ckptengine.storage.posix import PosixStore
with PosixStore().lock_shared({path!r}) as held:
    print(held, flush=True)
    time.sleep(600)
"""
        reader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "True\n"
            report = apply_retention(store, root, RetentionPolicy(keep_last=1), current=attempt_id(save=3))
            assert report.deleted_steps == (2,)
            assert [(skipped.path, skipped.reason) for skipped in report.skipped] == [
                (path, "it is being read")
            ]
            assert report.deleted_attempts == ()
            assert check_whole(store, root) == {1, 3}
        finally:
            reader.kill()
            reader.communicate()
        apply_retention(store, root, RetentionPolicy(keep_last=1), current=attempt_id(save=3))
        assert everything(root) == [3]

    def test_a_power_cut_anywhere_never_costs_a_kept_step(self) -> None:
        def make() -> NonDurableStore:
            made = NonDurableStore()
            made.make_dirs("/root")
            for step in (1, 2, 3):
                commit(made, "/root", step)
            begin(made, "/root", 3, attempt_id(0, 1))
            return made

        current = attempt_id(save=3)
        probe = make()
        before = probe.moments
        apply_retention(probe, "/root", KEEP_2, current=current)
        for n in range(1, probe.moments - before + 1):
            for seed in (None, 1, 2, 3):
                store = make()
                store.crash_at = store.moments + n
                with pytest.raises(SimulatedCrash):
                    apply_retention(store, "/root", KEEP_2, current=current)
                store.crash(None if seed is None else random.Random(seed))
                assert check_whole(store, "/root") in ({1, 2, 3}, {2, 3})
                apply_retention(store, "/root", KEEP_2, current=current)
                assert check_whole(store, "/root") == {2, 3}

    @given(
        st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.integers(0, 3)), max_size=12),
        st.integers(1, 4),
        st.none() | st.integers(1, 5),
    )
    def test_whatever_lies_there_the_result_is_what_the_plan_says(
        self, saves: list[tuple[int, bool, int]], keep_last: int, keep_every: int | None
    ) -> None:
        """saves: (step, committed?, life) in the order they happened, save numbers growing."""
        store = NonDurableStore()
        store.make_dirs("/root")
        named: dict[int, str] = {}
        for save, (step, is_commit, life) in enumerate(saves):
            attempt = attempt_id(life, save)
            if is_commit:
                commit(store, "/root", step, attempt)
                named[step] = str(attempt)
            else:
                begin(store, "/root", step, attempt)
        policy = RetentionPolicy(keep_last, keep_every)
        expected = set(named) - set(plan_retention(named, policy))
        apply_retention(store, "/root", policy, current=attempt_id(9, 0))
        assert check_whole(store, "/root") == expected
        for entry in list_steps(store, "/root", committed_only=False):
            assert entry.step in expected
            names = {item.name for item in store.list(entry.path) if item.is_dir}
            assert names == {named[entry.step]}
