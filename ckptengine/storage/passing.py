"""A `BlockReader` that hands everything on: for stores that trace, count, fail or delay what is asked."""

from __future__ import annotations

from collections.abc import Sequence

from ckptengine.storage.store import BlockReader, ReadSource


class PassingReader:
    """Does what `inner` does."""

    def __init__(self, inner: BlockReader) -> None:
        self.inner = inner

    @property
    def size(self) -> int:
        return self.inner.size

    def source(self, offset: int, nbytes: int) -> ReadSource:
        return self.inner.source(offset, nbytes)

    def pread_into(self, offset: int, out: memoryview, source: ReadSource | None = None) -> ReadSource:
        return self.inner.pread_into(offset, out, source)

    def preadv_into(
        self, offset: int, outs: Sequence[memoryview], source: ReadSource | None = None
    ) -> ReadSource:
        """Piece by piece, so that whoever changes `pread_into` has changed this too."""
        found = source
        for out in outs:
            found = self.pread_into(offset, out, source)
            offset += out.nbytes
        return found or "buffered"

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> PassingReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
