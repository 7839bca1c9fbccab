"""How are a block's elements cut into byte planes, and put together again?

Plane p holds byte p of every element, in order; the planes follow each other. The bytes of sign and exponent,
which are alike from one element to the next, then lie apart from the mantissa's, which are noise.

Whole words are shifted and narrowed, which numpy does with vector instructions and without the GIL: up to
twice as fast as strided copies of bytes. The tiles stay in a core's own cache, and are large enough that few
calls ask for the GIL. Words of eight bytes gain nothing by it. The measurements are in
docs/design/performance.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

Buffer = bytes | bytearray | memoryview

_WORDS = {2: "<u2", 4: "<u4"}
_TILE_NBYTES = 512 << 10


def split(block: Buffer, size: int, out: Buffer) -> None:
    """Fill `out`, of the same length, with the planes of elements of `size` (2, 4 or 8) bytes."""
    import numpy as np

    elements, planes = _arrays(block, out, size)
    word = _WORDS.get(size)
    if word is None:
        for p in range(size):
            np.copyto(planes[p], elements[:, p])
        return
    words = elements.reshape(-1).view(word)
    tile = _TILE_NBYTES // size
    shifted = np.empty(min(tile, len(words)), word)
    for at in range(0, len(words), tile):
        source = words[at : at + tile]
        high = shifted[: len(source)]
        np.copyto(planes[0, at : at + tile], source, casting="unsafe")
        for p in range(1, size):
            np.right_shift(source, 8 * p, out=high)
            np.copyto(planes[p, at : at + tile], high, casting="unsafe")


def join(planes: Buffer, size: int, out: Buffer) -> None:
    """Fill `out` with the block whose planes these are."""
    import numpy as np

    elements, parts = _arrays(out, planes, size)
    word = _WORDS.get(size)
    if word is None:
        for p in range(size):
            np.copyto(elements[:, p], parts[p])
        return
    words = elements.reshape(-1).view(word)
    tile = _TILE_NBYTES // size
    for at in range(0, len(words), tile):
        target = words[at : at + tile]
        np.copyto(target, parts[size - 1, at : at + tile])
        for p in range(size - 2, -1, -1):
            np.left_shift(target, 8, out=target)
            np.bitwise_or(target, parts[p, at : at + tile], out=target)


def _arrays(block: Buffer, planes: Buffer, size: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Views of (elements, bytes) and of (planes, elements)."""
    import numpy as np

    flat, cut = np.frombuffer(block, np.uint8), np.frombuffer(planes, np.uint8)
    if len(flat) != len(cut) or len(flat) % size:
        raise ValueError(f"planes of {len(cut)} bytes, for {len(flat)} bytes in elements of {size}")
    return flat.reshape(-1, size), cut.reshape(size, -1)
