"""What the trainer says of a snapshot under way is what the writer process reads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ckptengine.staging.arena import Arena, attach
from ckptengine.staging.mark import REASON_NBYTES, StagedMark


@pytest.fixture
def ends() -> Iterator[tuple[StagedMark, StagedMark]]:
    with Arena(1) as mine, attach(os.getpid(), mine.fd, mine.capacity) as theirs:
        mine.status.write(b"#" * mine.status.max_nbytes)
        yield mine.mark, theirs.mark
        assert theirs.status.read() == b"#" * mine.status.max_nbytes, "they do not overlap"


def test_bytes_count_as_they_come_and_all_of_them_only_when_it_is_complete(
    ends: tuple[StagedMark, StagedMark],
) -> None:
    trainer, writer = ends
    trainer.reset()
    assert [writer.has(n) for n in (0, 1, None)] == [True, False, False]
    trainer.reach(100)
    assert [writer.has(n) for n in (100, 101, None)] == [True, False, False]
    trainer.complete()
    assert [writer.has(n) for n in (1 << 62, None)] == [True, True]
    assert writer.refusal is None
    trainer.reset()
    assert not writer.has(1)


@pytest.mark.parametrize("nbytes", [0, 7, REASON_NBYTES])
def test_a_refused_snapshot_has_nothing_but_a_reason(
    ends: tuple[StagedMark, StagedMark], nbytes: int
) -> None:
    trainer, writer = ends
    trainer.reach(100)
    trainer.refuse(b"x" * nbytes)
    assert [writer.has(n) for n in (0, 1, None)] == [False, False, False]
    reason = writer.refusal
    assert reason == b"x" * nbytes
    with pytest.raises(ValueError, match="reason"):
        trainer.refuse(b"x" * (REASON_NBYTES + 1))
    trainer.reset()
    assert (writer.refusal, writer.has(0)) == (None, True)


def test_it_needs_its_room() -> None:
    with pytest.raises(ValueError, match="4096"):
        StagedMark(memoryview(bytearray(100)))
