"""How large may anything in a checkpoint be? Checked before anything is allocated."""

from __future__ import annotations

PAGE = 4096
"""Alignment of the data section and of every block: O_DIRECT's largest common granularity."""


MAX_HEADER_NBYTES = 100_000_000
"""Bound on a shard header's JSON; safetensors refuses more."""

MAX_MANIFEST_NBYTES = 256 << 20

MAX_INDEX_NBYTES = 1 << 30
"""Bound on INDEX, stored and decompressed."""

MAX_JSON_DEPTH = 64
"""Nesting of a tree; far below any parser's recursion limit, so that every reader can walk it."""

MAX_NDIM = 64
"""torch's own bound on dimensions."""

INT64_MAX = 2**63 - 1
"""Bound on every size, offset and product of sizes: what a signed 64-bit reader can hold."""

EXACT_INT_MAX = 2**53
"""Integers in a tree up to this magnitude are JSON numbers, exact in every JSON reader."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
