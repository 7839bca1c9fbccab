"""What goes wrong on Lustre, on the way that a job of two ranks takes: real processes, real system calls that
fail once in a FUSE file system."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import ckptengine as ck
from ckptengine.storage import lustre
from ckptengine.storage.lustre_layout import encode
from tests.cli.conftest import Run
from tests.helpers.checkpoints import read_manifest
from tests.helpers.fuse_lustre import Mounted
from tests.helpers.lustre_layouts import FSX
from tests.helpers.ranks import Ranks, Result
from tests.lustre import cases
from tests.lustre.conftest import Place

MIB = 1 << 20
SHARD_OF_RANK_1 = "*/shard-00001.safetensors"


@pytest.fixture
def mount(place: Place) -> Iterator[Mounted]:
    if place.mount is None:
        pytest.skip("a real Lustre does not fail on request")
    place.mount.reset()
    yield place.mount
    place.mount.reset()


@pytest.fixture
def root(directory: Path, mount: Mounted, pair: Ranks) -> str:
    """A root with step 1 committed."""
    root = str(directory / "root")
    pair.call(cases.save, root, 1, MIB)
    mount.reset()
    return root


def shards_made(mount: Mounted, rank: int) -> list[str]:
    return [entry for entry in mount.done("create") if fnmatchcase(entry, f"*/shard-{rank:05d}.*")]


def failed_by(results: list[Result], code: int, rank: int) -> None:
    for result in results:
        assert isinstance(result.error, ck.StorageError), result
        assert result.error.errno == code
        assert result.error.rank == rank
        assert f"shard-{rank:05d}" in str(result.error.path)
        assert result.error.hint


class TestOneShot:
    @pytest.mark.parametrize(
        ("what", "nth", "code"),
        [
            ("fallocate", 1, errno.EDQUOT),
            ("direct write", 1, errno.EIO),
            ("direct write", 2, errno.EDQUOT),
            ("fsync", 1, errno.EIO),
            ("fsync", 2, errno.EIO),
            ("close", 1, errno.EDQUOT),
            ("close", 2, errno.EIO),
        ],
    )
    def test_fails_the_save_on_all_ranks_and_the_next_one_works(
        self, root: str, mount: Mounted, pair: Ranks, what: str, nth: int, code: int
    ) -> None:
        mount.fail(what, code, path=SHARD_OF_RANK_1, nth=nth)
        failed_by(pair.start(cases.save, root, 2, MIB).results(), code, rank=1)
        assert [info.step for info in pair.call(cases.restore, root, MIB)] == [1, 1]
        # Nothing of the poisoned file is used again.
        assert len(shards_made(mount, 1)) == 1
        assert [info.step for info in pair.call(cases.save, root, 2, MIB)] == [2, 2]
        assert [info.step for info in pair.call(cases.restore, root, MIB)] == [2, 2]

    @pytest.mark.parametrize("code", [errno.ESHUTDOWN, errno.ENOTCONN, errno.ESTALE])
    def test_a_client_that_lost_its_server_is_told_so(
        self, root: str, mount: Mounted, pair: Ranks, code: int
    ) -> None:
        mount.fail("direct write", code, path=SHARD_OF_RANK_1)
        results = pair.start(cases.save, root, 2, MIB).results()
        failed_by(results, code, rank=1)
        assert "lost its server" in str(results[0].error)

    def test_a_shard_that_other_mounts_see_truncated_is_not_committed(
        self, root: str, mount: Mounted, pair: Ranks
    ) -> None:
        mount.evict(SHARD_OF_RANK_1)
        for result in pair.start(cases.save, root, 2, MIB).results():
            assert isinstance(result.error, ck.SaveFailedError)
            assert result.error.rank == 1
            assert "does not see it whole" in str(result.error)
            assert "truncated" in str(result.error)
        assert [info.step for info in pair.call(cases.restore, root, MIB)] == [1, 1]

    def test_a_retry_writes_a_fresh_attempt(self, root: str, mount: Mounted, pair: Ranks) -> None:
        mount.fail("fsync", errno.EIO, path=SHARD_OF_RANK_1)
        infos = pair.call(cases.save, root, 2, MIB, {"retries": 1})
        assert [info.step for info in infos] == [2, 2]
        first, second = (os.path.dirname(entry) for entry in shards_made(mount, 1))
        assert first != second
        assert [info.step for info in pair.call(cases.restore, root, MIB)] == [2, 2]

    @pytest.mark.parametrize(
        ("what", "path"),
        [
            ("fsync", "*/.INDEX.*"),
            ("write", "*/.MANIFEST.json.*"),
            ("fsync", "*/.MANIFEST.json.*"),
            ("rename", "*/MANIFEST.json"),
        ],
    )
    def test_of_the_commit_keeps_the_old_step(
        self, root: str, mount: Mounted, pair: Ranks, what: str, path: str
    ) -> None:
        mount.fail(what, errno.EIO, path=path)
        for result in pair.start(cases.save, root, 2, MIB).results():
            assert isinstance(result.error, ck.StorageError)
        assert {info.step for info in pair.call(cases.restore, root, MIB)} == {1}
        assert not list(Path(root).rglob(".*.tmp"))

    @pytest.mark.parametrize("what", ["utime", "fsync", "close"])
    def test_after_the_manifest_has_its_name_is_an_error_of_a_whole_step(
        self, root: str, mount: Mounted, pair: Ranks, what: str
    ) -> None:
        mount.fail(what, errno.EIO, path="*/MANIFEST.json")
        for result in pair.start(cases.save, root, 2, MIB).results():
            assert isinstance(result.error, ck.StorageError)
        assert {info.step for info in pair.call(cases.restore, root, MIB)} == {2}

    def test_of_a_step_that_goes_while_a_job_starts_is_none(
        self, root: str, mount: Mounted, pair: Ranks
    ) -> None:
        """Another client's retention removes it between the look-up of its name and the listing."""
        for _ in range(2):  # the kernel tries again by itself, once
            mount.fail("opendir", errno.ESTALE, path="*/step-0000000001")
        assert [info.step for info in pair.call(cases.save, root, 2, MIB)] == [2, 2]
        assert len([done for done in mount.done("opendir") if done.endswith("/step-0000000001")]) > 2

    @pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
    def test_of_a_read_is_a_fall_back_or_an_error_but_never_wrong_bytes(
        self, root: str, mount: Mounted, pair: Ranks, code: int
    ) -> None:
        pair.call(cases.save, root, 2, MIB)
        mount.fail("read", code, path=SHARD_OF_RANK_1, nth=3)
        for result in pair.start(cases.restore, root, MIB, {"direct_io": "on"}).results():
            assert isinstance(result.error, ck.CheckpointError) or result.value.step in (1, 2)


class TestFullOst:
    def test_the_shard_is_written_anew_on_others(self, root: str, mount: Mounted, pair: Ranks) -> None:
        mount.fail("direct write", errno.ENOSPC, path=SHARD_OF_RANK_1, nth=2)
        infos = pair.call(cases.save, root, 2, MIB)
        assert [info.step for info in infos] == [2, 2]
        assert len(shards_made(mount, 1)) == 2
        assert len(shards_made(mount, 0)) == 1
        assert [info.step for info in pair.call(cases.restore, root, MIB)] == [2, 2]

    def test_a_full_ost_is_left_for_the_next(self, root: str, mount: Mounted, pair: Ranks) -> None:
        mount.fill([0])
        infos = pair.call(cases.save, root, 2, MIB)
        for ref in read_manifest(infos[0].path).shards:
            layout = lustre.layout_of(str(Path(infos[0].path) / ref.path))
            assert layout is not None
            assert layout.components[0].osts[0] != 0
        assert sum(len(shards_made(mount, rank)) for rank in (0, 1)) == 3
        assert [info.step for info in pair.call(cases.restore, root, MIB)] == [2, 2]

    def test_twice_is_an_error_that_says_where_to_look(
        self, root: str, mount: Mounted, pair: Ranks, place: Place
    ) -> None:
        mount.fill([*range(place.osts)])
        results = pair.start(cases.save, root, 2, MIB).results()
        for result in results:
            assert isinstance(result.error, ck.StorageError)
            assert result.error.errno == errno.ENOSPC
            assert "lfs df" in str(result.error)
        assert 1 <= max(len(shards_made(mount, rank)) for rank in (0, 1)) <= 2
        mount.fill([])
        assert [info.step for info in pair.call(cases.restore, root, MIB)] == [1, 1]
        assert [info.step for info in pair.call(cases.save, root, 2, MIB)] == [2, 2]


class TestLayout:
    def test_that_is_not_taken_is_noted_and_harms_nothing(
        self, root: str, mount: Mounted, pair: Ranks
    ) -> None:
        mount.refuse_layouts("silently")
        infos = pair.call(cases.save, root, 2, MIB, {"stripe_count": 4})
        for info in infos:
            assert any("asked for 4 x 4 MiB, it is: 1 x " in note for note in info.notes)
        assert [info.step for info in pair.call(cases.restore, root, MIB)] == [2, 2]

    def test_that_fails_is_noted_and_harms_nothing(self, root: str, mount: Mounted, pair: Ranks) -> None:
        mount.fail("setxattr", errno.EACCES)
        infos = pair.call(cases.save, root, 2, MIB)
        assert [len(info.notes) for info in infos] == [1, 1]
        assert "Permission denied" in infos[1].notes[0]

    def test_is_set_once_by_one_rank_before_any_shard(self, root: str, mount: Mounted, pair: Ranks) -> None:
        pair.call(cases.save, root, 2, MIB, {"stripe_count": 4})
        done = mount.done()
        sets = [i for i, entry in enumerate(done) if entry.startswith("setxattr")]
        shards = [i for i, entry in enumerate(done) if entry.startswith("create") and "/shard-" in entry]
        assert len(sets) == 2  # the step's directory, for the manifest, and the attempt's
        assert len(shards) == 2
        assert max(sets) < min(shards)


class TestRelease:
    def test_is_shown_and_logged_and_ends_with_a_restore(
        self,
        root: str,
        mount: Mounted,
        pair: Ranks,
        ckpt: Run,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        step = Path(root) / "step-0000000001"
        shards = [step / ref.path for ref in read_manifest(step).shards]
        mount.release(shards[1])
        with caplog.at_level(logging.WARNING):
            told = ckpt("inspect", root, "--json").json["shards"]
        assert [shard["striping"]["released"] for shard in told] == [False, True]
        # To show the tensors, it has read the header, and that fetched the file.
        fetched = f"restore /{os.path.relpath(shards[1], mount.path)}"
        assert mount.done("restore") == [fetched]
        assert f"{shards[1]} is in the archive only" in caplog.text
        mount.release(shards[1])
        shown = ckpt("inspect", root)
        assert "1 x 4 MiB, released" in shown.out
        assert "1 shard file released" in shown.err
        mount.release(shards[1])
        assert "released" not in ckpt("inspect", shards[0]).out
        assert [info.step for info in pair.call(cases.restore, root, MIB)] == [1, 1]
        assert mount.done("restore") == [fetched] * 3


class TestProgressive:
    def test_components_are_shown(self, root: str, mount: Mounted, ckpt: Run) -> None:
        step = Path(root) / "step-0000000001"
        shards = [step / ref.path for ref in read_manifest(step).shards]
        mount.put_layout(shards[0], FSX)
        mount.put_layout(shards[1], b"garbage")
        shown = ckpt("inspect", root)
        assert "0-100 MiB: 1 x 1 MiB, 100 MiB-10 GiB: 8 x 1 MiB" in shown.out
        assert "unknown" in shown.out
        first, second = (shard["striping"] for shard in ckpt("inspect", root, "--json").json["shards"])
        assert (first["kind"], first["components"][0]["stop"]) == ("composite", 100 * MIB)
        assert first["components"][-1]["stop"] is None
        assert "unknown" in second["error"]
        mount.put_layout(shards[1], encode(2, MIB, "flash"))
        assert "2 x 1 MiB, pool flash" in ckpt("inspect", shards[1]).out


def test_direct_io_takes_whole_pages_only(root: str, mount: Mounted, pair: Ranks) -> None:
    """The file system refuses anything else with EINVAL, after which all would go through the cache."""
    pair.call(cases.save, root, 2, MIB + 4099, {"block_nbytes": 64 << 10})
    writes = [entry for entry in mount.done() if "write" in entry.split(" /")[0] and "/shard-" in entry]
    direct = [entry for entry in writes if entry.startswith("direct")]
    # Only the block that ends in the middle of a page goes through the cache, one per rank.
    assert len(direct) >= 2 * (MIB // (128 << 10))
    assert len(writes) - len(direct) <= 2
    infos = pair.call(cases.restore, root, MIB + 4099, {"block_nbytes": 64 << 10})
    assert [info.step for info in infos] == [2, 2]
