"""The whole path on Lustre: layouts, direct I/O, the store's contract, and a job of two ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ckptengine as ck
from ckptengine.format.limits import PAGE
from ckptengine.storage import direct, lustre
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.storage.lustre_layout import ALL_OSTS, encode
from ckptengine.storage.lustre_policy import Striping, stripe_count
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import Store
from ckptengine.testing.store_contract import StoreContract, read_file, write_file
from tests.cli.conftest import Run
from tests.helpers.checkpoints import read_manifest
from tests.helpers.ranks import Ranks, wait_until
from tests.lustre import cases
from tests.lustre.conftest import Place

MIB = 1 << 20
O_LOV_DELAY_CREATE = 0o20400


class TestContract(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return PosixStore()

    @pytest.fixture
    def root(self, directory: Path) -> str:
        return str(directory)

    @pytest.fixture(autouse=True)
    def on_fuse(self, place: Place, request: pytest.FixtureRequest) -> None:
        if (
            place.mount is not None
            and request.function.__name__ == "test_readers_see_the_old_or_the_new_file"
        ):
            pytest.skip("libfuse finds an open file by its name, which is another's once it is replaced")


class TestLayouts:
    @pytest.mark.parametrize("count", [1, 2, ALL_OSTS])
    def test_a_directorys_default_is_kept_and_handed_down(
        self, place: Place, directory: Path, count: int
    ) -> None:
        store = PosixStore("auto", Striping(count, 2 * MIB))
        assert store.expect_files(str(directory), files=2, file_nbytes=64 * MIB) is None
        default = lustre.layout_of(str(directory))
        assert default is not None
        assert (default.components[0].stripe_count, default.components[0].stripe_nbytes) == (count, 2 * MIB)
        (directory / "below").mkdir()
        for path in (directory / "file", directory / "below" / "file"):
            write_file(store, str(path), os.urandom(5 * MIB))
            layout = lustre.layout_of(str(path))
            assert layout is not None
            (component,) = layout.components
            wanted = place.osts if count == ALL_OSTS else min(count, place.osts)
            assert (component.stripe_count, component.stripe_nbytes) == (wanted, 2 * MIB)
            assert len(set(component.osts)) == wanted
            assert max(component.osts) < place.osts

    def test_a_file_made_without_a_layout_takes_one(self, place: Place, directory: Path) -> None:
        path = directory / "delayed"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | O_LOV_DELAY_CREATE, 0o644)
        try:
            os.setxattr(fd, lustre.ATTRIBUTE, encode(min(2, place.osts), 3 * 65536))
        finally:
            os.close(fd)
        layout = lustre.layout_of(str(path))
        assert layout is not None
        (component,) = layout.components
        assert (component.stripe_count, component.stripe_nbytes) == (min(2, place.osts), 3 * 65536)

    def test_a_file_that_has_a_layout_keeps_it(self, directory: Path) -> None:
        path = directory / "file"
        path.write_bytes(b"x")
        before = lustre.layout_of(str(path))
        try:
            os.setxattr(path, lustre.ATTRIBUTE, encode(1, 7 * 65536))
        except OSError:
            pass  # the answer may be honest
        assert lustre.layout_of(str(path)) == before


class TestDirectIO:
    def test_whole_pages_bypass_the_cache_and_come_back(self, directory: Path) -> None:
        path = str(directory / "file")
        store = PosixStore("on")
        with AlignedBuffer(4 * MIB) as buffer, AlignedBuffer(MIB) as back:
            buffer.view[:] = os.urandom(4 * MIB)
            writer = store.create(path, nbytes=4 * MIB)
            for at in range(0, 4 * MIB, MIB):
                writer.pwrite(at, buffer.view[at : at + MIB])
            assert writer.direct
            assert writer.finish() == 4 * MIB
            with store.open(path) as reader:
                for at in range(0, 4 * MIB, MIB):
                    assert reader.pread_into(at, back.view) in ("direct", "cache")
                    assert back.view == buffer.view[at : at + MIB]

    @pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE + 1, MIB + 512, 3 * MIB - 1])
    def test_odd_sizes_come_back(self, directory: Path, nbytes: int) -> None:
        data = os.urandom(nbytes)
        for mode in ("auto", "on", "off"):
            path = str(directory / mode)
            write_file(PosixStore(mode), path, data)
            assert read_file(PosixStore(mode), path) == data

    def test_less_than_a_page_never_goes_past_the_cache(self, directory: Path) -> None:
        path = directory / "file"
        path.write_bytes(bytes(4 * PAGE))
        peer = os.open(path, os.O_RDONLY)
        file = direct.DirectFile(str(path), peer, os.O_RDONLY, "on")
        try:
            with AlignedBuffer(2 * PAGE) as buffer:
                assert file.for_transfer(PAGE, buffer.view[:PAGE]) >= 0
                assert file.for_transfer(512, buffer.view[:PAGE]) < 0
                assert file.for_transfer(0, buffer.view[:512]) < 0
                assert file.for_transfer(0, buffer.view[512 : 512 + PAGE]) < 0
        finally:
            os.close(file.fd)
            os.close(peer)


class TestTwoRanks:
    @pytest.mark.parametrize(
        ("nbytes", "options"),
        [
            (3 * MIB + 5, {}),
            (65 * MIB, {}),
            (MIB, {"stripe_count": 2, "stripe_nbytes": MIB}),
            (MIB, {"codec": "zstd", "stripe_count": -1, "direct_io": "on"}),
            (MIB, {"stripe_count": "inherit"}),
        ],
        ids=["small", "large", "chosen", "over all, compressed", "inherited"],
    )
    def test_save_inspect_and_restore(
        self, place: Place, directory: Path, pair: Ranks, ckpt: Run, nbytes: int, options: dict[str, object]
    ) -> None:
        root = str(directory / "root")
        inherited = lustre.layout_of(str(directory))
        assert inherited is not None
        infos: list[ck.CommitInfo] = pair.call(cases.save, root, 7, nbytes, options)
        assert [info.notes for info in infos] == [(), ()]
        step = Path(infos[0].path)
        manifest = read_manifest(step)
        if options.get("stripe_count") == "inherit":
            wanted = (inherited.components[0].stripe_count, inherited.components[0].stripe_nbytes)
        else:
            count = int(options.get("stripe_count", 0)) or stripe_count(
                manifest.shards[0].size, 2, place.osts
            )
            wanted = (place.osts if count == ALL_OSTS else count, options.get("stripe_nbytes", 4 * MIB))
        shown = ckpt("inspect", root, "--json").json
        for ref, told in zip(manifest.shards, shown["shards"], strict=True):
            layout = lustre.layout_of(str(step / ref.path))
            assert layout is not None
            assert (layout.components[0].stripe_count, layout.components[0].stripe_nbytes) == wanted
            first = told["striping"]["components"][0]
            assert (first["stripe_count"], first["stripe_nbytes"]) == wanted
            assert tuple(first["osts"]) == layout.components[0].osts
            assert told["striping"]["released"] is False
        if options.get("stripe_count") != "inherit":
            for name in ("INDEX", "MANIFEST.json"):
                layout = lustre.layout_of(str(step / name))
                assert layout is not None
                assert layout.components[0].stripe_count == 1
        text = ckpt("inspect", root).out
        assert f"{wanted[0]} x " in text
        assert "STRIPING" in text
        assert [info.step for info in pair.call(cases.restore, root, nbytes, options)] == [7, 7]
        report = ck.verify(root)
        assert report.ok

    def test_a_later_step_and_retention(self, directory: Path, pair: Ranks) -> None:
        root = str(directory / "root")
        for step in (1, 2, 3):
            pair.call(cases.save, root, step, MIB, {"keep_last": 1})
        # Retention runs when the commit has been told.
        wait_until(lambda: [name for name in os.listdir(root) if name[:5] == "step-"] == ["step-0000000003"])
        assert [info.step for info in pair.call(cases.restore, root, MIB)] == [3, 3]

    def test_one_shard_is_inspected(self, directory: Path, pair: Ranks, ckpt: Run) -> None:
        root = str(directory / "root")
        path = Path(pair.call(cases.save, root, 7, MIB)[0].path)
        shard = path / read_manifest(path).shards[1].path
        assert ckpt("inspect", shard, "--json").json["striping"]["components"][0]["stripe_count"] == 1
        assert "1 x 4 MiB" in ckpt("inspect", shard).out
