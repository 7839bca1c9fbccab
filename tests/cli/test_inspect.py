"""Does `ckpt inspect` show what a checkpoint, a shard and a tensor hold?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckptengine.format.geometry import Chunk
from ckptengine.read import tensors
from tests.cli.conftest import Run
from tests.helpers.checkpoints import RankContent, Tensor, flip, write_checkpoint

ATTEMPT = "a000001-18c0de000000-0123abcd-000001.0"


@pytest.fixture
def step(root: Path) -> Path:
    return root / "step-0000000020"


def test_a_root_means_its_newest_committed_step(ckpt: Run, root: Path) -> None:
    found = ckpt("inspect", root, "--json")
    assert (found.code, found.err) == (0, "")
    assert (found.json["kind"], found.json["step"], found.json["codec"]) == ("checkpoint", 100, "zstd")


@pytest.mark.parametrize("name", ["", "MANIFEST.json"])
def test_the_summary_has_all_of_the_manifest(ckpt: Run, step: Path, name: str) -> None:
    manifest = json.loads((step / "MANIFEST.json").read_text())
    found = ckpt("inspect", step / name)
    facts = {line[:11].strip(): line[13:] for line in found.out.split("\n\n")[0].splitlines()}
    assert facts["step"] == "20"
    assert facts["ranks"] == "2"
    assert facts["size"] == "24.0 KiB in 2 shard files"
    assert facts["codec"] == "raw, in blocks of 4.0 KiB"
    assert facts["fingerprint"] == manifest["digest"]
    assert facts["metadata"] == '{"loss":0.5}'
    document = ckpt("inspect", step / name, "--json").json
    assert document["fingerprint"] == manifest["digest"]
    assert document["metadata"] == {"loss": 0.5}
    assert [shard["nbytes"] for shard in document["shards"]] == [12288, 12288]
    assert document["dtypes"]["float32"] == {"tensors": 3, "nbytes": 12292}


def test_the_tensors_are_listed_with_their_shards(ckpt: Run, step: Path) -> None:
    tensors = {tensor["name"]: tensor for tensor in ckpt("inspect", step, "--json").json["tensors"]}
    assert sorted(tensors) == ["bias", "embed.weight", "empty", "flat", "head.weight", "own", "rank0.scalar"]
    assert tensors["embed.weight"] == {
        "name": "embed.weight",
        "dtype": "float32",
        "shape": [16, 96],
        "placement": "Shard(0)",
        "ranks": [0, 1],
        "nbytes": 16 * 96 * 4,
    }
    assert tensors["flat"]["shape"] == [30, 41]
    assert tensors["bias"]["ranks"] == [0]
    table = ckpt("inspect", step).out.split("\n\n")[-1].splitlines()
    assert table[0].split() == ["TENSOR", "DTYPE", "SHAPE", "PLACEMENT", "SHARD", "BYTES"]
    assert len(table) == 1 + len(tensors)


def test_index_and_headers_tell_the_same(ckpt: Run, step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_headers = [ckpt("inspect", step, *rest, "--json").json for rest in ([], ["embed.weight"], ["flat"])]
    monkeypatch.setattr(tensors, "HEADERS_UP_TO_NBYTES", 0)
    by_index = [ckpt("inspect", step, *rest, "--json").json for rest in ([], ["embed.weight"], ["flat"])]
    assert by_headers == by_index
    (step / "INDEX").unlink()
    assert ckpt("inspect", step, "embed.weight", "--json").json == by_headers[1]


def test_filter_and_limit_choose_tensors(ckpt: Run, step: Path) -> None:
    names = [
        tensor["name"] for tensor in ckpt("inspect", step, "--filter", "*.weight", "--json").json["tensors"]
    ]
    assert names == ["embed.weight", "head.weight"]
    found = ckpt("inspect", step, "--limit", "2")
    assert "5 more tensors" in found.err
    assert found.out.rstrip().splitlines()[-1].startswith("embed.weight")
    found = ckpt("inspect", step, "--filter", "nothing*")
    assert found.code == 0
    assert "no tensor's name matches" in found.err


@pytest.mark.parametrize("option", ["--rank 0", "--no-stats"])
def test_an_option_for_one_tensor_is_not_ignored_without_one(ckpt: Run, step: Path, option: str) -> None:
    found = ckpt("inspect", step, *option.split())
    assert (found.code, found.out) == (2, "")
    assert "only with the name of a tensor" in " ".join(found.err.replace("│", " ").split())


@pytest.mark.parametrize("option", ["--filter *", "--limit 50"])
def test_an_option_for_many_tensors_is_not_ignored_with_one(ckpt: Run, step: Path, option: str) -> None:
    found = ckpt("inspect", step, "bias", *option.split())
    assert (found.code, found.out) == (2, "")
    assert "only without the name of a tensor" in " ".join(found.err.replace("│", " ").split())


def test_many_tensors_are_cut_for_people_and_not_for_programs(ckpt: Run, tmp_path: Path) -> None:
    tensors = {f"t{i:03}": np.zeros(1, np.float32) for i in range(60)}
    step = write_checkpoint(tmp_path, 1, ranks=1, tensors=tensors)
    assert "10 more tensors" in ckpt("inspect", step).err
    assert ckpt("inspect", step, "--limit", "0").err == ""
    assert len(ckpt("inspect", step, "--json").json["tensors"]) == 60


def test_a_tensor_has_its_place_and_statistics(ckpt: Run, step: Path) -> None:
    document = ckpt("inspect", step, "embed.weight", "--json").json
    values = np.arange(16 * 96, dtype=np.float64)
    statistics = document["statistics"]
    assert statistics["count"] == 16 * 96
    assert (statistics["min"], statistics["max"], statistics["zeros"]) == (0, 1535, 1)
    assert statistics["mean"] == pytest.approx(values.mean())
    assert statistics["std"] == pytest.approx(values.std())
    assert statistics["ranks"] == [0, 1]
    for chunk, start in zip(document["chunks"], (0, 768), strict=True):
        data = (step / chunk["file"]).read_bytes()
        assert (
            data[chunk["file_offset"] :][: chunk["nbytes"]]
            == values[start : start + 768].astype("f4").tobytes()
        )
    found = ckpt("inspect", step, "embed.weight")
    assert "mean   767.5" in found.out
    assert found.err == ""


def test_a_compressed_tensor_is_in_blocks(ckpt: Run, root: Path) -> None:
    step = root / "step-0000000100"
    assert "blocks 0" in ckpt("inspect", step, "embed.weight").out
    document = ckpt("inspect", step, "flat", "--json").json
    assert document["chunks"][0]["file_offset"] is None
    assert document["statistics"]["max"] == 1229


def test_a_flat_parameter_counts_all_its_pieces(ckpt: Run, step: Path) -> None:
    document = ckpt("inspect", step, "flat", "--json").json
    assert document["tensor"]["placement"] == "flat"
    assert document["statistics"]["count"] == 1230
    assert document["statistics"]["mean"] == pytest.approx(614.5)


def test_ranks_own_values_are_told_apart(ckpt: Run, step: Path) -> None:
    found = ckpt("inspect", step, "own")
    assert "each rank has values of its own: these are rank 0's" in found.err
    assert ckpt("inspect", step, "own", "--json").json["statistics"]["max"] == 0
    other = ckpt("inspect", step, "own", "--rank", "1", "--json").json["statistics"]
    assert (other["max"], other["count"], other["ranks"]) == (1, 6, [1])
    found = ckpt("inspect", step, "bias", "--rank", "1")
    assert found.code == 2
    assert "rank 1 holds nothing" in found.err


def test_what_one_rank_has_alone_of_a_sharded_tensor_is_no_value_of_its_own(
    ckpt: Run, tmp_path: Path
) -> None:
    row = np.arange(6, dtype=np.float32).reshape(1, 6)

    def content(rank: int, ranks: int) -> RankContent:
        chunk = None if rank == 0 else Chunk((1, 6), (1, 0), (0, 6))
        return RankContent([Tensor("w", row if rank == 0 else row[:0], chunk)])

    found = ckpt("inspect", write_checkpoint(tmp_path, 1, ranks=3, content=content), "w")
    assert "of its own" not in found.err
    assert ckpt("inspect", tmp_path, "w", "--json").json["statistics"]["count"] == 6


def test_a_view_names_its_base(ckpt: Run, step: Path) -> None:
    document = ckpt("inspect", step, "head.weight", "--json").json
    assert document["tensor"]["view_of"] == "embed.weight"
    assert document["statistics"]["max"] == 1535


def test_empty_and_scalar_tensors(ckpt: Run, step: Path) -> None:
    statistics = ckpt("inspect", step, "empty", "--json").json["statistics"]
    assert (statistics["count"], statistics["min"], statistics["mean"]) == (0, None, None)
    assert ckpt("inspect", step, "rank0.scalar", "--json").json["statistics"]["mean"] == 1.5
    assert ckpt("inspect", step, "empty").code == 0


def test_without_statistics_nothing_is_read(ckpt: Run, step: Path) -> None:
    for shard in (step / ATTEMPT).iterdir():
        flip(shard, 4096)
    found = ckpt("inspect", step, "embed.weight", "--no-stats")
    assert found.code == 0
    assert "mean" not in found.out
    assert ckpt("inspect", step, "embed.weight", "--no-stats", "--json").json["statistics"] is None


def test_damage_under_a_tensor_is_named(ckpt: Run, step: Path) -> None:
    flip(step / ATTEMPT / "shard-00001.safetensors", 4096 + 5)
    found = ckpt("inspect", step, "embed.weight")
    assert (found.code, found.out) == (3, "")
    assert "shard-00001.safetensors" in found.err
    assert "rank 1" in found.err
    assert "offset 4096" in found.err
    assert ckpt("inspect", step, "bias").code == 0


def test_an_unknown_tensor_is_not_found_and_similar_names_are_offered(ckpt: Run, step: Path) -> None:
    found = ckpt("inspect", step, "embed.weigth")
    assert (found.code, found.out) == (5, "")
    assert "did you mean embed.weight" in found.err
    assert ckpt("inspect", step, "zzz").code == 5


def test_a_shard_file_is_shown_by_itself(ckpt: Run, step: Path) -> None:
    shard = step / ATTEMPT / "shard-00001.safetensors"
    document = ckpt("inspect", shard, "--json").json
    assert (document["kind"], document["rank"], document["world_size"]) == ("shard", 1, 2)
    assert document["committed"] is True
    assert document["replicas"] == {"bias": 0}
    assert "bias" not in [tensor["name"] for tensor in document["tensors"]]
    found = ckpt("inspect", shard, "bias")
    assert found.code == 5
    assert "inspect the shard of rank 0" in found.err
    assert "608 of 1,230 elements" in ckpt("inspect", shard, "flat").out


def test_compressed_shards_show_how_their_blocks_are_stored(ckpt: Run, tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 1, codec="zstd")
    whole = ckpt("inspect", step, "--json").json["stored"]
    parts = [ckpt("inspect", shard, "--json").json["stored"] for shard in sorted((step / ATTEMPT).iterdir())]
    for key in ("data_nbytes", "stored_nbytes"):
        assert whole[key] == sum(part[key] for part in parts)
    sizes = [shard.stat().st_size - 4096 for shard in sorted((step / ATTEMPT).iterdir())]
    assert [part["stored_nbytes"] for part in parts] == sizes
    assert sum(whole["blocks"].values()) == whole["data_nbytes"] // 4096
    assert "zstd" in whole["blocks"]
    assert "times smaller; blocks:" in ckpt("inspect", step).out
    assert "stored" not in ckpt("inspect", write_checkpoint(tmp_path, 2), "--json").json


def test_a_shard_that_no_manifest_names_says_so(ckpt: Run, step: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.safetensors"
    shutil.copy(step / ATTEMPT / "shard-00000.safetensors", alone)
    assert ckpt("inspect", alone, "--json").json["committed"] is False
    found = ckpt("inspect", alone)
    assert "no: no manifest names this file" in found.out
    assert ckpt("inspect", alone, "bias").code == 0


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", 3),
        (b"short", 3),
        (bytes(4096), 3),
        (b"CKPTZ\0\0\2" + bytes(4096), 6),
        (b"\x08" + bytes(7) + b"{}", 3),
    ],
)
def test_a_file_that_is_no_shard(ckpt: Run, tmp_path: Path, data: bytes, code: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    found = ckpt("inspect", path)
    assert (found.code, found.out) == (code, "")
    assert len(found.err.splitlines()) == 1


def test_an_uncommitted_step_is_not_committed(ckpt: Run, root: Path) -> None:
    found = ckpt("inspect", root / "step-0000000300")
    assert (found.code, found.out) == (4, "")
    assert "never committed" in found.err


def test_large_values_can_be_looked_up(ckpt: Run, tmp_path: Path) -> None:
    def content(rank: int, ranks: int) -> RankContent:
        return RankContent([Tensor("blob", np.arange(9, dtype=np.uint8), kind="bytes")])

    step = write_checkpoint(tmp_path, 1, ranks=1, content=content)
    found = ckpt("inspect", step)
    assert "there are no tensors in it" in found.err
    document = ckpt("inspect", step, "blob", "--json").json
    assert document["tensor"]["value_kind"] == "bytes"
    assert document["statistics"] is None
    assert "large value" in document["no_statistics_because"]


def test_an_empty_checkpoint_can_be_inspected(ckpt: Run, tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, 1, ranks=1, content=lambda rank, ranks: RankContent())
    assert ckpt("inspect", step).code == 0
    assert ckpt("inspect", step, "--json").json["tensors"] == []
