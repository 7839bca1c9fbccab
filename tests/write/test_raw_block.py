from __future__ import annotations

import errno
import os
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.errors import StorageError
from ckptengine.format.digest import digest
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.write import raw_block


class MemoryWriter:
    """A file in memory; `fail_at`: the write that fails, from 1."""

    def __init__(self, fail_at: int = 0, *, direct: bool = True) -> None:
        self.direct = direct
        self.data = bytearray()
        self.writes: list[tuple[int, int]] = []
        self._fail_at = fail_at

    def pwrite(self, offset: int, data: memoryview) -> None:
        self.writes.append((offset, len(data)))
        if len(self.writes) == self._fail_at:
            raise StorageError("could not write", errno=errno.EIO, path="shard")
        self.data[offset : offset + len(data)] = data

    def finish(self) -> int:
        return len(self.data)

    def abort(self) -> None:
        pass


@given(nbytes=st.integers(1, 300), writable=st.booleans(), direct=st.booleans(), huge=st.booleans())
def test_a_block_is_written_as_it_is_with_its_digest(
    nbytes: int, writable: bool, direct: bool, huge: bool
) -> None:
    block = os.urandom(nbytes)
    writer = MemoryWriter(direct=direct)
    writer.data += bytes(16)
    data = memoryview(bytearray(block)) if writable else memoryview(block)
    with mock.patch.multiple(raw_block, PIECE_NBYTES=8, WRITE_NBYTES=20):
        with AlignedBuffer(raw_block.buffer_nbytes(nbytes)) as buffer:
            assert raw_block.write(writer, 16, data, None if huge else buffer) == digest(block)
    assert bytes(writer.data) == bytes(16) + block
    assert all(length == (20 if direct else 8) for _, length in writer.writes[:-1])


def test_nothing_is_written_after_a_write_failed() -> None:
    writer = MemoryWriter(fail_at=2)
    with mock.patch.multiple(raw_block, PIECE_NBYTES=8, WRITE_NBYTES=20), AlignedBuffer(20) as buffer:
        with pytest.raises(StorageError, match="could not write"):
            raw_block.write(writer, 0, memoryview(bytes(100)), buffer)
    assert writer.writes == [(0, 20), (20, 20)]
