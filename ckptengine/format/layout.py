"""Where does each tensor lie in the data section? In the order given, aligned, without a hole."""

from __future__ import annotations

from collections.abc import Sequence

from ckptengine.format.limits import PAGE

PAD_PREFIX = "__pad__."


def lay_out(items: Sequence[tuple[str, int, int]]) -> tuple[list[tuple[str, int, int]], int]:
    """Place `(name, nbytes, alignment)` one after the other.

    Returns `(name, start, stop)` in offset order with the pads that fill every gap, `__pad__.<i>`, and the
    length of the data section, a multiple of 4096.
    """
    placed: list[tuple[str, int, int]] = []
    at = 0
    pads = 0
    for name, nbytes, alignment in items:
        gap = -at % alignment
        if gap:
            placed.append((f"{PAD_PREFIX}{pads}", at, at + gap))
            pads += 1
            at += gap
        placed.append((name, at, at + nbytes))
        at += nbytes
    gap = -at % PAGE
    if gap:
        placed.append((f"{PAD_PREFIX}{pads}", at, at + gap))
        at += gap
    return placed, at
