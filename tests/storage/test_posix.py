"""What `PosixStore` does beyond the contract: direct I/O, poisoned writers, order of fsyncs, errors."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptengine.errors import CorruptCheckpointError, StorageError
from ckptengine.format.limits import PAGE
from ckptengine.storage import blockio, durable, posix
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.storage.durable import is_temporary
from ckptengine.storage.linux import address_of, direct_io_alignment, resident_pages
from ckptengine.storage.posix import PosixStore
from ckptengine.testing.store_contract import write_file

MIB = 1 << 20


def raiser(code: int):
    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture
def cold_file(tmp_path: Path) -> str:
    """8 MiB on a file system that takes O_DIRECT, none of it in the page cache."""
    path = str(tmp_path / "cold")
    with AlignedBuffer(8 * MIB) as buffer:
        buffer.view[:] = random.Random(0).randbytes(8 * MIB)
        writer = PosixStore().create(path, nbytes=8 * MIB)
        direct = writer.direct
        writer.pwrite(0, buffer.view)
        writer.finish()
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            left = resident_pages(fd, 0, 8 * MIB)
        except OSError:
            pytest.skip("this kernel does not tell what is in the page cache")
        if not direct or left:
            pytest.skip("this file system lives in the page cache")
    finally:
        os.close(fd)
    return path


class TestDirect:
    def test_a_cold_file_is_read_past_the_page_cache_and_leaves_it_as_it_is(self, cold_file: str) -> None:
        with PosixStore().open(cold_file) as reader, AlignedBuffer(MIB) as buffer:
            for at in range(0, 8 * MIB, MIB):
                assert reader.pread_into(at, buffer.view) == "direct"
        fd = os.open(cold_file, os.O_RDONLY)
        # Asking must not start readahead: the disk would read everything twice.
        assert resident_pages(fd, 0, 8 * MIB) == 0
        os.close(fd)

    def test_a_file_in_the_page_cache_is_read_from_there(self, cold_file: str) -> None:
        Path(cold_file).read_bytes()
        with PosixStore().open(cold_file) as reader, AlignedBuffer(MIB) as buffer:
            assert reader.pread_into(MIB, buffer.view) == "cache"

    def test_a_block_partly_in_the_page_cache_is_read_directly(self, cold_file: str) -> None:
        fd = os.open(cold_file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(fd, PAGE, 0)
        os.close(fd)
        with PosixStore().open(cold_file) as reader, AlignedBuffer(MIB) as buffer:
            assert reader.pread_into(0, buffer.view) == "direct"

    def test_without_cachestat_probing_costs_the_cache_a_few_pages(
        self, cold_file: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckptengine.storage.residency.resident_pages", raiser(errno.ENOSYS))
        with PosixStore().open(cold_file) as reader, AlignedBuffer(MIB) as buffer:
            for at in range(0, 8 * MIB, MIB):
                assert reader.pread_into(at, buffer.view) == "direct"
            fd = os.open(cold_file, os.O_RDONLY)
            assert resident_pages(fd, 0, 8 * MIB) < 8 * MIB // PAGE // 10
            os.close(fd)
            Path(cold_file).read_bytes()
            assert reader.pread_into(MIB, buffer.view) == "cache"

    def test_a_file_system_that_tells_nothing_is_read_directly(
        self, cold_file: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckptengine.storage.residency.resident_pages", raiser(errno.EPERM))
        real = os.preadv
        asked = []

        def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            if flags:
                asked.append(offset)
                raise OSError(errno.EOPNOTSUPP, "no RWF_NOWAIT")
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)
        with PosixStore().open(cold_file) as reader, AlignedBuffer(MIB) as buffer:
            assert [reader.pread_into(at, buffer.view) for at in (0, MIB)] == ["direct", "direct"]
        assert len(asked) == 1

    def test_unaligned_memory_offset_or_length_goes_through_the_cache(self, cold_file: str) -> None:
        good = Path(cold_file).read_bytes()
        fd = os.open(cold_file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        with AlignedBuffer(MIB + PAGE) as buffer:
            for offset, start, nbytes in ((0, 1, PAGE), (7, 0, PAGE), (0, 0, PAGE - 1)):
                with PosixStore().open(cold_file) as reader:
                    out = buffer.view[start : start + nbytes]
                    assert reader.pread_into(2 * MIB + offset, out) in ("buffered", "cache")
                    assert bytes(out) == good[2 * MIB + offset :][:nbytes]

    def test_off_never_opens_for_direct_io(self, cold_file: str) -> None:
        with PosixStore("off").open(cold_file) as reader, AlignedBuffer(MIB) as buffer:
            assert reader.pread_into(0, buffer.view) == "buffered"
        writer = PosixStore("off").create(cold_file + "2", nbytes=PAGE)
        assert not writer.direct
        writer.abort()

    @pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
    def test_a_file_system_that_refuses_to_open_for_direct_io(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        real = os.open

        def refuse(path: str, flags: int, *args: object, **kwargs: object) -> int:
            if flags & os.O_DIRECT:
                raise OSError(code, os.strerror(code))
            return real(path, flags, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", refuse)
        writer = PosixStore().create(str(tmp_path / "auto"), nbytes=PAGE)
        assert not writer.direct
        writer.pwrite(0, memoryview(bytes(PAGE)))
        assert writer.finish() == PAGE
        with pytest.raises(StorageError, match="direct I/O") as caught:
            PosixStore("on").create(str(tmp_path / "on"), nbytes=PAGE)
        assert "auto" in (caught.value.hint or "")
        assert [path.name for path in tmp_path.iterdir()] == ["auto"]

    def test_a_file_system_without_direct_io_by_its_own_word(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckptengine.storage.direct.direct_io_alignment", lambda fd: (0, 0))
        writer = PosixStore().create(str(tmp_path / "auto"), nbytes=PAGE)
        assert not writer.direct
        writer.abort()
        with pytest.raises(StorageError):
            PosixStore("on").create(str(tmp_path / "on"), nbytes=PAGE)

    def test_a_transfer_that_is_refused_goes_through_the_cache_for_good(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckptengine.storage.direct.direct_io_alignment", lambda fd: (512, 512))
        path = str(tmp_path / "file")
        store = PosixStore()
        writer = store.create(path, nbytes=4 * PAGE)
        if not writer.direct:
            pytest.skip("no O_DIRECT here")
        direct_fds = {writer._files.direct.fd}
        real = {"pwrite": os.pwrite, "preadv": os.preadv}
        refused = []

        def transfer(name: str):
            def call(fd: int, *args: object) -> int:
                if fd in direct_fds:
                    refused.append(name)
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                return real[name](fd, *args)  # type: ignore[no-any-return]

            return call

        monkeypatch.setattr(os, "pwrite", transfer("pwrite"))
        monkeypatch.setattr(os, "preadv", transfer("preadv"))
        with AlignedBuffer(2 * PAGE) as buffer:
            buffer.view[:] = b"x" * 2 * PAGE
            writer.pwrite(0, buffer.view)
            assert not writer.direct
            writer.pwrite(2 * PAGE, buffer.view)
            writer.finish()
            assert refused == ["pwrite"]
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            monkeypatch.setattr("ckptengine.storage.residency.resident_pages", lambda *args: 0)
            with store.open(path) as reader:
                direct_fds.add(reader._files.direct.open())
                assert reader.pread_into(0, buffer.view) == "buffered"
                assert reader.pread_into(PAGE, buffer.view) == "buffered"
            assert refused == ["pwrite", "preadv"]
            direct_fds.clear()
            with PosixStore("on").open(path) as reader:
                direct_fds.add(reader._files.direct.open())
                with pytest.raises(StorageError, match="direct I/O"):
                    reader.pread_into(0, buffer.view)

    def test_alignment_is_a_power_of_two_or_not_told(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"")
        fd = os.open(path, os.O_RDONLY)
        for alignment in direct_io_alignment(fd) or ():
            assert alignment & (alignment - 1) == 0
        os.close(fd)

    def test_address_of_read_only_and_writable_memory(self) -> None:
        with AlignedBuffer(2 * PAGE) as buffer:
            assert buffer.address % PAGE == 0
            assert address_of(buffer.view) == buffer.address
            assert address_of(buffer.view[5:].toreadonly()) == buffer.address + 5
        assert address_of(memoryview(b"")) >= 0

    def test_a_closed_buffer_lives_on_in_its_views(self) -> None:
        buffer = AlignedBuffer(PAGE)
        view = buffer.view
        buffer.close()
        buffer.close()
        view[:4] = b"abcd"
        assert bytes(view[:4]) == b"abcd"
        with pytest.raises(ValueError, match="closed"):
            _ = buffer.view
        with pytest.raises(ValueError, match="at least one byte"):
            AlignedBuffer(0)


class TestPoisonedWriter:
    def failing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int):
        writer = PosixStore().create(str(tmp_path / "shard"), nbytes=2 * PAGE)
        writer.pwrite(0, memoryview(bytes(PAGE)))
        monkeypatch.setattr(blockio.os, name, raiser(code))
        return writer

    def check_poisoned(self, writer, tmp_path: Path, code: int) -> None:
        for operation in (lambda: writer.pwrite(PAGE, memoryview(bytes(PAGE))), writer.finish):
            with pytest.raises(StorageError, match="an earlier operation on this file failed") as caught:
                operation()
            assert caught.value.errno == code
            assert caught.value.path == str(tmp_path / "shard")
        writer.abort()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESHUTDOWN])
    def test_by_a_write(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        with monkeypatch.context() as patch:
            writer = self.failing(tmp_path, patch, "pwrite", code)
            with pytest.raises(StorageError, match="write 4096 bytes") as caught:
                writer.pwrite(PAGE, memoryview(bytes(PAGE)))
            assert (caught.value.errno, caught.value.offset) == (code, PAGE)
        self.check_poisoned(writer, tmp_path, code)

    def test_by_an_fsync_that_fails_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            writer = self.failing(tmp_path, patch, "fsync", errno.EIO)
            with pytest.raises(StorageError, match="fsync"):
                writer.finish()
        self.check_poisoned(writer, tmp_path, errno.EIO)

    def test_by_a_close(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.close
        failed = []

        def close(fd: int) -> None:
            real(fd)
            failed.append(fd)
            raise OSError(errno.ESHUTDOWN, "evicted")

        writer = PosixStore().create(str(tmp_path / "shard"), nbytes=PAGE)
        count = 2 if writer.direct else 1
        with monkeypatch.context() as patch:
            patch.setattr(blockio.os, "close", close)
            with pytest.raises(StorageError, match="close"):
                writer.finish()
        assert len(set(failed)) == count, "both descriptors are closed, each once"
        self.check_poisoned(writer, tmp_path, errno.ESHUTDOWN)

    def test_by_a_real_refusal_of_the_kernel(self, tmp_path: Path) -> None:
        code = f"""
import resource, signal
from ckptengine.storage.posix import PosixStore
from ckptengine.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
store = PosixStore()
try:
    store.create({str(tmp_path / "reserved")!r}, nbytes=1 << 20)
except StorageError as error:
    print(error.errno, error.hint)
writer = store.create({str(tmp_path / "shard")!r}, nbytes=0)
for operation in (lambda: writer.pwrite(0, memoryview(bytes(1 << 20))), writer.finish):
    try:
        operation()
    except StorageError as error:
        print(error.errno)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        assert lines[0].startswith(f"{errno.EFBIG} ")
        assert lines[1:] == [str(errno.EFBIG)] * 2
        assert [path.name for path in tmp_path.iterdir()] == ["shard"]

    def test_finish_with_writes_under_way_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer, release, thread = self.slow_write(tmp_path, monkeypatch)
        with pytest.raises(StorageError, match="under way"):
            writer.finish()
        release.set()
        thread.join()

    def test_abort_with_writes_under_way_closes_after_the_last(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer, release, thread = self.slow_write(tmp_path, monkeypatch)
        fd = writer._files.fd
        writer.abort()
        os.fstat(fd)  # still open: closed now, its number could become another file under the running write
        release.set()
        thread.join()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        assert list(tmp_path.iterdir()) == []

    def slow_write(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        real = os.pwrite
        started, release = threading.Event(), threading.Event()

        def pwrite(fd: int, data: memoryview, offset: int) -> int:
            started.set()
            release.wait(30)
            return real(fd, data, offset)

        writer = PosixStore().create(str(tmp_path / "shard"), nbytes=PAGE)
        monkeypatch.setattr(blockio.os, "pwrite", pwrite)
        thread = threading.Thread(target=writer.pwrite, args=(0, memoryview(bytes(PAGE))))
        thread.start()
        started.wait(30)
        return writer, release, thread

    def test_short_writes_are_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.pwrite
        calls = []

        def pwrite(fd: int, data: memoryview, offset: int) -> int:
            calls.append(offset)
            return real(fd, data[: min(len(data), 512)] if len(data) % 512 == 0 else data, offset)

        data = random.Random(5).randbytes(PAGE)
        writer = PosixStore().create(str(tmp_path / "shard"), nbytes=PAGE)
        monkeypatch.setattr(blockio.os, "pwrite", pwrite)
        writer.pwrite(0, memoryview(data))
        assert calls == list(range(0, PAGE, 512))
        assert writer.finish() == PAGE
        assert (tmp_path / "shard").read_bytes() == data

    def test_a_write_that_takes_nothing_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer = PosixStore().create(str(tmp_path / "shard"), nbytes=PAGE)
        monkeypatch.setattr(blockio.os, "pwrite", lambda *args: 0)
        with pytest.raises(StorageError, match="no more bytes"):
            writer.pwrite(0, memoryview(bytes(PAGE)))


class TestReserve:
    def test_space_is_reserved(self, tmp_path: Path) -> None:
        writer = PosixStore().create(str(tmp_path / "shard"), nbytes=MIB)
        status = os.stat(tmp_path / "shard")
        assert status.st_size == MIB
        writer.abort()

    @pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
    def test_a_file_system_that_cannot_reserve_is_fine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        monkeypatch.setattr(posix, "fallocate", raiser(code))
        writer = PosixStore().create(str(tmp_path / "shard"), nbytes=PAGE)
        writer.pwrite(0, memoryview(bytes(PAGE)))
        assert writer.finish() == PAGE

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_disk_shows_at_once_and_leaves_no_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        monkeypatch.setattr(posix, "fallocate", raiser(code))
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(StorageError, match="reserve 4096 bytes") as caught:
            PosixStore().create(str(tmp_path / "shard"), nbytes=PAGE)
        assert caught.value.errno == code
        assert caught.value.hint
        assert list(tmp_path.iterdir()) == []
        assert len(os.listdir("/proc/self/fd")) == before


class TestPublish:
    def test_the_order_of_steps(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        steps: list[str] = []

        def record(name: str):
            real = getattr(os, name)

            def call(first: object, *args: object) -> object:
                what = first if isinstance(first, str) else os.readlink(f"/proc/self/fd/{first}")
                kind = "directory" if os.path.isdir(str(what)) else "file"
                steps.append(f"{name} {kind}")
                return real(first, *args)

            return call

        with monkeypatch.context() as patch:
            for name in ("write", "fsync", "rename", "utime"):
                patch.setattr(durable.os, name, record(name))
            durable.publish(str(tmp_path / "M"), b"x")
        assert steps == [
            "write file",
            "fsync file",
            "rename file",
            "utime file",
            "fsync file",
            "fsync directory",
        ]

    @pytest.mark.parametrize("name", ["write", "fsync", "rename"])
    def test_a_failure_before_the_rename_keeps_the_old_file_and_no_other(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        path = tmp_path / "M"
        path.write_bytes(b"old")
        with monkeypatch.context() as patch:
            patch.setattr(durable.os, name, raiser(errno.EIO))
            with pytest.raises(StorageError) as caught:
                durable.publish(str(path), b"new")
            assert caught.value.errno == errno.EIO
        assert path.read_bytes() == b"old"
        assert [entry.name for entry in tmp_path.iterdir()] == ["M"]
        durable.publish(str(path), b"new")
        assert path.read_bytes() == b"new"

    def test_a_failure_after_the_rename_is_an_error_and_may_be_repeated(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "M"
        with monkeypatch.context() as patch:
            patch.setattr(durable.os, "utime", raiser(errno.EIO))
            with pytest.raises(StorageError, match="after the rename"):
                durable.publish(str(path), b"new")
        durable.publish(str(path), b"new")
        assert [entry.name for entry in tmp_path.iterdir()] == ["M"]

    def test_an_error_of_close_is_a_failure(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.close

        def close(fd: int) -> None:
            real(fd)
            raise OSError(errno.EDQUOT, "quota")

        with monkeypatch.context() as patch:
            patch.setattr(durable.os, "close", close)
            with pytest.raises(StorageError, match="close"):
                durable.publish(str(tmp_path / "M"), b"x")

    @pytest.mark.parametrize(("code", "ignored"), [(errno.EINVAL, True), (errno.EIO, False)])
    def test_a_file_system_without_fsync_of_directories(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, ignored: bool
    ) -> None:
        monkeypatch.setattr(durable.os, "fsync", raiser(code))
        if ignored:
            durable.sync_dir(str(tmp_path))
        else:
            with pytest.raises(StorageError, match="fsync the directory"):
                durable.sync_dir(str(tmp_path))

    def test_a_publisher_killed_anywhere_leaves_a_whole_file(self, tmp_path: Path) -> None:
        code = f"""
from ckptengine.storage.durable import publish
n = 0
while True:
    publish({str(tmp_path / "M")!r}, b"%d " % n * 20000)
    n += 1
"""
        chance = random.Random(6)
        for _ in range(4):
            child = subprocess.Popen([sys.executable, "-c", code])
            deadline = time.monotonic() + 30
            while not (tmp_path / "M").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(chance.random() * 0.1)
            child.send_signal(signal.SIGKILL)
            child.wait()
            parts = (tmp_path / "M").read_bytes().split()
            assert len(parts) == 20000
            assert len(set(parts)) == 1
            for path in tmp_path.iterdir():
                assert path.name == "M" or is_temporary(path.name, of=["M"])

    def test_what_counts_as_a_temporary_file(self) -> None:
        assert is_temporary(".INDEX.0123456789abcdef.tmp", of=["INDEX"])
        for name in (
            ".INDEX.tmp",
            "INDEX.0123456789abcdef.tmp",
            ".INDEX.0123456789abcdef.tmp~",
            ".x.0123.tmp",
        ):
            assert not is_temporary(name, of=["INDEX"])
        assert not is_temporary(".INDEX.0123456789abcdef.tmp", of=["MANIFEST.json"])


class TestMakeDirs:
    def synced(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> list[str]:
        found: list[str] = []
        real = durable.sync_dir
        with monkeypatch.context() as patch:
            patch.setattr(durable, "sync_dir", lambda path: (found.append(path), real(path)))
            PosixStore().make_dirs(str(path))
        return found

    def test_parents_of_new_directories_are_synced_and_always_the_last_two(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b, c = tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"
        assert set(self.synced(monkeypatch, c)) == {str(tmp_path), str(a), str(b)}
        # They may have been made by a process that died before it could sync them.
        assert set(self.synced(monkeypatch, c)) == {str(a), str(b)}

    def test_a_parent_that_cannot_be_opened_matters_only_if_it_was_changed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = durable.sync_dir

        def sync_dir(path: str) -> None:
            if path == str(tmp_path):
                raise StorageError("could not fsync the directory", errno=errno.EACCES, path=path)
            real(path)

        (tmp_path / "a").mkdir()
        monkeypatch.setattr(durable, "sync_dir", sync_dir)
        PosixStore().make_dirs(str(tmp_path / "a" / "b"))
        with pytest.raises(StorageError, match="fsync"):
            PosixStore().make_dirs(str(tmp_path / "c"))


class TestErrors:
    def test_a_storage_error_says_what_where_and_what_next(self, tmp_path: Path) -> None:
        error = None
        try:
            PosixStore().list(str(tmp_path) + "/" + "x" * 300)
        except StorageError as exc:
            error = exc
        assert error is not None
        assert error.errno == errno.ENAMETOOLONG
        assert "list the directory" in str(error)
        assert str(tmp_path) in str(error)
        assert isinstance(error, OSError)

    def test_opening_a_fifo_or_socket_neither_waits_nor_succeeds(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "socket"))
            for name in ("fifo", "socket"):
                with pytest.raises(CorruptCheckpointError, match="not a regular file"):
                    PosixStore().open(str(tmp_path / name))

    def test_a_file_that_grows_while_it_is_read_is_still_bounded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"x" * 100)
        real = posix._open_regular
        monkeypatch.setattr(posix, "_open_regular", lambda path: (real(path)[0], 10))
        with pytest.raises(CorruptCheckpointError, match="too large"):
            PosixStore().read(str(path), limit=50)

    def test_nothing_is_left_open(self, tmp_path: Path) -> None:
        store = PosixStore()
        before = set(os.listdir("/proc/self/fd"))
        write_file(store, str(tmp_path / "a"), bytes(PAGE))
        store.publish(str(tmp_path / "b"), b"x")
        store.make_dirs(str(tmp_path / "c" / "d"))
        for bad in ("c", "missing"):
            with pytest.raises((CorruptCheckpointError, FileNotFoundError)):
                store.open(str(tmp_path / bad))
        with pytest.raises(StorageError):
            store.create(str(tmp_path / "a"), nbytes=1)
        with store.lock_shared(str(tmp_path)), store.open(str(tmp_path / "a")) as reader:
            with AlignedBuffer(PAGE) as buffer:
                reader.pread_into(0, buffer.view)
        store.remove_tree(str(tmp_path / "c"))
        assert set(os.listdir("/proc/self/fd")) == before

    def test_many_files_need_few_descriptors(self, tmp_path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = len(os.listdir("/proc/self/fd")) + 8
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            store = PosixStore()
            for index in range(50):
                write_file(store, str(tmp_path / str(index)), b"x")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


LOOKS: dict[str, tuple[str, Callable[[str], object]]] = {
    "list": ("scandir", PosixStore().list),
    "size": ("lstat", PosixStore().size),
    "read": ("open", lambda path: PosixStore().read(path, limit=10)),
    "open": ("open", PosixStore().open),
    "lock_shared": ("open", lambda path: PosixStore().lock_shared(path).__enter__()),
    "try_lock_exclusive": ("open", lambda path: PosixStore().try_lock_exclusive(path).__enter__()),
}


@pytest.mark.parametrize(("call", "look"), LOOKS.values(), ids=list(LOOKS))
class TestStale:
    """What another client removes between the look-up of its name and the rest is ESTALE."""

    def test_what_is_removed_meanwhile_is_not_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, look: Callable[[str], object]
    ) -> None:
        path, real = tmp_path / "it", getattr(os, call)
        path.mkdir() if call == "scandir" else path.write_bytes(b"x")

        def removed_meanwhile(name: str, *args: object, **kwargs: object) -> object:
            if path.exists():
                path.rmdir() if path.is_dir() else path.unlink()
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real(name, *args, **kwargs)

        monkeypatch.setattr(os, call, removed_meanwhile)
        with pytest.raises(FileNotFoundError):
            look(str(path))

    def test_a_mount_that_lost_its_server_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, look: Callable[[str], object]
    ) -> None:
        monkeypatch.setattr(os, call, raiser(errno.ESTALE))
        with pytest.raises(StorageError, match=r"Stale file handle.*lost its server") as caught:
            look(str(tmp_path / "it"))
        assert caught.value.errno == errno.ESTALE


class TestLocks:
    def test_a_lock_of_another_process_counts_and_ends_with_it(self, tmp_path: Path) -> None:
        code = f"""
import sys, time
from ckptengine.storage.posix import PosixStore
with PosixStore().lock_shared({str(tmp_path)!r}) as held:
    print(held, flush=True)
    time.sleep(600)
"""
        store = PosixStore()
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "True\n"
            with store.try_lock_exclusive(str(tmp_path)) as held:
                assert not held
            with store.lock_shared(str(tmp_path)) as held:
                assert held
        finally:
            child.kill()
            child.communicate()
        with store.try_lock_exclusive(str(tmp_path)) as held:
            assert held

    def test_a_child_forked_under_the_lock_does_not_keep_it(self, tmp_path: Path) -> None:
        code = f"""
import os, time
from ckptengine.storage.posix import PosixStore
store = PosixStore()
with store.lock_shared({str(tmp_path)!r}):
    child = os.fork()
    if child == 0:
        time.sleep(600)
with store.try_lock_exclusive({str(tmp_path)!r}) as held:
    print(held)
os.kill(child, 9)
os.waitpid(child, 0)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "True\n"

    @pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF])
    def test_a_file_system_without_locks_is_fine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        monkeypatch.setattr(posix.fcntl, "flock", raiser(code))
        for lock in (PosixStore().lock_shared, PosixStore().try_lock_exclusive):
            with lock(str(tmp_path)) as held:
                assert held

    def test_another_failure_of_a_lock_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(posix.fcntl, "flock", raiser(errno.ENOLCK))
        with pytest.raises(StorageError, match="lock"), PosixStore().lock_shared(str(tmp_path)):
            pass
