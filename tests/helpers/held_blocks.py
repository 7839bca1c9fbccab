"""Reads of a shard's blocks that wait until they are let go on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ckptengine.read.damage import touched
from ckptengine.read.patterns import matches
from ckptengine.read.reader import ShardReader

IN_TIME_S = 30.0


class BlockGate:
    """A block that holds a byte of a tensor which one of `held` matches is not read until `release` or
    `open`."""

    def __init__(self, held: tuple[str, ...]) -> None:
        self._held = set(held)
        self._changed = threading.Condition()
        self.read: list[list[str]] = []
        """The tensors of each block, in the order in which the blocks were taken up."""

    def release(self, *patterns: str) -> None:
        with self._changed:
            self._held -= set(patterns)
            self._changed.notify_all()

    def open(self) -> None:
        self.release(*self._held)

    def enter(self, shard: ShardReader, block: int) -> None:
        names = [*touched(shard.header, *shard.header.blocks.span(block))]
        with self._changed:
            self.read.append(names)
            while any(matches(pattern, name) for name in names for pattern in self._held):
                if not self._changed.wait(IN_TIME_S):
                    return


@contextlib.contextmanager
def held_blocks(*patterns: str) -> Iterator[BlockGate]:
    gate = BlockGate(patterns)
    take = ShardReader.take

    def taking(self: ShardReader, read: Any, *args: Any) -> int:
        gate.enter(self, read.block)
        return take(self, read, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardReader, "take", taking)
        try:
            yield gate
        finally:
            gate.open()
