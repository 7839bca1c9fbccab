"""Is what earlier versions wrote still read, and equal?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import ckptengine as ck
from ckptengine.format.index import decode_index, index_from_headers
from ckptengine.format.names import INDEX_NAME
from ckptengine.format.per_rank import PerRank
from ckptengine.format.shard import ShardHeader
from ckptengine.read.shards import open_header
from ckptengine.storage.posix import PosixStore
from tests.adapters.fake import bits
from tests.adapters.ranks import run_ranks
from tests.golden import expected
from tests.helpers.checkpoints import read_manifest
from tests.helpers.equality import check_equal, check_layout, check_numpy_order

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

V1 = Path(__file__).parent / "v1"
STATES = ("raw", "zstd", "own")
STEP = f"step-{expected.STEP:010d}"

FINGERPRINTS = {
    "raw": "1be4dfbb229f062bd1c894bd16d2ba38",
    "zstd": "0c385235711270d0ea3cb47bc8887cfb",
    "planes": "47eab0ce72d75b1c63bb8a0963cc6873",
    "dtypes": "13a51e7301e8818096bb3c0a681a3626",
    "own": "3dddfad45b4ba3af582eadca290d8c59",
}


def headers(name: str) -> list[ShardHeader]:
    step = V1 / name / STEP
    manifest = read_manifest(step)
    return [open_header(PosixStore(), str(step), ref, manifest) for ref in manifest.shards]


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_every_byte_is_as_it_was_written(name: str) -> None:
    report = ck.verify(V1 / name, level="data")
    assert (report.damages, report.notes) == ((), ())
    assert (report.step, report.fingerprint) == (expected.STEP, FINGERPRINTS[name])
    assert report.world_size == (1 if name in ("dtypes", "planes") else expected.WORLD_SIZE)


@pytest.mark.parametrize("name", STATES)
def test_the_whole_state_is_read(name: str) -> None:
    with ck.open_checkpoint(V1 / name) as c:
        check_equal(c.metadata, expected.METADATA)
        state = c.load()
        check_equal(state, expected.whole_state())
        check_layout(state, expected.whole_state())
        check_numpy_order(state, expected.whole_state())
        assert torch.equal(c.get_tensor("model.flat"), expected.FLAT)
        assert torch.equal(c.get_slice("model.sharded")[2:4, 1], expected.SHARDED[2:4, 1])
        assert c.get_value("values.enum.0") is expected.values()["enum"][0]


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("rank", range(expected.WORLD_SIZE))
def test_each_ranks_own_state_is_read(name: str, rank: int) -> None:
    with ck.open_checkpoint(V1 / name / STEP) as c:
        state = c.load(rank=rank)
    check_equal(state, expected.local_state(rank))
    check_layout(state, expected.local_state(rank))
    check_numpy_order(state, expected.local_state(rank))


@pytest.mark.dist
def test_two_ranks_restore_it(tmp_path: Path) -> None:
    for name in STATES:
        shutil.copytree(V1 / name, tmp_path / name)
    outcome = run_ranks(tmp_path, "tests.golden.cases", [f"restore_{name}" for name in STATES])
    assert outcome == {f"restore_{name}": "" for name in STATES}


@pytest.mark.parametrize("name", expected.EXOTIC_DTYPES)
def test_every_dtype_is_read_where_torch_has_it(name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    with ck.open_checkpoint(V1 / "dtypes") as c:
        found = c.get_tensor(name)
    assert found.dtype == getattr(torch, name)
    assert bits(found) == bits(expected.of_dtype(name))


def test_blocks_stored_in_every_way_are_read(tmp_path: Path) -> None:
    (header,) = headers("planes")
    assert header.methods == "01248"
    assert [entry.name for entry in header.tensors] == ["noise", "text", "half", "single", "double"]
    with ck.open_checkpoint(V1 / "planes") as c:
        check_equal(c.load(), expected.compressible_state())
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.compressible_state().items()}
    shutil.copytree(V1 / "planes", tmp_path / "planes")
    with ck.Checkpointer(tmp_path / "planes") as ckpt:
        assert ckpt.restore(target).step == expected.STEP
    check_equal(target, expected.compressible_state())


def test_blocks_of_before_byte_planes_say_by_their_length_whether_they_are_compressed() -> None:
    for header in headers("zstd"):
        assert header.methods is not None
        assert {"0", "1"} >= set(header.methods)


def test_safetensors_reads_the_raw_shards() -> None:
    for header in headers("raw"):
        state = expected.local_state(header.rank)
        shard = V1 / "raw" / STEP / read_manifest(V1 / "raw" / STEP).shards[header.rank].path
        with safe_open(str(shard), framework="pt") as file:
            names = {name for name in file.keys() if not name.startswith("__pad__.")}  # noqa: SIM118
            assert names == {entry.name for entry in header.tensors}
            for entry in header.tensors:
                found = file.get_tensor(entry.name)
                if entry.kind is not None or entry.name.endswith("#storage"):
                    continue  # a large value, or the memory that several tensors share
                container, _, key = entry.name.partition(".")
                tensor = state[container][key]
                assert bits(found) == bits(tensor), entry.name
                if entry.dtype != "complex128":  # which it has no name for
                    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_the_index_is_what_the_headers_say(name: str) -> None:
    path = V1 / name / STEP / INDEX_NAME
    index = decode_index(path.read_bytes(), path=str(path))
    rebuilt = index_from_headers(headers(name))
    assert index.names() == rebuilt.names()
    for tensor in index.names():
        assert index.info(tensor) == rebuilt.info(tensor)
        assert index.chunks(tensor) == rebuilt.chunks(tensor)
    assert index.per_rank == (rebuilt.per_rank if name == "own" else None)


def test_what_ranks_do_not_hold_alike_is_found_in_old_and_new_headers() -> None:
    some = {"own.only 0", "own.only 1"}
    new = index_from_headers(headers("own")).per_rank
    assert new == PerRank(frozenset({"own.rank", "own.rng"}), frozenset(some))
    old = index_from_headers(headers("raw")).per_rank
    assert old is not None
    assert old.some_ranks == some
    # Those of before `own` cannot tell which tensors of a rank's own are alike.
    tensors = {f"dtypes.{name}" for name in expected.COMMON_DTYPES}
    tensors |= {f"layouts.{name}" for name in expected.layouts()}
    large = {f"values.large {kind}" for kind in ("bytes", "bytearray", "array")}
    assert old.differing - {"layouts.left#storage"} >= {"own.rank", "own.rng"} | tensors | large


def test_the_files_show_what_they_are_to_show() -> None:
    raw, zstd = headers("raw"), headers("zstd")
    assert all(header.blocks.count > 1 for header in raw + zstd)
    stored = [
        (length, stop - start)
        for header in zstd
        for i, length in enumerate(header.stored_nbytes or ())
        for start, stop in [header.blocks.span(i)]
    ]
    assert any(length < whole for length, whole in stored)
    # The replicated tensor is stored once, and the other rank says where.
    assert sum(len(header.replicas) for header in raw) == 1
    assert {view.name for view in raw[0].views} >= {"layouts.tied", "layouts.transposed", "layouts.left"}
    kinds = {entry.kind for entry in raw[0].tensors}
    assert kinds == {None, "bytes", "bytearray", "ndarray"}
    assert sum(path.stat().st_size for path in V1.rglob("*") if path.is_file()) < 160_000
