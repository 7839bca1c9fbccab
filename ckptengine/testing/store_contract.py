"""Does a store keep the contract? One suite of tests that every implementation of `Store` passes.

Derive a test class and give it two fixtures::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self): return MyStore()

        @pytest.fixture
        def root(self, tmp_path): return str(tmp_path)     # an empty directory of the store

Durability itself cannot be seen from a test; `ckptengine.testing.nondurable` is for that.
"""

from __future__ import annotations

import array
import errno
import os
import posixpath
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from ckptengine.errors import CorruptCheckpointError, StorageError
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.storage.store import BlockReader, BlockWriter, Entry, Store


def write_file(store: Store, path: str, data: bytes) -> None:
    """Write a file through a writer, in one piece."""
    writer = store.create(path, nbytes=len(data))
    writer.pwrite(0, memoryview(data))
    assert writer.finish() == len(data)


def read_file(store: Store, path: str) -> bytes:
    """Read a file through a reader, in one piece."""
    with store.open(path) as reader:
        out = bytearray(reader.size)
        reader.pread_into(0, memoryview(out))
        return bytes(out)


def run_together(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` … `work(count - 1)` in as many threads at once; raises what they raise."""
    barrier = threading.Barrier(count)

    def begin(index: int) -> None:
        barrier.wait(30)
        work(index)

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(begin, index) for index in range(count)]:
            future.result(60)


class StoreContract:
    """The tests. Override `store` and `root`, and `symlink` where the store has no symbolic links."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def root(self) -> str:
        raise NotImplementedError

    def symlink(self, target: str, path: str) -> None:
        """Make a symbolic link inside the store, or skip the test."""
        os.symlink(target, path)

    # Names and directories

    def test_it_implements_the_protocol(self, store: Store) -> None:
        assert isinstance(store, Store)

    def test_list_is_sorted_and_tells_directories(self, store: Store, root: str) -> None:
        assert store.list(root) == []
        store.make_dirs(posixpath.join(root, "b"))
        store.publish(posixpath.join(root, "c"), b"")
        store.publish(posixpath.join(root, "a"), b"")
        assert store.list(root) == [Entry("a", False), Entry("b", True), Entry("c", False)]

    def test_list_of_a_missing_directory_is_file_not_found(self, store: Store, root: str) -> None:
        with pytest.raises(FileNotFoundError):
            store.list(posixpath.join(root, "missing"))

    def test_list_of_a_file_is_enotdir(self, store: Store, root: str) -> None:
        store.publish(posixpath.join(root, "file"), b"x")
        with pytest.raises(StorageError) as caught:
            store.list(posixpath.join(root, "file"))
        assert caught.value.errno == errno.ENOTDIR

    def test_a_link_to_a_directory_is_listed_as_no_directory(self, store: Store, root: str) -> None:
        store.make_dirs(posixpath.join(root, "dir"))
        self.symlink("dir", posixpath.join(root, "link"))
        assert Entry("link", False) in store.list(root)

    def test_make_dirs_makes_parents_and_may_be_repeated(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "a", "b", "c")
        for _ in range(2):
            store.make_dirs(path)
            assert store.list(path) == []
        store.make_dirs(path + "/")
        store.make_dirs(posixpath.join(root, "a"))

    def test_make_dirs_by_many_at_once(self, store: Store, root: str) -> None:
        run_together(8, lambda index: store.make_dirs(posixpath.join(root, "s", "t", str(index % 2))))
        assert [entry.name for entry in store.list(posixpath.join(root, "s", "t"))] == ["0", "1"]

    def test_make_dirs_over_a_file_is_an_error(self, store: Store, root: str) -> None:
        store.publish(posixpath.join(root, "file"), b"x")
        for path in ("file", "file/below"):
            with pytest.raises(StorageError):
                store.make_dirs(posixpath.join(root, path))

    def test_make_dirs_survives_others_removing_empty_parents(self, store: Store, root: str) -> None:
        step = posixpath.join(root, "step")
        done = threading.Event()

        def work(index: int) -> None:
            if index == 0:
                while not done.wait(0.001):
                    store.remove_dir(step)
                return
            try:
                for number in range(30):
                    store.make_dirs(posixpath.join(step, f"attempt-{number}"))
                    store.remove_dir(posixpath.join(step, f"attempt-{number}"))
            finally:
                done.set()

        run_together(2, work)

    def test_sync_dir(self, store: Store, root: str) -> None:
        store.sync_dir(root)
        with pytest.raises(FileNotFoundError):
            store.sync_dir(posixpath.join(root, "missing"))

    # Small files

    def test_size_of_a_file(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "file")
        with pytest.raises(FileNotFoundError):
            store.size(path)
        store.publish(path, b"12345")
        assert store.size(path) == 5

    @pytest.mark.parametrize("kind", ["directory", "link"])
    def test_what_is_no_regular_file_is_refused(self, store: Store, root: str, kind: str) -> None:
        path = posixpath.join(root, "odd")
        if kind == "directory":
            store.make_dirs(path)
        else:
            store.publish(posixpath.join(root, "target"), b"x")
            self.symlink("target", path)
        for operation in (store.size, store.open, lambda path: store.read(path, limit=10)):
            with pytest.raises(CorruptCheckpointError) as caught:
                operation(path)
            assert caught.value.path == path

    def test_read_returns_the_whole_file(self, store: Store, root: str) -> None:
        for nbytes in (0, 1, 4096, 100_001):
            data = random.Random(nbytes).randbytes(nbytes)
            path = posixpath.join(root, f"file-{nbytes}")
            store.publish(path, data)
            assert store.read(path, limit=nbytes) == data
            if nbytes:
                with pytest.raises(CorruptCheckpointError):
                    store.read(path, limit=nbytes - 1)

    def test_read_and_open_of_a_missing_file_is_file_not_found(self, store: Store, root: str) -> None:
        for path in ("missing", "missing/file"):
            with pytest.raises(FileNotFoundError):
                store.read(posixpath.join(root, path), limit=10)
            with pytest.raises(FileNotFoundError):
                store.open(posixpath.join(root, path))

    def test_publish_replaces_and_leaves_nothing_else(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "MANIFEST.json")
        for data in (b"old", b"", b"newer and longer", b"newer and longer"):
            store.publish(path, data)
            assert store.read(path, limit=100) == data
            assert [entry.name for entry in store.list(root)] == ["MANIFEST.json"]

    def test_publish_into_a_missing_directory_is_file_not_found(self, store: Store, root: str) -> None:
        with pytest.raises(FileNotFoundError):
            store.publish(posixpath.join(root, "missing", "file"), b"x")

    def test_publish_over_a_directory_fails_and_leaves_nothing(self, store: Store, root: str) -> None:
        store.make_dirs(posixpath.join(root, "dir"))
        with pytest.raises(StorageError):
            store.publish(posixpath.join(root, "dir"), b"x")
        assert store.list(root) == [Entry("dir", True)]

    def test_readers_see_the_old_or_the_new_file(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "file")
        versions = {bytes([65 + n]) * (1000 * n + 1) for n in range(5)}
        store.publish(path, bytes([65]))

        def work(index: int) -> None:
            for data in sorted(versions) * 5:
                if index == 0:
                    store.publish(path, data)
                else:
                    assert store.read(path, limit=10_000) in versions

        run_together(3, work)

    # What a directory will hold

    def test_an_announcement_never_fails_and_changes_nothing_to_be_seen(
        self, store: Store, root: str
    ) -> None:
        for _ in range(2):
            assert store.expect_files(root, files=2, file_nbytes=1 << 30) is None
            assert store.expect_files(root, files=2, file_nbytes=0) is None
        assert store.list(root) == []
        write_file(store, posixpath.join(root, "file"), b"x")
        assert read_file(store, posixpath.join(root, "file")) == b"x"

    def test_an_announcement_for_no_directory_does_not_raise(self, store: Store, root: str) -> None:
        problem = store.expect_files(posixpath.join(root, "missing"), files=1, file_nbytes=1)
        assert problem is None or problem

    def test_room_elsewhere_is_a_question_about_any_path(self, store: Store, root: str) -> None:
        assert not store.may_fit_elsewhere(root, nbytes=1 << 60)
        assert not store.may_fit_elsewhere(posixpath.join(root, "missing"), nbytes=1)

    # Removal

    def test_remove_a_file(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "file")
        store.publish(path, b"x")
        store.remove(path)
        assert store.list(root) == []
        store.remove(path)

    def test_remove_of_a_directory_is_an_error(self, store: Store, root: str) -> None:
        store.make_dirs(posixpath.join(root, "dir"))
        with pytest.raises(StorageError):
            store.remove(posixpath.join(root, "dir"))

    def test_remove_takes_a_link_and_not_its_target(self, store: Store, root: str) -> None:
        store.publish(posixpath.join(root, "target"), b"x")
        self.symlink("target", posixpath.join(root, "link"))
        store.remove(posixpath.join(root, "link"))
        assert [entry.name for entry in store.list(root)] == ["target"]

    def test_remove_tree(self, store: Store, root: str) -> None:
        tree = posixpath.join(root, "tree")
        store.make_dirs(posixpath.join(tree, "a", "b"))
        store.make_dirs(posixpath.join(tree, "c"))
        for path in ("x", "a/y", "a/b/z"):
            store.publish(posixpath.join(tree, path), b"x")
        store.remove_tree(tree)
        assert store.list(root) == []
        store.remove_tree(tree)
        store.remove_tree(posixpath.join(tree, "below"))

    def test_remove_tree_of_a_file_is_an_error(self, store: Store, root: str) -> None:
        store.publish(posixpath.join(root, "file"), b"x")
        with pytest.raises(StorageError):
            store.remove_tree(posixpath.join(root, "file"))
        assert store.size(posixpath.join(root, "file")) == 1

    def test_remove_tree_follows_no_link(self, store: Store, root: str) -> None:
        precious = posixpath.join(root, "precious")
        store.make_dirs(precious)
        store.publish(posixpath.join(precious, "file"), b"x")
        store.make_dirs(posixpath.join(root, "tree"))
        self.symlink(precious, posixpath.join(root, "tree", "link"))
        store.remove_tree(posixpath.join(root, "tree"))
        self.symlink(precious, posixpath.join(root, "link"))
        with pytest.raises(StorageError):
            store.remove_tree(posixpath.join(root, "link"))
        assert store.read(posixpath.join(precious, "file"), limit=1) == b"x"

    def test_remove_dir_takes_only_an_empty_one(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "dir")
        store.make_dirs(path)
        store.publish(posixpath.join(path, "file"), b"x")
        assert not store.remove_dir(path)
        assert store.read(posixpath.join(path, "file"), limit=1) == b"x"
        store.remove(posixpath.join(path, "file"))
        assert store.remove_dir(path)
        assert store.remove_dir(path)
        assert store.list(root) == []

    # Writing blocks

    def test_a_writer_implements_the_protocol(self, store: Store, root: str) -> None:
        writer = store.create(posixpath.join(root, "file"), nbytes=0)
        assert isinstance(writer, BlockWriter)
        assert writer.direct in (True, False)
        assert writer.finish() == 0
        with store.open(posixpath.join(root, "file")) as reader:
            assert isinstance(reader, BlockReader)

    @pytest.mark.parametrize("declared", [True, False])
    def test_blocks_written_by_threads_in_any_order(self, store: Store, root: str, declared: bool) -> None:
        path = posixpath.join(root, "file")
        nbytes = 1 << 20
        block = nbytes // 16
        with AlignedBuffer(nbytes) as buffer:
            buffer.view[:] = random.Random(1).randbytes(nbytes)
            writer = store.create(path, nbytes=nbytes if declared else 0)

            def work(index: int) -> None:
                for start in range((3 - index) * block, nbytes, 4 * block):
                    writer.pwrite(start, buffer.view[start : start + block])

            run_together(4, work)
            assert writer.finish() == nbytes
            assert store.size(path) == nbytes
            assert read_file(store, path) == bytes(buffer.view)

    def test_writes_need_no_alignment(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "file")
        data = random.Random(2).randbytes(10_000)
        writer = store.create(path, nbytes=0)
        writer.pwrite(5000, memoryview(data)[5000:])
        writer.pwrite(0, memoryview(data)[:1])
        writer.pwrite(1, memoryview(bytearray(data))[1:5000])
        writer.pwrite(0, memoryview(b""))
        assert writer.finish() == len(data)
        assert read_file(store, path) == data

    def test_writes_and_reads_take_memory_of_any_item_type(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "file")
        numbers = array.array("d", [1.0, 2.0, 3.0])
        writer = store.create(path, nbytes=24)
        writer.pwrite(0, memoryview(numbers))
        writer.finish()
        back = array.array("d", [0.0, 0.0, 0.0])
        with store.open(path) as reader:
            reader.pread_into(0, memoryview(back))
        assert back == numbers

    def test_create_never_takes_an_existing_name(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "file")
        store.publish(path, b"old")
        with pytest.raises(StorageError) as caught:
            store.create(path, nbytes=4096)
        assert caught.value.errno == errno.EEXIST
        assert store.read(path, limit=3) == b"old"
        with pytest.raises(FileNotFoundError):
            store.create(posixpath.join(root, "missing", "file"), nbytes=0)

    @pytest.mark.parametrize("reserved", [0, 64 * 1024])
    @pytest.mark.parametrize("nbytes", [0, 4096, 5000, 8192, 12288])
    def test_finish_cuts_the_file_to_a_length(
        self, store: Store, root: str, reserved: int, nbytes: int
    ) -> None:
        path = f"{root}/shard"
        writer = store.create(path, nbytes=reserved)
        writer.pwrite(0, memoryview(b"x" * 8192))
        assert writer.finish(nbytes) == nbytes
        assert store.size(path) == nbytes
        assert store.read(path, limit=1 << 20) == (b"x" * 8192)[:nbytes].ljust(nbytes, b"\0")

    def test_a_finished_writer_takes_nothing_more(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "file")
        writer = store.create(path, nbytes=4)
        writer.pwrite(0, memoryview(b"1234"))
        writer.finish()
        with pytest.raises(StorageError):
            writer.pwrite(0, memoryview(b"5678"))
        with pytest.raises(StorageError):
            writer.finish()
        writer.abort()
        assert store.read(path, limit=4) == b"1234"

    def test_abort_removes_the_file(self, store: Store, root: str) -> None:
        writer = store.create(posixpath.join(root, "file"), nbytes=8192)
        writer.pwrite(0, memoryview(b"1234"))
        writer.abort()
        writer.abort()
        assert store.list(root) == []
        with pytest.raises(StorageError):
            writer.pwrite(0, memoryview(b"1234"))
        with pytest.raises(StorageError):
            writer.finish()

    # Reading blocks

    def test_reads_at_any_offset_and_length(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "file")
        data = random.Random(3).randbytes(50_000)
        write_file(store, path, data)
        with store.open(path) as reader, AlignedBuffer(65536) as buffer:
            assert reader.size == len(data)
            for offset, nbytes in (
                (0, 4096),
                (4096, 8192),
                (1, 4096),
                (4096, 100),
                (49_000, 1000),
                (50_000, 0),
            ):
                source = reader.pread_into(offset, buffer.view[:nbytes])
                assert source in ("cache", "direct", "buffered")
                assert bytes(buffer.view[:nbytes]) == data[offset : offset + nbytes]

    def test_one_read_fills_many_pieces_in_order(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "file")
        data = random.Random(5).randbytes(50_000)
        write_file(store, path, data)
        cuts = [3, 4, 4, 4100, 12_292, 49_999]
        with store.open(path) as reader, AlignedBuffer(65536) as buffer:
            for asked in (None, reader.source(3, 49_996)):
                buffer.view[:] = bytes(65536)
                # In memory they lie the other way round.
                pieces = [buffer.view[50_000 - stop : 50_000 - start] for start, stop in pairwise(cuts)]
                assert reader.preadv_into(3, pieces, asked) in ("cache", "direct", "buffered")
                found = [bytes(piece) for piece in pieces]
                assert found == [data[start:stop] for start, stop in pairwise(cuts)]

    def test_a_read_of_many_pieces_past_the_end_is_an_error_at_the_piece(
        self, store: Store, root: str
    ) -> None:
        path = posixpath.join(root, "file")
        write_file(store, path, bytes(8192))
        with store.open(path) as reader, AlignedBuffer(16384) as buffer:
            pieces = [buffer.view[:4096], buffer.view[4096:12_288], buffer.view[12_288:]]
            with pytest.raises(StorageError, match="short read") as caught:
                reader.preadv_into(0, pieces)
            assert (caught.value.path, caught.value.offset) == (path, 4096)

    def test_reads_by_many_threads(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "file")
        data = random.Random(4).randbytes(1 << 20)
        write_file(store, path, data)
        with store.open(path) as reader:

            def work(index: int) -> None:
                with AlignedBuffer(65536) as buffer:
                    for start in range(index * 65536, len(data), 4 * 65536):
                        reader.pread_into(start, buffer.view)
                        assert bytes(buffer.view) == data[start : start + 65536]

            run_together(4, work)

    def test_a_read_past_the_end_is_an_error_that_says_where(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "file")
        write_file(store, path, bytes(8192 + 100))
        with store.open(path) as reader, AlignedBuffer(8192) as buffer:
            for offset in (4096, 8192, 16384, 200):
                with pytest.raises(StorageError, match="short read") as caught:
                    reader.pread_into(offset, buffer.view)
                assert caught.value.path == path
                assert caught.value.offset == offset

    def test_a_closed_reader_reads_nothing(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "file")
        write_file(store, path, bytes(10))
        reader = store.open(path)
        reader.close()
        reader.close()
        with pytest.raises(StorageError):
            reader.pread_into(0, memoryview(bytearray(10)))

    def test_an_open_reader_keeps_a_removed_file(self, store: Store, root: str) -> None:
        path = posixpath.join(root, "file")
        write_file(store, path, b"1234")
        with store.open(path) as reader:
            store.remove(path)
            out = bytearray(4)
            reader.pread_into(0, memoryview(out))
            assert out == b"1234"

    # Locks

    def test_readers_share_and_keep_retention_out(self, store: Store, root: str) -> None:
        with store.lock_shared(root) as first, store.lock_shared(root) as second:
            assert first
            assert second
            with store.try_lock_exclusive(root) as held:
                assert not held
        with store.try_lock_exclusive(root) as held:
            assert held

    def test_a_removal_keeps_others_out(self, store: Store, root: str) -> None:
        with store.try_lock_exclusive(root) as held:
            assert held
            with store.lock_shared(root) as reading:
                assert not reading
            with store.try_lock_exclusive(root) as again:
                assert not again
            with store.lock_shared(root) as reading:
                assert not reading

    def test_a_lock_ends_with_an_exception(self, store: Store, root: str) -> None:
        with pytest.raises(ZeroDivisionError), store.try_lock_exclusive(root):
            raise ZeroDivisionError
        with store.try_lock_exclusive(root) as held:
            assert held

    def test_locking_what_is_missing_is_file_not_found(self, store: Store, root: str) -> None:
        for lock in (store.lock_shared, store.try_lock_exclusive):
            with pytest.raises(FileNotFoundError), lock(posixpath.join(root, "missing")):
                pass
