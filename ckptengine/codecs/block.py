"""How does a block become what is stored of it, and a block again? By one of the methods of the format."""

from __future__ import annotations

from ckptengine.codecs import planes, zstd
from ckptengine.format.blocks import PLANES, ZSTD

_SIZES = {method: size for size, method in PLANES.items()}


def pack_into(out: memoryview, block: memoryview, method: str, level: int) -> int | None:
    """Put the block into `out` as it is to be stored by `method`, and return how many bytes that are; None if
    it should be stored as it is.

    `level` is for whole blocks: byte planes have none.
    """
    size = _SIZES.get(method)
    if size is not None:
        return zstd.compress_into(out, planes.pieces(block, size), len(block), None)
    return zstd.compress_into(out, [block], len(block), level) if method == ZSTD else None


def unpack_into(stored: memoryview, method: str, out: memoryview) -> None:
    """Fill `out` with the block that `stored` is by `method`, one that compresses; `ValueError` if it is
    not."""
    plain = zstd.decompress(stored, out.nbytes)
    size = _SIZES.get(method)
    if size is None:
        zstd.copy(plain, out)
    else:
        planes.join(plain, size, out)
