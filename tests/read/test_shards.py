from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptengine.errors import CorruptCheckpointError, StorageError
from ckptengine.read.shards import open_header, shard_path
from ckptengine.storage.posix import PosixStore
from tests.helpers.checkpoints import RUN, flip, read_manifest, rewrite_shard, write_checkpoint
from tests.helpers.privileges import modes_bind_root


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_sound_header_is_read(tmp_path: Path, codec: str) -> None:
    step = write_checkpoint(tmp_path, 12, codec=codec)
    manifest = read_manifest(step)
    for ref in manifest.shards:
        header = open_header(PosixStore(), str(step), ref, manifest)
        assert (header.rank, header.step, header.codec) == (ref.rank, 12, codec)
        assert header.header_nbytes == ref.header_nbytes


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut, "truncated"),
        (grow, "longer than the manifest says"),
        (lambda path: path.unlink(), "missing"),
        (lambda path: flip(path, 100), "header is damaged"),
        (lambda path: path.write_bytes(b""), "truncated"),
    ],
)
def test_a_harmed_file_is_refused_with_its_rank_and_path(
    tmp_path: Path, harm: Callable[[Path], object], message: str
) -> None:
    step = write_checkpoint(tmp_path, 1)
    manifest = read_manifest(step)
    ref = manifest.shards[1]
    harm(step / ref.path)
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        open_header(PosixStore(), str(step), ref, manifest)
    assert (caught.value.path, caught.value.rank) == (str(step / ref.path), 1)


def test_swapped_shards_are_told_apart(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 1, ranks=3)
    manifest = read_manifest(step)
    one, other = (step / manifest.shards[rank].path for rank in (1, 2))
    keep = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(keep)
    with pytest.raises(CorruptCheckpointError, match="the file is the shard of rank 2"):
        open_header(PosixStore(), str(step), manifest.shards[1], manifest)


def test_a_shard_of_another_attempt_is_refused_even_if_the_manifest_vouches_for_it(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 1)
    rewrite_shard(step, 0, attempt=f"{RUN}-000009.0")
    manifest = read_manifest(step)
    with pytest.raises(CorruptCheckpointError, match="attempt is not the manifest's"):
        open_header(PosixStore(), str(step), manifest.shards[0], manifest)


def test_a_link_out_of_the_step_is_not_followed(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path / "here", 1)
    manifest = read_manifest(step)
    outside = tmp_path / "outside"
    shutil.move(step / manifest.attempt, outside)
    os.symlink(outside, step / manifest.attempt)
    with pytest.raises(CorruptCheckpointError, match="leads out of the step"):
        shard_path(str(step), manifest.shards[0])


def test_a_link_in_place_of_a_shard_is_refused(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 1)
    manifest = read_manifest(step)
    path = step / manifest.shards[0].path
    kept = path.with_suffix(".kept")
    path.rename(kept)
    path.symlink_to(kept)
    with pytest.raises(CorruptCheckpointError, match="regular file"):
        open_header(PosixStore(), str(step), manifest.shards[0], manifest)


def test_the_root_may_be_reached_through_a_link(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path / "real", 1)
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    aliased = tmp_path / "alias" / step.name
    manifest = read_manifest(aliased)
    assert open_header(PosixStore(), str(aliased), manifest.shards[0], manifest).rank == 0


def test_an_unreadable_shard_is_a_storage_error_with_its_rank(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 1)
    manifest = read_manifest(step)
    (step / manifest.shards[1].path).chmod(0)
    with modes_bind_root(), pytest.raises(StorageError, match="Permission denied") as caught:
        open_header(PosixStore(), str(step), manifest.shards[1], manifest)
    assert caught.value.rank == 1
