"""Do the ranks of a job save together, and come back together? Real processes in real gloo groups."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptengine as ck
from ckptengine.format.index import build_index, decode_index
from ckptengine.format.names import INDEX_NAME, step_dirname
from ckptengine.read.shards import open_header
from ckptengine.storage.posix import PosixStore
from tests.adapters.fake import same
from tests.dist import cases, trap_cases
from tests.helpers.checkpoints import flip, read_manifest
from tests.helpers.ranks import Ranks
from tests.helpers.scripts import mounted_tmpfs

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def without_tcp() -> Iterator[Ranks]:
    """Two ranks that share nothing but a directory."""
    with Ranks(2, init="file") as ranks:
        ranks.call(cases.lend_writers)
        yield ranks


def step_path(root: str, step: int) -> Path:
    return Path(root, step_dirname(step))


def shard(root: str, step: int, rank: int) -> Path:
    path = step_path(root, step)
    return path / read_manifest(path).shards[rank].path


def damage(root: str, step: int, rank: int) -> None:
    """Flip a bit in the data of one rank's shard."""
    header = read_manifest(step_path(root, step)).shards[rank].header_nbytes
    flip(shard(root, step, rank), header + 5000)


# --- state ---------------------------------------------------------------------------------------


def test_each_ranks_own_tensors_values_and_rng(pair: Ranks, root: str) -> None:
    pair.call(cases.own_tensors_values_and_rng, root)


def test_every_rank_hears_which_one_was_the_slowest(trio: Ranks, root: str) -> None:
    trio.call(cases.figures_of_all_ranks, root)


def test_every_rank_leaves_a_trace(pair: Ranks, root: str) -> None:
    pair.call(cases.traced_ranks, root)


@pytest.mark.parametrize("wrap", cases.WRAPS)
def test_training_goes_on_alike_with_a_new_model_and_optimizer(pair: Ranks, root: str, wrap: str) -> None:
    pair.call(cases.training, root, wrap, "raw")


def test_training_goes_on_alike_from_compressed_shards(pair: Ranks, root: str) -> None:
    pair.call(cases.training, root, "fsdp1, original parameters", "zstd")
    assert sorted(path.suffix for path in Path(root).glob("step-*/*/shard-*")) == [".ckptz", ".ckptz"]


def test_local_state_dicts_of_fsdp1(pair: Ranks, root: str) -> None:
    pair.call(cases.local_state_dicts, root)


def test_safetensors_reads_every_tensor_of_each_raw_shard(pair: Ranks, root: str) -> None:
    assert min(pair.call(cases.raw_shards_are_safetensors, root)) > 20


def test_three_ranks(trio: Ranks, root: str) -> None:
    infos = trio.call(cases.save_steps, root, [1, 2])
    assert {info[-1].fingerprint for info in infos} == {ck.verify(root, level="data").fingerprint}
    assert [info.step for info in trio.call(cases.restore, root)] == [2, 2, 2]
    trio.call(cases.training, root, "fsdp2", "raw")


def test_the_index_names_what_each_rank_has_of_its_own(pair: Ranks, root: str) -> None:
    pair.call(cases.save_steps, root, [4])
    pair.call(cases.training, root, "fsdp2", "zstd")
    pair.call(cases.training, f"{root}-ddp", "ddp", "raw")
    for place, step in ((root, 4), (root, 5), (f"{root}-ddp", 5)):
        path = step_path(place, step)
        manifest = read_manifest(path)
        headers = [open_header(PosixStore(), str(path), ref, manifest) for ref in manifest.shards]
        assert (path / INDEX_NAME).read_bytes() == build_index(headers)
        found = decode_index((path / INDEX_NAME).read_bytes(), path="").per_rank
        assert found is not None
        if step == 5:
            assert found.names == set()
        else:
            tensors = {"weights.0", "weights.1", "weights.2", "name.with/odd characters"}
            assert found.differing == {"array", "rank", "note"} | tensors
            assert not found.some_ranks


def test_one_process_reads_what_many_have_written(pair: Ranks, root: str) -> None:
    pair.call(cases.save_steps, root, [4])
    assert ck.verify(root, level="data").ok
    with ck.open_checkpoint(root) as opened:
        assert opened.metadata == {"step": 4}
        # Each rank has one of its own by that name; rank 0's is what the whole checkpoint shows.
        assert same(opened.load()["weights"], cases.state_of(4, 0)["weights"])


# --- the ranks decide together -------------------------------------------------------------------


def test_an_older_step_can_be_asked_for(pair: Ranks, root: str) -> None:
    pair.call(cases.restore_an_older_step, root)


def test_several_saves_under_way_commit_in_order(pair: Ranks, root: str) -> None:
    assert pair.call(cases.two_saves_under_way, root) == [([4, 5], 5)] * 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["flipped", "missing", "cut short", "another step's"])
def test_a_damaged_shard_sends_all_ranks_to_the_previous_step(
    pair: Ranks, root: str, saved: str, rank: int, how: str
) -> None:
    shutil.copytree(saved, root)
    if how == "flipped":
        damage(root, 3, rank)
    elif how == "missing":
        shard(root, 3, rank).unlink()
    elif how == "cut short":
        os.truncate(shard(root, 3, rank), shard(root, 3, rank).stat().st_size - 1)
    else:
        shutil.copyfile(shard(root, 2, rank), shard(root, 3, rank))
    for info in pair.call(cases.restore, root):
        assert info.step == 2
        (skipped,) = info.fell_back_from
        assert (skipped.step, skipped.rank) == (3, rank)
        assert shard(root, 3, rank).name in skipped.reason


@pytest.fixture(scope="module")
def saved(pair: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A root with steps 1 to 3 of two ranks; tests that damage it copy it."""
    root = str(tmp_path_factory.mktemp("saved") / "root")
    pair.call(cases.save_steps, root, [1, 2, 3])
    return root


@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_shard_that_all_ranks_read_from_sends_all_to_the_previous_step(
    pair: Ranks, root: str, rank: int
) -> None:
    """DDP's ranks hold the same: each stores a part of it, and reads the rest from the others' shards."""
    pair.call(cases.save_replicas, root, [1, 2])
    assert [info.step for info in pair.call(cases.restore_replicas, root)] == [2, 2]
    path = shard(root, 2, rank)
    flip(path, read_manifest(step_path(root, 2)).shards[rank].header_nbytes + 10)
    for info in pair.call(cases.restore_replicas, root):
        assert info.step == 1
        (skipped,) = info.fell_back_from
        assert (skipped.step, path.name in skipped.reason) == (2, True)


def test_damage_in_two_steps_on_different_ranks(pair: Ranks, root: str, saved: str) -> None:
    shutil.copytree(saved, root)
    damage(root, 3, 0)
    damage(root, 2, 1)
    for info in pair.call(cases.restore, root):
        assert info.step == 1
        assert [(skipped.step, skipped.rank) for skipped in info.fell_back_from] == [(3, 0), (2, 1)]


def test_a_damaged_manifest_is_skipped_by_all(pair: Ranks, root: str, saved: str) -> None:
    shutil.copytree(saved, root)
    flip(step_path(root, 3) / "MANIFEST.json", 100)
    for info in pair.call(cases.restore, root):
        assert info.step == 2
        assert [skipped.step for skipped in info.fell_back_from] == [3]


def test_a_step_that_was_asked_for_is_not_replaced_by_another(pair: Ranks, root: str, saved: str) -> None:
    shutil.copytree(saved, root)
    damage(root, 2, 1)
    for error in pair.errors(cases.restore_raises, root, 2):
        assert isinstance(error, ck.CorruptCheckpointError)
        assert error.rank == 1
        assert str(shard(root, 2, 1)) in str(error)
    for error in pair.errors(cases.restore_raises, root, 17):
        assert isinstance(error, ck.CheckpointNotFoundError)


def test_when_no_step_is_whole_all_ranks_say_what_is_wrong_with_each(
    pair: Ranks, root: str, saved: str
) -> None:
    shutil.copytree(saved, root)
    for step, rank in ((3, 0), (2, 1), (1, 1)):
        damage(root, step, rank)
    for error in pair.errors(cases.restore_raises, root):
        assert isinstance(error, ck.CorruptCheckpointError)
        for step in (1, 2, 3):
            assert f"step {step}: " in str(error)


def test_where_nothing_was_saved_all_ranks_are_told(pair: Ranks, root: str) -> None:
    for error in pair.errors(cases.restore_raises, root):
        assert isinstance(error, ck.CheckpointNotFoundError)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_target_that_differs_on_one_rank_is_an_error_on_all(pair: Ranks, saved: str, rank: int) -> None:
    texts = pair.call(cases.restore_into_another_shape_on, rank, saved)
    assert texts[0] == texts[1]


def test_not_strict_leaves_alone_what_is_on_one_side_only(pair: Ranks, saved: str) -> None:
    assert pair.call(cases.restore_what_is_there, saved) == [(("more",), ("array",))] * 2


def test_another_number_of_ranks_is_told_of_what_each_rank_had_of_its_own(trio: Ranks, saved: str) -> None:
    for error in trio.errors(cases.restore_raises, saved):
        assert isinstance(error, ck.StateMismatchError)
        assert "weights.0: each rank that saved it had its own" in str(error)
    with pytest.raises(ck.StateMismatchError, match="rank: each rank that saved it had"), ck.Checkpointer(saved) as ckpt:
        ckpt.restore(cases.target_of(0))


# --- groups --------------------------------------------------------------------------------------


def test_a_part_of_the_job_saves_by_itself(trio: Ranks, root: str) -> None:
    assert trio.call(cases.sub_group_then_all, root) == [(0, 2), None, (1, 2)]


def test_a_process_group_that_is_made_anew(trio: Ranks, root: str) -> None:
    trio.call(cases.make_the_group_anew, root)


def test_the_jobs_store_does_not_grow_with_saves_and_restores(pair: Ranks, root: str) -> None:
    for few, more, most in pair.call(cases.keys_after_saves, root):
        assert few == more == most


def test_ranks_that_share_only_a_directory(without_tcp: Ranks, root: str) -> None:
    without_tcp.call(cases.save_steps, root, [1, 2])
    damage(root, 2, 1)
    for info in without_tcp.call(cases.restore, root):
        assert info.step == 1
        assert [(skipped.step, skipped.rank) for skipped in info.fell_back_from] == [(2, 1)]
    without_tcp.call(cases.training, root, "fsdp1, flat parameters", "raw")
    assert [name for name in os.listdir(root) if not name.startswith("step-")] == []


# --- setting up ----------------------------------------------------------------------------------


def test_a_root_that_cannot_be_made_is_an_error_on_all_ranks(pair: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        for error in pair.errors(cases.open_only, str(root)):
            assert isinstance(error, ck.StorageError)
            assert error.rank == 0
            assert str(tmp_path / "file") in str(error)


def test_what_would_fail_every_save_is_an_error_on_all_ranks_at_once(pair: Ranks, root: str) -> None:
    for error in pair.errors(cases.open_with_another_codec_on_rank_1, root):
        assert isinstance(error, ck.CheckpointError)
        assert (error.rank, "zstd" in str(error)) == (1, True)
    for error in pair.errors(cases.open_where_rank_1_sees_nothing, root):
        assert isinstance(error, ck.StorageError)
        assert (error.rank, error.path) == (1, root)


def test_a_rank_that_makes_no_checkpointer_is_named(trio: Ranks, root: str) -> None:
    for error in trio.errors(cases.open_only, root, {"agree_timeout_s": 3.0}, ranks=[0, 1]):
        assert isinstance(error, ck.CommitTimeoutError)
        assert error.rank == 2
    # The rank that comes late finds nobody, and then all are even again.
    (late,) = trio.errors(cases.open_only, root, {"agree_timeout_s": 3.0}, ranks=[2])
    assert isinstance(late, ck.CommitTimeoutError)
    trio.call(cases.save_steps, root, [1])


def test_a_root_that_cannot_be_written_to_still_restores(pair: Ranks, tmp_path: Path, saved: str) -> None:
    with mounted_tmpfs(tmp_path / "mount", "16m") as remount:
        root = str(tmp_path / "mount" / "root")
        shutil.copytree(saved, root)
        remount("ro")
        assert [info.step for info in pair.call(cases.restore, root)] == [3, 3]
        for error in pair.errors(cases.save_steps, root, [4]):
            assert isinstance(error, ck.StorageError)
            assert error.rank == 0
            assert "ead-only" in str(error)


def test_a_job_that_only_reads_leaves_a_running_jobs_exchange_alone(without_tcp: Ranks, root: str) -> None:
    without_tcp.call(trap_cases.open_kept, root)
    without_tcp.call(trap_cases.save, 1)
    (exchange,) = (name for name in os.listdir(root) if name.startswith(".exchange-"))
    old = Path(root, exchange + "0")
    old.mkdir()
    os.utime(old, (time.time() - 10 * 86400,) * 2)
    with ck.Checkpointer(root) as reader:
        assert reader.latest == 1
    # What a job that was killed long ago has left is removed, though.
    assert not old.exists()
    without_tcp.call(trap_cases.save, 2)
    without_tcp.call(trap_cases.close_kept)
    assert not Path(root, exchange).exists()
