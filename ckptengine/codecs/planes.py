"""How are a block's elements cut into byte planes, and put together again?

Plane p holds byte p of every element, in order; the planes follow each other. The bytes of sign and exponent,
which are alike from one element to the next, then lie apart from the mantissa's, which are noise.

Whole words are shifted and narrowed, which numpy does with vector instructions and without the GIL: up to
twice as fast as strided copies of bytes. The tiles stay in a core's own cache, and are large enough that few
calls ask for the GIL. Words of eight bytes gain nothing by it. The measurements are in
docs/design/performance.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Buffer = bytes | bytearray | memoryview

_WORDS = {2: "<u2", 4: "<u4"}
_TILE_NBYTES = 512 << 10


class _Tiles(threading.local):
    """Kept from block to block: what the C library gets back it gives to the system, and the next block would
    pay for pages that are new again."""

    def __init__(self) -> None:
        self.narrow = bytearray(_TILE_NBYTES // 2)
        self.shifted = bytearray(_TILE_NBYTES)


_tiles = _Tiles()


def pieces(block: Buffer, size: int) -> Iterator[memoryview]:
    """The planes of elements of `size` (2, 4 or 8) bytes, from the first byte to the last, piece by piece.
    Each piece is good until the thread asks for the next, of this block or another."""
    import numpy as np

    elements = _elements(block, size)
    word = _WORDS.get(size)
    words = None if word is None else elements.reshape(-1).view(word)
    tile = max(1, min(_TILE_NBYTES // size, len(elements)))
    narrow = np.frombuffer(_tiles.narrow, np.uint8, tile)
    shifted = None if word is None else np.frombuffer(_tiles.shifted, word, tile)
    for p in range(size):
        for at in range(0, len(elements), tile):
            piece = narrow[: len(elements) - at]
            if words is None or shifted is None:
                np.copyto(piece, elements[at : at + tile, p])
            else:
                high = shifted[: len(piece)]
                np.right_shift(words[at : at + tile], 8 * p, out=high)
                np.copyto(piece, high, casting="unsafe")
            yield piece.data


def join(planes: Buffer, size: int, out: Buffer) -> None:
    """Fill `out` with the block whose planes these are."""
    import numpy as np

    elements = _elements(out, size)
    parts = np.frombuffer(planes, np.uint8)
    if parts.size != elements.size:
        raise ValueError(f"planes of {parts.size} bytes, for a block of {elements.size}")
    parts = parts.reshape(size, -1)
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


def _elements(block: Buffer, size: int) -> npt.NDArray[np.uint8]:
    """A view of (elements, bytes)."""
    import numpy as np

    flat = np.frombuffer(block, np.uint8)
    if len(flat) % size:
        raise ValueError(f"{len(flat)} bytes are not elements of {size}")
    return flat.reshape(-1, size)
