from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptengine.errors import (
    CheckpointNotFoundError,
    NotCommittedError,
    StorageError,
    UnsupportedFormatError,
)
from ckptengine.format.blocks import stored_offsets
from ckptengine.format.geometry import Chunk
from ckptengine.format.names import INDEX_NAME, MANIFEST_NAME
from ckptengine.format.shard import ShardHeader
from ckptengine.read.damage import Damage
from ckptengine.read.plan import Destination
from ckptengine.read.reader import read_shard
from ckptengine.read.shards import open_header
from ckptengine.storage.failures import storage_error
from ckptengine.storage.passing import PassingReader
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import BlockReader, ReadSource
from ckptengine.verification import LEVELS, Level, VerifyReport, verify
from tests.helpers.checkpoints import (
    RankContent,
    Tensor,
    flip,
    read_manifest,
    rewrite_manifest,
    rewrite_shard,
    sample_content,
    write_checkpoint,
)

PAGE = 4096


@pytest.fixture(params=["raw", "zstd"])
def step(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, 3, codec=request.param)


def only(report: VerifyReport) -> Damage:
    assert not report.ok
    (damage,) = report.damages
    return damage


def shard(step: Path, rank: int) -> Path:
    return step / read_manifest(step).shards[rank].path


@pytest.mark.parametrize("level", LEVELS)
def test_a_sound_checkpoint_is_reported_sound(step: Path, level: Level) -> None:
    report = verify(step, level)
    manifest = read_manifest(step)
    assert report.ok
    assert (report.damages, report.notes) == ((), ())
    assert (report.step, report.world_size, report.shards) == (3, 2, 2)
    assert (report.attempt, report.fingerprint) == (manifest.attempt, manifest.fingerprint)
    if level == "data":
        assert report.nbytes == manifest.nbytes


def test_root_step_and_manifest_are_all_accepted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5)
    newest = write_checkpoint(tmp_path, 20)
    write_checkpoint(tmp_path, 30, commit=False)
    for path in (tmp_path, newest, newest / MANIFEST_NAME):
        assert verify(path, "sizes").step == 20


def test_a_copy_under_any_name_is_still_verified(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 5)
    step.rename(tmp_path / "best")
    assert verify(tmp_path / "best").ok


def test_progress_ends_at_the_total(step: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify(step, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (read_manifest(step).nbytes, read_manifest(step).nbytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_report_is_plain_json(step: Path) -> None:
    flip(shard(step, 1), -1 % shard(step, 1).stat().st_size)
    report = json.loads(json.dumps(verify(step).to_dict()))
    assert report["ok"] is False
    assert report["damages"][0]["rank"] == 1


# --- damage is named -----------------------------------------------------------------------------


def test_every_damaged_block_is_named(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 1)
    manifest = read_manifest(step)
    flips = {0: [0, PAGE + 7], 1: [PAGE + 1]}
    for rank, offsets in flips.items():
        for offset in offsets:
            flip(step / manifest.shards[rank].path, manifest.shards[rank].header_nbytes + offset)
    report = verify(step)
    where = [
        (damage.rank, damage.block, damage.offset, damage.nbytes, damage.file) for damage in report.damages
    ]
    assert where == [
        (rank, offset // PAGE, ref.header_nbytes + offset // PAGE * PAGE, PAGE, ref.path)
        for rank, offsets in flips.items()
        for ref in [manifest.shards[rank]]
        for offset in offsets
    ]
    assert report.damages[0].tensors == ("embed.weight", "flat", "head.weight")
    assert verify(step, "structure").ok


@pytest.mark.parametrize("level", LEVELS)
def test_a_missing_shard_is_named(step: Path, level: Level) -> None:
    shard(step, 1).unlink()
    damage = only(verify(step, level))
    assert (damage.rank, damage.reason) == (1, "the shard file is missing")
    assert damage.file.endswith(shard(step, 1).name)


@pytest.mark.parametrize("level", LEVELS)
def test_a_file_that_is_too_long_is_named(step: Path, level: Level) -> None:
    with open(shard(step, 0), "ab") as file:
        file.write(b"\0")
    damage = only(verify(step, level))
    assert damage.rank == 0
    assert "longer than the manifest says" in damage.reason


def test_a_truncated_shard_names_the_blocks_it_lost(step: Path) -> None:
    path = shard(step, 0)
    os.truncate(path, path.stat().st_size - 1)
    assert "truncated" in only(verify(step, "sizes")).reason
    assert "truncated" in only(verify(step, "structure")).reason
    whole, lost = verify(step).damages
    assert "truncated" in whole.reason
    assert lost.block is not None
    assert lost.tensors
    assert "the file ends" in lost.reason


def test_a_shard_cut_within_its_header_is_named(step: Path) -> None:
    os.truncate(shard(step, 0), 100)
    report = verify(step)
    assert {damage.rank for damage in report.damages} == {0}
    assert "ends within its header" in report.damages[-1].reason


def test_swapped_shards_are_named(step: Path) -> None:
    one, other = shard(step, 0), shard(step, 1)
    one.rename(step / "kept")
    other.rename(one)
    (step / "kept").rename(other)
    report = verify(step, "structure")
    reasons = [damage.reason for damage in report.damages]
    assert any("the file is the shard of rank 1" in reason for reason in reasons)
    assert any("the file is the shard of rank 0" in reason for reason in reasons)


def test_a_damaged_header_says_that_nothing_behind_it_was_checked(step: Path) -> None:
    flip(shard(step, 1), 200)
    damage = only(verify(step))
    assert (damage.rank, damage.offset) == (1, 0)
    assert damage.nbytes == read_manifest(step).shards[1].header_nbytes
    assert "without its header" in damage.reason


@pytest.mark.parametrize("level", LEVELS)
def test_a_damaged_manifest_is_reported_without_facts(step: Path, level: Level) -> None:
    flip(step / MANIFEST_NAME, 60, mask=1)
    report = verify(step, level)
    assert only(report).file == MANIFEST_NAME
    assert (report.step, report.fingerprint, report.shards) == (None, None, 0)


def test_a_renamed_step_is_damage(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 3)
    step.rename(tmp_path / "step-0000000009")
    assert "another step" in only(verify(tmp_path)).reason


# --- INDEX ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_missing_index_is_damage(step: Path, level: Level) -> None:
    (step / INDEX_NAME).unlink()
    damage = only(verify(step, level))
    assert (damage.file, damage.rank) == (INDEX_NAME, None)
    assert "rebuilt" in damage.reason


def test_a_checkpoint_may_have_no_index(tmp_path: Path) -> None:
    assert verify(write_checkpoint(tmp_path, 1, index=False)).ok


@pytest.mark.parametrize("level", LEVELS)
def test_an_index_of_another_attempt_is_a_note(tmp_path: Path, level: Level) -> None:
    step = write_checkpoint(tmp_path, 1, save=1)
    # Differs in size too, so that it shows at every level.
    other = write_checkpoint(tmp_path / "other", 1, save=2, tensors={"w": np.arange(4, dtype=np.float32)})
    (step / INDEX_NAME).write_bytes((other / INDEX_NAME).read_bytes())
    report = verify(step, level)
    assert report.ok
    assert "stale" in report.notes[0]


def test_a_valid_index_of_the_same_attempt_that_is_not_the_committed_one_is_damage(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 1)
    other = write_checkpoint(tmp_path / "other", 1, tensors={"w": np.arange(4, dtype=np.float32)})
    (step / INDEX_NAME).write_bytes((other / INDEX_NAME).read_bytes())
    assert "not the one the manifest names" in only(verify(step, "structure")).reason


def test_an_index_that_the_manifest_does_not_name_is_a_note(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 1)
    rewrite_manifest(step, index=None)
    report = verify(step)
    assert report.ok
    assert "not named" in report.notes[0]


def test_strangers_in_the_attempt_directory_are_notes(step: Path) -> None:
    attempt = read_manifest(step).attempt
    (step / attempt / "core.1234").write_bytes(b"x")
    report = verify(step, "sizes")
    assert report.ok
    assert report.notes == (f"{attempt}/core.1234 is not named by the manifest",)


# --- the shards as one world ---------------------------------------------------------------------


def world(tmp_path: Path, change: Callable[[int, RankContent], None]) -> VerifyReport:
    def content(rank: int, ranks: int) -> RankContent:
        made = sample_content(rank, ranks)
        change(rank, made)
        return made

    return verify(write_checkpoint(tmp_path, 1, ranks=3, content=content), "structure")


def test_a_gap_between_chunks_is_damage(tmp_path: Path) -> None:
    def change(rank: int, content: RankContent) -> None:
        if rank == 1:
            content.tensors = [t for t in content.tensors if t.name != "embed.weight"]
            content.views = []

    report = world(tmp_path, change)
    reasons = {damage.tensors: damage.reason for damage in report.damages}
    assert reasons == {
        ("embed.weight",): "no rank holds [8:16, 0:96] of embed.weight",
        ("head.weight",): "no rank holds [8:16, 0:96] of head.weight",
    }


def test_a_gap_in_a_flat_parameter_is_damage(tmp_path: Path) -> None:
    def change(rank: int, content: RankContent) -> None:
        if rank == 2:
            content.tensors = [t for t in content.tensors if t.name != "flat"]

    assert only(world(tmp_path, change)).reason == "no rank holds [827:1230] of the flattened tensor of flat"


@pytest.mark.parametrize(
    ("chunk", "array", "what"),
    [
        (Chunk((24, 96), (8, 0), (8, 96)), np.zeros((8, 96), np.float64), "dtype"),
        (Chunk((32, 96), (8, 0), (8, 96)), np.zeros((8, 96), np.float32), "global shape"),
        (Chunk((24 * 96,), (768,), (768,), (24, 96)), np.zeros(768, np.float32), "flattening"),
    ],
)
def test_chunks_that_contradict_each_other_are_damage(
    tmp_path: Path, chunk: Chunk, array: np.ndarray, what: str
) -> None:
    def change(rank: int, content: RankContent) -> None:
        if rank == 1:
            content.tensors[0] = Tensor("embed.weight", array, chunk)
            content.views = []

    report = world(tmp_path, change)
    assert any(
        d.tensors == ("embed.weight",) and f"rank 0 says its {what} is" in d.reason for d in report.damages
    )


def test_a_replica_of_nothing_is_damage(tmp_path: Path) -> None:
    def change(rank: int, content: RankContent) -> None:
        if rank == 2:
            content.replicas = {"bias": 1}

    damage = only(world(tmp_path, change))
    assert (damage.rank, damage.tensors) == (2, ("bias",))
    assert "rank 1, which does not have it" in damage.reason


def test_a_lost_shard_is_not_reported_again_as_gaps(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 1, ranks=3)
    shard(step, 0).unlink()
    assert only(verify(step)).reason == "the shard file is missing"


def test_tensors_of_each_ranks_own_may_differ(tmp_path: Path) -> None:
    def change(rank: int, content: RankContent) -> None:
        content.tensors.append(Tensor("rng", np.zeros(rank + 1, dtype=[np.uint8, np.int32, np.int16][rank])))

    assert world(tmp_path, change).ok


# --- what is not a checkpoint --------------------------------------------------------------------


def test_what_is_not_there_is_raised(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        verify(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFoundError):
        verify(tmp_path / "nowhere" / MANIFEST_NAME)
    with pytest.raises(CheckpointNotFoundError):
        verify(tmp_path)
    with pytest.raises(NotCommittedError):
        verify(write_checkpoint(tmp_path, 1, commit=False))


def test_a_newer_format_is_raised(step: Path) -> None:
    text = (step / MANIFEST_NAME).read_text().replace('"version": 1', '"version": 2')
    (step / MANIFEST_NAME).write_text(text)
    with pytest.raises(UnsupportedFormatError):
        verify(step)


def test_a_step_being_removed_is_not_found(step: Path) -> None:
    with PosixStore().try_lock_exclusive(str(step)) as held:
        assert held
        (step / MANIFEST_NAME).unlink()
        with pytest.raises(CheckpointNotFoundError, match="being removed"):
            verify(step)


def test_a_step_being_verified_is_not_removed(step: Path) -> None:
    def progress(done: int, total: int) -> None:
        with PosixStore().try_lock_exclusive(str(step)) as held:
            tried.append(held)

    tried: list[bool] = []
    verify(step, progress=progress)
    assert tried
    assert not any(tried)


def test_an_unknown_level_is_a_value_error(step: Path) -> None:
    with pytest.raises(ValueError, match="sizes, structure, data"):
        verify(step, "deep")  # type: ignore[arg-type]


def test_a_path_out_of_the_step_is_damage_and_nothing_outside_is_read(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path / "here", 1)
    attempt = read_manifest(step).attempt
    (step / attempt).rename(tmp_path / "outside")
    (step / attempt).symlink_to(tmp_path / "outside")
    report = verify(step)
    assert [damage.reason for damage in report.damages] == [
        "the shard's path leads out of the step directory"
    ] * 2


def test_verify_needs_no_torch() -> None:
    code = "import sys, ckptengine.verification; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_hostile_header_with_right_digests_is_damage(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 1)
    manifest = read_manifest(step)
    rewrite_shard(step, 0, step=99)
    assert "step is not the manifest's" in verify(step).damages[0].reason
    rewrite_manifest(step, shards=(replace(manifest.shards[0], header_nbytes=PAGE * 3), manifest.shards[1]))
    assert not verify(step).ok


# --- every byte ----------------------------------------------------------------------------------


def undetected(step: Path, every: int) -> Iterator[tuple[Path, int]]:
    """Where a flipped bit is not seen by `verify`; the bit is flipped while the caller looks at it."""
    files = sorted(path for path in step.rglob("*") if path.is_file())
    count = 0
    for path in files:
        for offset in range(path.stat().st_size):
            count += 1
            if count % every:
                continue
            mask = 1 << count % 8
            flip(path, offset, mask)
            try:
                found = not verify(step, threads=1).ok
            except UnsupportedFormatError:
                found = True
            if not found:
                yield path, offset
            flip(path, offset, mask)
    assert count > 3 * PAGE


def data_of(step: Path, rank: int) -> tuple[bytes, ShardHeader]:
    """A shard's whole data section, as a reader gets it."""
    store, manifest = PosixStore(), read_manifest(step)
    header = open_header(store, str(step), manifest.shards[rank], manifest)
    data = np.zeros(header.data_nbytes, np.uint8)
    read_shard(store, str(shard(step, rank)), header, [Destination(0, header.data_nbytes, data.ctypes.data)])
    return data.tobytes(), header


def check_flips(step: Path, every: int) -> None:
    """Whatever is not detected is harmless: a bit of a zstd frame that decides nothing (the frame header's
    unused bit, entries of entropy tables that no symbol of this block uses), so that the block decompresses
    to bytes with the digest they had when they were staged. A raw shard has no such bits."""
    before = {rank: data_of(step, rank) for rank in (0, 1)}
    for path, offset in undetected(step, every):
        assert path.suffix == ".ckptz"
        rank = next(rank for rank in (0, 1) if shard(step, rank) == path)
        data, header = data_of(step, rank)
        assert header.stored_nbytes is not None
        frames = zip(stored_offsets(header.stored_nbytes), header.stored_nbytes, strict=True)
        assert any(start <= offset - header.header_nbytes < start + nbytes for start, nbytes in frames)
        assert data == before[rank][0]
    assert verify(step).ok


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_flipped_bit_anywhere_is_detected_or_harmless(tmp_path: Path, codec: str) -> None:
    check_flips(write_checkpoint(tmp_path, 1, codec=codec), every=37)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_every_flipped_byte_is_detected_or_harmless(tmp_path: Path, codec: str) -> None:
    check_flips(write_checkpoint(tmp_path, 1, codec=codec), every=1)


# --- what is about this process, not about the files -------------------------------------------------


class _FailingReader(PassingReader):
    """The header can be read; before anything else `fail` is called."""

    def __init__(self, file: BlockReader, fail: Callable[[], None]) -> None:
        super().__init__(file)
        self._fail = fail

    def pread_into(self, offset: int, out: memoryview, source: ReadSource | None = None) -> ReadSource:
        if offset:
            self._fail()
        return super().pread_into(offset, out, source)


class _FailingStore(PosixStore):
    """Fails to `size`, `open` or `read` the shard of rank 1."""

    def __init__(self, code: int, doing: str) -> None:
        super().__init__()
        self._code = code
        self._doing = doing

    def _fail(self, path: str, doing: str) -> None:
        if doing == self._doing and "shard-00001" in path:
            raise storage_error(OSError(self._code, os.strerror(self._code)), path, doing)

    def size(self, path: str) -> int:
        self._fail(path, "size")
        return super().size(path)

    def open(self, path: str) -> BlockReader:
        self._fail(path, "open")
        return _FailingReader(super().open(path), lambda: self._fail(path, "read"))


@pytest.mark.parametrize("doing", ["size", "open", "read"])
@pytest.mark.parametrize("name", ["EACCES", "EPERM", "EMFILE", "ENFILE", "ENOMEM"])
def test_lacking_a_permission_or_a_resource_is_not_damage(step: Path, name: str, doing: str) -> None:
    code = getattr(errno, name)
    with pytest.raises(StorageError, match=re.escape(os.strerror(code))) as caught:
        verify(step, store=_FailingStore(code, doing))
    assert (caught.value.errno, caught.value.rank) == (code, 1)
    assert caught.value.path == str(shard(step, 1))


@pytest.mark.parametrize("doing", ["size", "open", "read"])
def test_a_failing_disk_is_damage(step: Path, doing: str) -> None:
    report = verify(step, store=_FailingStore(errno.EIO, doing))
    assert not report.ok
    assert {damage.rank for damage in report.damages} == {1}
    assert all(
        "Input/output error" in damage.reason for damage in report.damages if damage.file != INDEX_NAME
    )


def test_memory_for_buffers_is_not_damage_either(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("ckptengine.read.reader.AlignedBuffer", no_memory)
    with pytest.raises(StorageError, match="no memory"):
        verify(step)


def test_only_the_index_is_not_needed_to_restore(step: Path) -> None:
    assert verify(step).restorable
    (step / INDEX_NAME).write_bytes(b"garbage")
    report = verify(step)
    assert (report.ok, report.restorable) == (False, True)
    shard(step, 0).unlink()
    assert not verify(step).restorable


def test_a_single_shard_is_refused(step: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=f"single shard.*give its step: {re.escape(str(step))}"):
        verify(shard(step, 0))
