"""A shard for which there was no space: is it written anew where that may help, once, and only then?"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ckptengine.errors import StorageError
from ckptengine.format.shard import encode_header
from ckptengine.storage.posix import PosixStore
from ckptengine.testing.faulty import FaultyStore
from ckptengine.write.methods import History
from ckptengine.write.second_place import with_a_second_place
from ckptengine.write.shard_writer import Compression, WrittenShard, write_shard
from tests.write.test_shard_writer import contents

HEADER, DATA = contents(3, [("float32", 64 << 10), ("uint8", 4099)])


class Divided(FaultyStore):
    """A store of several parts, of which one refuses what is put there."""

    elsewhere = True
    asked: tuple[str, int] | None = None

    def may_fit_elsewhere(self, path: str, *, nbytes: int) -> bool:
        self.asked = (path, nbytes)
        return self.elsewhere


def write(store: Divided, path: Path) -> WrittenShard:
    return with_a_second_place(
        store,
        str(path),
        len(DATA),
        lambda: write_shard(
            store,
            str(path),
            template=encode_header(HEADER),
            data=DATA,
            block_nbytes=HEADER.block_nbytes,
            compression=Compression(1, False, History()),
            threads=2,
        ),
    )


@pytest.mark.parametrize("operation", ["create", "pwrite", "finish"])
def test_it_is_written_anew_and_whole(tmp_path: Path, operation: str) -> None:
    path, other = tmp_path / "shard", tmp_path / "other"
    store = Divided(PosixStore(), fail_at=1, error=errno.ENOSPC, only={operation})
    written = write(store, path)
    assert store.failed
    assert store.asked == (str(tmp_path), len(DATA)) or operation == "create"
    assert written.size == path.stat().st_size
    assert write(Divided(PosixStore()), other) == written
    assert path.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("operation", ["pwrite", "finish"])
def test_a_second_time_is_an_error_and_leaves_no_file(tmp_path: Path, operation: str) -> None:
    store = Divided(PosixStore(), fail_at=1, error=errno.ENOSPC, only={operation}, sticky=True)
    with pytest.raises(StorageError, match="lfs df") as caught:
        write(store, tmp_path / "shard")
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_there_is_no_third_try_and_the_last_error_counts(tmp_path: Path) -> None:
    codes = [errno.ENOSPC, errno.EIO]
    tries = []

    def fail() -> None:
        tries.append(codes[len(tries)])
        raise StorageError("could not write", errno=tries[-1])

    with pytest.raises(StorageError) as caught:
        with_a_second_place(Divided(PosixStore()), str(tmp_path / "shard"), 1, fail)
    assert tries == codes
    assert caught.value.errno == errno.EIO
    assert caught.value.hint is None


@pytest.mark.parametrize(
    ("code", "elsewhere"),
    [(errno.EIO, True), (errno.EDQUOT, True), (errno.ESTALE, True), (errno.ENOSPC, False)],
)
def test_nothing_else_is_tried_again(tmp_path: Path, code: int, elsewhere: bool) -> None:
    store = Divided(PosixStore(), fail_at=1, error=code, only={"pwrite"})
    store.elsewhere = elsewhere
    with pytest.raises(StorageError) as caught:
        write(store, tmp_path / "shard")
    assert caught.value.errno == code
    assert "lfs df" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
