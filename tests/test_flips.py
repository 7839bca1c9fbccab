"""Is a flipped byte anywhere in a checkpoint ever restored, or read, as if nothing had happened?

Of what a real save has written, every byte of every file is flipped, one at a time. `restore` and a reader
must refuse it, or give exactly what was saved. That is harmless, and happens only where `HARMLESS` gives
the reason. What `verify` makes of flipped bits is held in `test_verify.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ck
from ckptengine.format.blocks import stored_offsets
from ckptengine.format.names import INDEX_NAME, MANIFEST_NAME
from ckptengine.format.shard import ShardHeader, decode_header
from tests.adapters.fake import same
from tests.helpers.checkpoints import flip, read_manifest

HARMLESS = {
    "INDEX": "neither a restore nor a reader of one checkpoint reads it: the shard headers say the same",
    "zstd frame": "a bit that decides nothing: the block decompresses to bytes that have their digest",
}

STEP = 7


def saved_state() -> dict[str, Any]:
    """Blocks of text, numbers and noise, so that zstd has something and nothing to do, and values of many
    kinds."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(900, generator=generator)
    return {
        "text": torch.frombuffer(bytearray(b"all work and no play " * 150), dtype=torch.uint8),
        "planes": torch.arange(600, dtype=torch.int64) * 1_000_003,
        "numbers": torch.arange(120, dtype=torch.int64).view(10, 12).t(),
        "model": {"weight": weight, "tied": weight, "half": torch.ones(33, dtype=torch.bfloat16)},
        "values": [1, 2.5, "three", (True, None), b"\1\2", {4: float("nan")}],
        "large": bytes(range(256)) * 5,
    }


def scrambled() -> dict[str, Any]:
    state = saved_state()
    for tensor in (*(state[key] for key in ("text", "planes", "numbers")), *state["model"].values()):
        tensor.fill_(0)
    return state | {"values": [None] * 6, "large": b""}


class Flipped:
    """One checkpoint, and what has come of each flip."""

    def __init__(self, ckpt: ck.Checkpointer) -> None:
        self._ckpt = ckpt
        self._expected = saved_state()
        self.path = Path(ckpt.save(STEP, self._expected, metadata={"note": "metadata is digested, too"}).path)
        self.shard = self.path / read_manifest(self.path).shards[0].path
        if self.shard.suffix == ".ckptz":
            assert {"1", "8"} <= set(self.header().methods or "")
        self.files = [self.path / MANIFEST_NAME, self.path / INDEX_NAME, self.shard]
        self.harmless: Counter[str] = Counter()
        self.flips = 0

    def flip(self, file: Path, offset: int, mask: int) -> None:
        flip(file, offset, mask)
        try:
            outcomes = {self._restored(), self._loaded()}
        finally:
            flip(file, offset, mask)
        self.flips += 1
        where = f"byte {offset} of {file.name} flipped by {mask:#04x}"
        assert "something else" not in outcomes, f"{where}: damage was taken for the state"
        if "the state" in outcomes:
            assert outcomes == {"the state"}, f"{where}: {outcomes}"
            self.harmless[self._reason(file, offset, where)] += 1

    def _restored(self) -> str:
        target = scrambled()
        try:
            info = self._ckpt.restore(target, step=STEP)
        except (ck.CorruptCheckpointError, ck.UnsupportedFormatError):
            return "refused"
        return "the state" if info.step == STEP and same(target, self._expected) else "something else"

    def _loaded(self) -> str:
        try:
            with ck.open_checkpoint(self.path) as c:
                state, metadata = c.load(), c.metadata
        except (ck.CorruptCheckpointError, ck.UnsupportedFormatError):
            return "refused"
        if metadata != {"note": "metadata is digested, too"}:
            return "something else"
        return "the state" if same(state, self._expected) else "something else"

    def header(self) -> ShardHeader:
        nbytes = read_manifest(self.path).shards[0].header_nbytes
        return decode_header(self.shard.read_bytes()[:nbytes], path="")

    def _reason(self, file: Path, offset: int, where: str) -> str:
        if file.name == INDEX_NAME:
            return "INDEX"
        assert file.suffix == ".ckptz", f"{where}: not seen"
        header = self.header()
        nbytes = header.header_nbytes
        assert header.stored_nbytes is not None
        for block, (at, stored) in enumerate(
            zip(stored_offsets(header.stored_nbytes), header.stored_nbytes, strict=True)
        ):
            start, stop = header.blocks.span(block)
            if at <= offset - nbytes < at + stored and stored < stop - start:
                return "zstd frame"
        raise AssertionError(f"{where}: not seen, and in no compressed block")


@pytest.fixture(params=["raw", "zstd"])
def flipped(request: pytest.FixtureRequest, tmp_path: Path, lent_writer: None) -> Iterator[Flipped]:
    config = ck.Config(block_nbytes=4096, codec=request.param, io_threads=1)
    with ck.Checkpointer(tmp_path, config=config) as ckpt:
        yield Flipped(ckpt)


def check(flipped: Flipped, every: int) -> None:
    count = 0
    for file in flipped.files:
        for offset in range(file.stat().st_size):
            count += 1
            if count % every == 0:
                flipped.flip(file, offset, 0xFF)
            if count % (5 * every) == 0:
                flipped.flip(file, offset, 1 << offset % 8)
    assert flipped.harmless.keys() <= HARMLESS.keys()
    assert flipped.harmless["INDEX"] >= (flipped.path / INDEX_NAME).stat().st_size // every
    # All flips are undone.
    assert flipped._restored() == flipped._loaded() == "the state"
    assert ck.verify(flipped.path).ok


def test_no_flipped_byte_is_restored_or_read(flipped: Flipped) -> None:
    check(flipped, every=41)


@pytest.mark.slow
@pytest.mark.sample
def test_no_flipped_byte_of_more_is_restored_or_read(flipped: Flipped) -> None:
    check(flipped, every=7)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_none_of_all_flipped_bytes_is_restored_or_read(flipped: Flipped) -> None:
    check(flipped, every=1)
    assert flipped.flips > 1.2 * sum(file.stat().st_size for file in flipped.files) - 5


def test_a_flipped_byte_is_seen_by_a_restore_that_may_fall_back(flipped: Flipped) -> None:
    """Without an older commit there is nothing to fall back to, and nothing is what is restored."""
    for file in (flipped.path / MANIFEST_NAME, flipped.shard):
        flip(file, file.stat().st_size // 2)
        target = scrambled()
        with pytest.raises(ck.CorruptCheckpointError, match="no committed checkpoint could be restored"):
            flipped._ckpt.restore(target)
        flip(file, file.stat().st_size // 2)
    assert flipped._ckpt.restore(scrambled()).fell_back_from == ()
