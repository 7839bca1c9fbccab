"""Headers, manifest, INDEX, layout, geometry, digest, codec: what is pure computation."""

from __future__ import annotations

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from ckptengine.codecs.block import pack_into, unpack_into
from ckptengine.format.blocks import PLANES, ZSTD
from ckptengine.format.columns import IndexBuilder, ShardColumns, columns_of
from ckptengine.format.digest import digest
from ckptengine.format.entries import ShardHeader, TensorEntry
from ckptengine.format.geometry import Chunk, copy_runs, intersect
from ckptengine.format.index import build_index, decode_index, encode_index
from ckptengine.format.layout import lay_out
from ckptengine.format.limits import PAGE
from ckptengine.format.manifest import Manifest, ShardRef, decode_manifest, encode_manifest
from ckptengine.format.names import shard_filename
from ckptengine.format.scan import scan_header
from ckptengine.format.shard import decode_header, encode_header, seal_header
from ckptengine.testing.synthetic import World
from native_bench.suites.sizes import Sizes

METHODS = (ZSTD, PLANES[2])


def sealed(header: ShardHeader) -> bytes:
    digests = [digest(bytes([i % 256])) for i in range(header.blocks.count)]
    return seal_header(encode_header(header), digests, own=own(header))


def own(header: ShardHeader) -> str | None:
    return None if header.own is None else header.own.decode()


@pytest.fixture(params=["many tensors", "many blocks"])
def header(request: pytest.FixtureRequest, sizes: Sizes) -> ShardHeader:
    if request.param == "many tensors":
        return World(8, tensors=sizes.small).header(3)
    nbytes = sizes.blocks * PAGE
    whole = World(1, tensors=1, block_nbytes=PAGE).header(0)
    entry = TensorEntry("weight", "uint8", (nbytes,), 0, nbytes)
    return ShardHeader(
        run=whole.run,
        attempt=whole.attempt,
        step=whole.step,
        rank=0,
        world_size=1,
        codec="raw",
        block_nbytes=PAGE,
        data_nbytes=nbytes,
        tensors=(entry,),
        tree={"weight": {"$": "t", "i": 0}},
    )


def test_encode_header(benchmark: BenchmarkFixture, header: ShardHeader) -> None:
    template = benchmark(encode_header, header)
    assert template.n_blocks == header.blocks.count
    assert template.nbytes % PAGE == 0


def test_seal_header(benchmark: BenchmarkFixture, header: ShardHeader) -> None:
    template = encode_header(header)
    digests = [digest(bytes([i % 256])) for i in range(header.blocks.count)]
    data = benchmark(seal_header, template, digests, own=own(header))
    assert decode_header(data, path="").digests == b"".join(digests)


def test_decode_header(benchmark: BenchmarkFixture, header: ShardHeader) -> None:
    found = benchmark(decode_header, sealed(header), path="")
    assert (found.tensors, found.tree) == (header.tensors, header.tree)
    assert found.blocks == header.blocks


def test_scan_header(benchmark: BenchmarkFixture, header: ShardHeader) -> None:
    found = benchmark(scan_header, sealed(header))
    expected = columns_of(header)
    assert (found.names, found.infos) == (expected.names, expected.infos)
    assert np.array_equal(found.offsets, expected.offsets)
    assert np.array_equal(found.stop, expected.stop)


@pytest.fixture(scope="module")
def manifest(sizes: Sizes) -> Manifest:
    attempt = World(1).attempt
    refs = tuple(
        ShardRef(rank, f"{attempt}/{shard_filename(rank, compressed=False)}", 1 << 30, PAGE, f"{rank:032x}")
        for rank in range(sizes.ranks)
    )
    return Manifest(
        step=1000,
        attempt=str(attempt),
        run=str(attempt.run),
        world_size=len(refs),
        created=1.5e9,
        codec="raw",
        block_nbytes=16 << 20,
        nbytes=len(refs) << 30,
        tensors=500,
        metadata={"loss": 0.5},
        shards=refs,
        index=None,
    )


def test_encode_manifest(benchmark: BenchmarkFixture, manifest: Manifest) -> None:
    data = benchmark(encode_manifest, manifest)
    assert decode_manifest(data, path="").shards == manifest.shards


def test_decode_manifest(benchmark: BenchmarkFixture, manifest: Manifest) -> None:
    found = benchmark(decode_manifest, encode_manifest(manifest), path="")
    assert found.shards == manifest.shards
    assert found.metadata == manifest.metadata


@pytest.fixture(scope="module")
def columns(sizes: Sizes) -> list[ShardColumns]:
    return list(World(sizes.ranks, tensors=sizes.tensors).columns())


def test_build_index(benchmark: BenchmarkFixture, columns: list[ShardColumns], sizes: Sizes) -> None:
    def build() -> bytes:
        builder = IndexBuilder()
        for shard in columns:
            builder.add(shard)
        return encode_index(builder)

    index = decode_index(benchmark.pedantic(build, rounds=3), path="")
    world = World(sizes.ranks, tensors=sizes.tensors)
    assert index.names() == sorted([*world.names, world.last])
    assert len(index.chunks(world.names[0])) == sizes.ranks


def test_open_index(benchmark: BenchmarkFixture, sizes: Sizes) -> None:
    world = World(sizes.ranks, tensors=sizes.tensors)
    index = benchmark.pedantic(decode_index, (world.index(),), {"path": ""}, rounds=5)
    assert len(index) == sizes.tensors + 1


def test_look_up_in_index(benchmark: BenchmarkFixture, sizes: Sizes) -> None:
    world = World(sizes.ranks, tensors=sizes.tensors)
    index = decode_index(world.index(), path="")
    chunks = benchmark(index.chunks, world.names[1])
    assert [chunk.rank for chunk in chunks] == list(range(sizes.ranks))
    assert chunks[-1].chunk.offsets == (sizes.ranks - 1, 0)


def test_index_of_headers(benchmark: BenchmarkFixture) -> None:
    world = World(8, tensors=100)
    headers = [world.header(rank) for rank in range(8)]
    assert benchmark(build_index, headers) == world.index()


def test_layout(benchmark: BenchmarkFixture, sizes: Sizes) -> None:
    items = [(f"t{i}", 1 + i * 977 % 65536, 1 << i % 5) for i in range(sizes.small)]
    placed, nbytes = benchmark(lay_out, items)
    at = 0
    for _, start, stop in placed:
        assert start == at
        at = stop
    assert at == nbytes
    assert nbytes % PAGE == 0


def test_geometry(benchmark: BenchmarkFixture, sizes: Sizes) -> None:
    """Every chunk of one mesh with every chunk of another."""
    shape = (256, 512)
    rows = [Chunk(shape, (i, 0), (1, 512)) for i in range(shape[0])]
    columns = [Chunk(shape, (0, i), (256, 32)) for i in range(0, shape[1], 32)]

    def copies() -> int:
        total = 0
        for row in rows:
            for column in columns:
                box = intersect(row, column)
                assert box is not None
                total += sum(nbytes for _, _, nbytes in copy_runs(box, row, column, 4))
        return total

    assert benchmark(copies) == 4 * shape[0] * shape[1]


def test_digest(benchmark: BenchmarkFixture, sizes: Sizes) -> None:
    data = np.random.default_rng(0).integers(0, 256, sizes.buffer, np.uint8)
    found = benchmark(digest, data.data)
    other = data.copy()
    assert found == digest(other.data)
    other[-1] ^= 1
    assert found != digest(other.data)


@pytest.fixture(scope="module")
def block(sizes: Sizes) -> memoryview:
    """Weights as bf16 has them: the upper halves of small floats."""
    values = np.random.default_rng(0).normal(0, 0.02, sizes.buffer // 2).astype(np.float32)
    return memoryview((values.view(np.uint32) >> 16).astype(np.uint16)).cast("B")


@pytest.mark.parametrize("method", METHODS)
def test_pack_block(benchmark: BenchmarkFixture, block: memoryview, method: str) -> None:
    out = memoryview(bytearray(len(block)))
    nbytes = benchmark(pack_into, out, block, method, 1)
    assert nbytes is not None
    assert nbytes < len(block)


@pytest.mark.parametrize("method", METHODS)
def test_unpack_block(benchmark: BenchmarkFixture, block: memoryview, method: str) -> None:
    stored = memoryview(bytearray(len(block)))
    nbytes = pack_into(stored, block, method, 1)
    assert nbytes is not None
    out = memoryview(bytearray(len(block)))
    benchmark(unpack_into, stored[:nbytes], method, out)
    assert out == block
