"""What the engine asks of Lustre, and that it asks nothing elsewhere. The file system is a real local one;
what it says about itself is made up where Lustre is needed."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptengine.config import Config
from ckptengine.format.limits import PAGE
from ckptengine.storage import direct, linux, lustre
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.storage.lustre_layout import ALL_OSTS, encode
from ckptengine.storage.lustre_policy import BY_POLICY, Striping
from ckptengine.storage.posix import PosixStore
from ckptengine.testing.store_contract import read_file, write_file

MIB, GIB = 1 << 20, 1 << 30


class Imagined:
    """A Lustre of which only the layouts exist: a dictionary per path, and a number of OSTs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.osts: int | None = 8
        self.layouts: dict[str, bytes] = {}
        self.sets: list[tuple[str, bytes]] = []
        self.keep = True
        monkeypatch.setattr(linux, "file_system_type", lambda fd: lustre.FILE_SYSTEM_TYPE)
        monkeypatch.setattr(os, "getxattr", self.getxattr)
        monkeypatch.setattr(os, "setxattr", self.setxattr)
        monkeypatch.setattr(lustre.fcntl, "ioctl", self.ioctl)

    def path(self, fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def getxattr(self, fd: int, name: str) -> bytes:
        assert name == "lustre.lov"
        if self.path(fd) not in self.layouts:
            raise OSError(errno.ENODATA, "no data")
        return self.layouts[self.path(fd)]

    def setxattr(self, fd: int, name: str, value: bytes) -> None:
        assert name == "lustre.lov"
        self.sets.append((self.path(fd), value))
        if self.keep:
            self.layouts[self.path(fd)] = value

    def ioctl(self, fd: int, request: int, answer: bytearray) -> int:
        assert request == 0x800866A8
        assert answer == bytes(8), "0 asks for OSTs, not for metadata servers"
        if self.osts is None:
            raise OSError(errno.ENOTTY, "not a Lustre ioctl")
        answer[:4] = self.osts.to_bytes(4, "little")
        return 0


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> Imagined:
    return Imagined(monkeypatch)


class TestElsewhere:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """How often statfs was asked; an extended attribute or an ioctl fails the test."""
        asked: list[str] = []
        real = linux.file_system_type

        def file_system_type(fd: int) -> int:
            asked.append(os.readlink(f"/proc/self/fd/{fd}"))
            return real(fd)

        def never(*args: object) -> None:
            raise AssertionError("a file system that is not Lustre was asked about layouts")

        monkeypatch.setattr(linux, "file_system_type", file_system_type)
        for name in ("getxattr", "setxattr", "listxattr", "removexattr"):
            monkeypatch.setattr(os, name, never)
        monkeypatch.setattr(lustre.fcntl, "ioctl", never)
        return asked

    def test_the_type_of_a_file_system_is_what_stat_says(self, tmp_path: Path) -> None:
        for path in (tmp_path, Path("/proc")):
            fd = os.open(path, os.O_RDONLY)
            kind = linux.file_system_type(fd)
            os.close(fd)
            told = subprocess.run(["stat", "-f", "-c", "%t", path], capture_output=True, check=True).stdout
            assert kind == int(told, 16)
            assert kind != lustre.FILE_SYSTEM_TYPE

    def test_a_closed_descriptor_is_an_error(self) -> None:
        with pytest.raises(OSError, match="fstatfs"):
            linux.file_system_type(-1)

    def test_a_directory_costs_one_statfs(self, tmp_path: Path, asked: list[str]) -> None:
        store = PosixStore("auto", Striping(4))
        assert store.expect_files(str(tmp_path), files=8, file_nbytes=GIB) is None
        assert asked == [str(tmp_path)]

    def test_inherit_costs_nothing(self, tmp_path: Path, asked: list[str]) -> None:
        store = PosixStore("auto", Striping("inherit"))
        assert store.expect_files(str(tmp_path), files=8, file_nbytes=GIB) is None
        assert asked == []

    def test_a_file_costs_one_statfs_at_most_each_time_it_is_opened(
        self, tmp_path: Path, asked: list[str]
    ) -> None:
        store = PosixStore()
        path = str(tmp_path / "file")
        write_file(store, path, bytes(2 * PAGE))
        assert len(asked) <= 1
        asked.clear()
        assert read_file(store, path) == bytes(2 * PAGE)
        assert len(asked) <= 1
        store.publish(str(tmp_path / "M"), b"x")
        store.sync_dir(str(tmp_path))
        assert len(asked) <= 1

    def test_a_full_disk_is_full(self, tmp_path: Path, asked: list[str]) -> None:
        assert not PosixStore().may_fit_elsewhere(str(tmp_path), nbytes=1)
        assert asked == [str(tmp_path)]

    def test_there_are_no_layouts(self, tmp_path: Path, asked: list[str]) -> None:
        assert lustre.layout_of(str(tmp_path)) is None


class TestDefault:
    def set(
        self, path: Path, striping: Striping = BY_POLICY, files: int = 2, file_nbytes: int = GIB
    ) -> str | None:
        return PosixStore("auto", striping).expect_files(str(path), files=files, file_nbytes=file_nbytes)

    def test_is_set_by_the_table(self, tmp_path: Path, imagined: Imagined) -> None:
        assert self.set(tmp_path) is None
        assert imagined.sets == [(str(tmp_path), encode(4, 4 * MIB))]

    def test_is_set_as_configured(self, tmp_path: Path, imagined: Imagined) -> None:
        imagined.osts = None  # not needed, so not asked
        assert self.set(tmp_path, Striping(ALL_OSTS, MIB)) is None
        assert imagined.sets == [(str(tmp_path), encode(ALL_OSTS, MIB))]

    @pytest.mark.parametrize("count", ["auto", 7, ALL_OSTS])
    def test_small_files_go_to_one_ost(self, tmp_path: Path, imagined: Imagined, count: int) -> None:
        assert self.set(tmp_path, Striping(count), file_nbytes=0) is None
        assert imagined.sets == [(str(tmp_path), encode(1, 4 * MIB))]

    def test_is_not_touched_to_inherit(self, tmp_path: Path, imagined: Imagined) -> None:
        assert self.set(tmp_path, Striping("inherit")) is None
        assert self.set(tmp_path, Striping("inherit"), file_nbytes=0) is None
        assert imagined.sets == []

    def test_is_inherited_where_the_number_of_osts_is_not_known(
        self, tmp_path: Path, imagined: Imagined
    ) -> None:
        for osts in (None, 0):
            imagined.osts = osts
            assert self.set(tmp_path) is None
            assert imagined.sets == []

    def test_is_not_set_twice(self, tmp_path: Path, imagined: Imagined) -> None:
        for _ in range(2):
            assert self.set(tmp_path) is None
        assert len(imagined.sets) == 1

    def test_keeps_the_pool(self, tmp_path: Path, imagined: Imagined) -> None:
        imagined.layouts[str(tmp_path)] = encode(1, MIB, "flash")
        assert self.set(tmp_path) is None
        assert imagined.sets == [(str(tmp_path), encode(4, 4 * MIB, "flash"))]

    def test_that_is_not_kept_is_said(self, tmp_path: Path, imagined: Imagined) -> None:
        imagined.keep = False
        problem = self.set(tmp_path)
        assert problem is not None
        assert str(tmp_path) in problem
        assert "asked for 4 x 4 MiB, it is: none" in problem
        imagined.layouts[str(tmp_path)] = encode(1, MIB)
        assert "it is: 1 x 1 MiB" in str(self.set(tmp_path))

    @pytest.mark.parametrize("call", ["getxattr", "setxattr"])
    def test_that_fails_is_said(
        self, tmp_path: Path, imagined: Imagined, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        def fail(*args: object) -> None:
            raise OSError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, call, fail)
        assert "Permission denied" in str(self.set(tmp_path))

    def test_that_cannot_be_read_is_said(self, tmp_path: Path, imagined: Imagined) -> None:
        imagined.layouts[str(tmp_path)] = b"garbage"
        assert "unknown" in str(self.set(tmp_path))

    def test_of_a_missing_directory_is_said(self, tmp_path: Path, imagined: Imagined) -> None:
        assert "No such file" in str(self.set(tmp_path / "missing"))

    def test_leaves_no_descriptor_open(self, tmp_path: Path, imagined: Imagined) -> None:
        before = set(os.listdir("/proc/self/fd"))
        imagined.layouts[str(tmp_path)] = b"garbage"
        self.set(tmp_path)
        imagined.layouts.clear()
        self.set(tmp_path)
        lustre.layout_of(str(tmp_path))
        PosixStore().may_fit_elsewhere(str(tmp_path), nbytes=1)
        assert set(os.listdir("/proc/self/fd")) == before


class TestRoom:
    def test_is_what_all_osts_have_together(self, tmp_path: Path, imagined: Imagined) -> None:
        status = os.statvfs(tmp_path)
        free = status.f_bavail * status.f_frsize
        assert PosixStore().may_fit_elsewhere(str(tmp_path), nbytes=free // 2)
        assert not PosixStore().may_fit_elsewhere(str(tmp_path), nbytes=free * 2)

    def test_is_none_in_a_directory_that_is_gone(self, tmp_path: Path, imagined: Imagined) -> None:
        assert not PosixStore().may_fit_elsewhere(str(tmp_path / "missing"), nbytes=0)


class TestReleased:
    RELEASED = encode(1, MIB)[:7] + b"\x80" + encode(1, MIB)[8:]

    @pytest.fixture
    def one_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """fstat as Lustre answers it for a released file."""
        real = os.fstat

        def fstat(fd: int) -> os.stat_result | SimpleNamespace:
            status = real(fd)
            fields = ("st_mode", "st_size", "st_dev", "st_ino")
            return SimpleNamespace(st_blocks=1, **{name: getattr(status, name) for name in fields})

        monkeypatch.setattr(os, "fstat", fstat)

    def warned(self, path: Path, caplog: pytest.LogCaptureFixture) -> bool:
        caplog.clear()
        with caplog.at_level(logging.WARNING), PosixStore().open(str(path)):
            return "archive" in caplog.text

    @pytest.mark.usefixtures("one_block")
    def test_a_file_in_the_archive_is_said_to_be_there(
        self, tmp_path: Path, imagined: Imagined, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "shard"
        path.write_bytes(bytes(PAGE))
        imagined.layouts[str(path)] = self.RELEASED
        assert self.warned(path, caplog)
        for there in (encode(1, MIB), b"garbage"):
            imagined.layouts[str(path)] = there
            assert not self.warned(path, caplog)
        imagined.layouts.clear()
        assert not self.warned(path, caplog)

    def test_a_file_with_blocks_is_not_asked(
        self, tmp_path: Path, imagined: Imagined, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "shard"
        path.write_bytes(random.Random(0).randbytes(64 << 10))
        os.sync()
        imagined.layouts[str(path)] = self.RELEASED
        assert not self.warned(path, caplog)


class TestAlignment:
    @pytest.mark.parametrize("told", [(512, 512), (4, 512), (4096, 512), None, (8192, 4096)])
    def test_lustre_gets_whole_pages_whatever_it_tells(
        self,
        tmp_path: Path,
        imagined: Imagined,
        monkeypatch: pytest.MonkeyPatch,
        told: tuple[int, int] | None,
    ) -> None:
        monkeypatch.setattr(direct, "direct_io_alignment", lambda fd: told)
        self.check(tmp_path, whole_pages=True)

    def test_others_are_trusted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(direct, "direct_io_alignment", lambda fd: (512, 512))
        self.check(tmp_path, whole_pages=False)

    def check(self, tmp_path: Path, *, whole_pages: bool) -> None:
        path = tmp_path / "file"
        path.write_bytes(bytes(4 * PAGE))
        peer = os.open(path, os.O_RDONLY)
        file = direct.DirectFile(str(path), peer, os.O_RDONLY, "auto")
        try:
            if file.open() < 0:
                pytest.skip("no direct I/O on this file system")
            with AlignedBuffer(4 * PAGE) as buffer:
                assert file.for_transfer(0, buffer.view[: 2 * PAGE]) >= 0 or file._memory > PAGE
                for offset, start, nbytes in ((512, 0, PAGE), (0, 0, PAGE + 512), (0, 512, PAGE)):
                    allowed = file.for_transfer(offset, buffer.view[start : start + nbytes]) >= 0
                    assert allowed is not whole_pages
        finally:
            os.close(peer)
            if file.fd >= 0:
                os.close(file.fd)

    def test_a_file_system_without_direct_io_stays_without(
        self, tmp_path: Path, imagined: Imagined, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(direct, "direct_io_alignment", lambda fd: (0, 0))
        writer = PosixStore().create(str(tmp_path / "file"), nbytes=PAGE)
        assert not writer.direct
        writer.abort()


class TestConfig:
    @pytest.mark.parametrize("count", ["auto", "inherit", ALL_OSTS, 1, 2000])
    def test_counts(self, count: int) -> None:
        assert Config(stripe_count=count).stripe_count == count

    @pytest.mark.parametrize("count", ["all", "", 0, -2, 2001])
    def test_impossible_counts(self, count: int) -> None:
        with pytest.raises(ValueError, match="stripe_count"):
            Config(stripe_count=count)

    @pytest.mark.parametrize("nbytes", [0, -65536, 4096, MIB + 1, 1 << 32])
    def test_impossible_sizes(self, nbytes: int) -> None:
        with pytest.raises(ValueError, match="stripe_nbytes"):
            Config(stripe_nbytes=nbytes)

    def test_what_is_allowed_can_be_encoded(self) -> None:
        for nbytes in (65536, 4 * MIB, (1 << 32) - 65536):
            encode(1, Config(stripe_nbytes=nbytes).stripe_nbytes)
