"""The storage layer on real ext4 and xfs, mounted from an image: a disk that is full, and a power cut.

What is durable can be seen here: a copy of the image, taken while it is mounted, holds what the file system
has given to its disk so far, as after a power cut. Mounting the copy replays its journal.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from ckptengine.errors import StorageError
from ckptengine.read import raw_block as reading
from ckptengine.read.plan import Copy
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import BlockWriter
from ckptengine.write import raw_block as writing
from tests.storage.protocol import check, content, save

MIB = 1 << 20
# mkfs.xfs refuses less than 300 MiB; the images are sparse.
KINDS = {"ext4": (["mkfs.ext4", "-q", "-F"], 64 * MIB), "xfs": (["mkfs.xfs", "-q"], 320 * MIB)}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")


@contextmanager
def mounted(image: Path, at: Path, kind: str) -> Iterator[str]:
    at.mkdir()
    options = "loop,nouuid" if kind == "xfs" else "loop"
    done = subprocess.run(["mount", "-o", options, image, at], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount an image here: {done.stderr.strip()}")
    try:
        yield str(at)
    finally:
        # Lazily where something is still open, so that no mount outlives the test.
        if subprocess.run(["umount", at], capture_output=True).returncode:
            subprocess.run(["umount", "-l", at], check=True)


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    mkfs = KINDS[request.param][0][0]
    if shutil.which(mkfs) is None:
        pytest.skip(f"no {mkfs}")
    return str(request.param)


@pytest.fixture
def image(kind: str, tmp_path: Path) -> Path:
    command, nbytes = KINDS[kind]
    path = tmp_path / "image"
    with path.open("wb") as file:
        file.truncate(nbytes)
    subprocess.run([*command, path], check=True)
    return path


@pytest.fixture
def disk(kind: str, image: Path, tmp_path: Path) -> Iterator[str]:
    with mounted(image, tmp_path / "mount", kind) as path:
        yield path


@pytest.fixture
def after_power_cut(kind: str, image: Path, tmp_path: Path) -> Callable[[], AbstractContextManager[str]]:
    number = iter(range(100))

    def cut() -> AbstractContextManager[str]:
        copy = tmp_path / f"copy-{next(number)}"
        subprocess.run(["cp", "--sparse=always", image, copy], check=True)
        return mounted(copy, copy.with_suffix(".mount"), kind)

    return cut


def fill(disk: str, leave: int) -> None:
    """Take all space but about `leave` bytes."""
    status = os.statvfs(disk)
    fd = os.open(os.path.join(disk, "filler"), os.O_CREAT | os.O_WRONLY)
    size = max(0, status.f_bavail * status.f_frsize - leave)
    step = 8 * MIB
    at = 0
    while step >= 4096:
        try:
            os.posix_fallocate(fd, at, min(step, max(4096, size - at)))
            at += step
            if at >= size:
                break
        except OSError as exc:
            if exc.errno != errno.ENOSPC:
                raise
            step //= 2
    os.close(fd)


def write_all(writer: BlockWriter, nbytes: int) -> int:
    with AlignedBuffer(MIB) as buffer:
        for at in range(0, nbytes, MIB):
            writer.pwrite(at, buffer.view)
    return writer.finish()


def test_blocks_round_trip_past_the_page_cache(disk: str) -> None:
    store = PosixStore("on")
    with AlignedBuffer(4 * MIB) as buffer, AlignedBuffer(MIB) as back:
        buffer.view[:] = os.urandom(4 * MIB)
        writer = store.create(f"{disk}/shard", nbytes=4 * MIB)
        assert writer.direct
        for at in range(0, 4 * MIB, MIB):
            writer.pwrite(at, buffer.view[at : at + MIB])
        assert writer.finish() == 4 * MIB
        with store.open(f"{disk}/shard") as reader:
            for at in range(0, 4 * MIB, MIB):
                assert reader.pread_into(at, back.view) == "direct"
                assert back.view == buffer.view[at : at + MIB]


def test_raw_blocks_go_through_the_devices_own_way_and_back_to_any_address(disk: str) -> None:
    store = PosixStore("on")
    nbytes = 20 * MIB
    with (
        AlignedBuffer(nbytes) as data,
        AlignedBuffer(nbytes + 64) as target,
        AlignedBuffer(8 * MIB) as buffer,
    ):
        data.view[:] = os.urandom(nbytes)
        writer = store.create(f"{disk}/shard", nbytes=nbytes + 4096)
        written = writing.write(writer, 4096, data.view, buffer)
        assert writer.direct
        writer.pwrite(0, buffer.view[:4096])
        assert writer.finish() == nbytes + 4096
        copies = [
            Copy(0, 9 * MIB, target.address + 64),
            Copy(9 * MIB, 11 * MIB, target.address + 64 + 9 * MIB),
        ]
        for expected in ("direct", "cache"):
            target.view[:] = bytes(nbytes + 64)
            with store.open(f"{disk}/shard") as file:
                found, source = reading.deliver(file, 4096, nbytes, copies, buffer)
            assert (source, found) == (expected, written)
            assert target.view[64:] == data.view
            Path(disk, "shard").read_bytes()


def test_a_full_disk_is_known_before_the_first_block(disk: str) -> None:
    fill(disk, leave=2 * MIB)
    with pytest.raises(StorageError, match="reserve") as caught:
        PosixStore().create(f"{disk}/shard", nbytes=8 * MIB)
    assert caught.value.errno == errno.ENOSPC
    assert "free space" in str(caught.value)
    assert "shard" not in os.listdir(disk)


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_disk_that_fills_up_fails_the_write_and_poisons_the_writer(disk: str, direct: str) -> None:
    store = PosixStore(direct)  # type: ignore[arg-type]
    fill(disk, leave=2 * MIB)
    writer = store.create(f"{disk}/shard", nbytes=0)
    with pytest.raises(StorageError) as caught:
        write_all(writer, 64 * MIB)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(StorageError):
        writer.finish()
    writer.abort()
    os.unlink(f"{disk}/filler")
    writer = store.create(f"{disk}/shard-2", nbytes=MIB)
    assert write_all(writer, MIB) == MIB


def test_publishing_on_a_full_disk_keeps_the_old_file(disk: str) -> None:
    store = PosixStore()
    store.publish(f"{disk}/MANIFEST.json", b"old")
    fill(disk, leave=0)
    with pytest.raises(StorageError) as caught:
        store.publish(f"{disk}/MANIFEST.json", bytes(4 * MIB))
    assert caught.value.errno == errno.ENOSPC
    assert store.read(f"{disk}/MANIFEST.json", limit=10) == b"old"
    assert sorted(set(os.listdir(disk)) - {"lost+found"}) == ["MANIFEST.json", "filler"]


def test_what_was_committed_survives_a_power_cut(
    disk: str, after_power_cut: Callable[[], AbstractContextManager[str]]
) -> None:
    store = PosixStore()
    root = f"{disk}/root"
    for step in (1, 2):
        save(store, root, step)
        with after_power_cut() as copy:
            assert check(store, f"{copy}/root") == set(range(1, step + 1))
    store.publish(f"{root}/step-2/MANIFEST", b"2")
    store.remove(f"{root}/step-1/MANIFEST")
    store.sync_dir(f"{root}/step-1")
    with after_power_cut() as copy:
        assert check(store, f"{copy}/root") == {2}


def test_each_durable_operation_is_durable_when_it_returns(
    disk: str, after_power_cut: Callable[[], AbstractContextManager[str]]
) -> None:
    store = PosixStore()
    store.make_dirs(f"{disk}/a/b/c")
    with after_power_cut() as copy:
        assert os.path.isdir(f"{copy}/a/b/c")
    store.publish(f"{disk}/a/file", b"published")
    with after_power_cut() as copy:
        assert Path(copy, "a", "file").read_bytes() == b"published"
    writer = store.create(f"{disk}/a/b/c/shard", nbytes=len(content(1)))
    writer.pwrite(0, memoryview(content(1)))
    writer.finish()
    store.sync_dir(f"{disk}/a/b/c")
    with after_power_cut() as copy:
        assert Path(copy, "a", "b", "c", "shard").read_bytes() == content(1)


def test_the_power_cut_does_lose_what_was_not_synced(
    disk: str, after_power_cut: Callable[[], AbstractContextManager[str]]
) -> None:
    Path(disk, "careless").write_bytes(b"x" * 10_000)
    with after_power_cut() as copy:
        lost = Path(copy, "careless")
        assert not lost.exists() or lost.read_bytes() != b"x" * 10_000
