"""Does the index say what the headers say, and nothing else?"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.format import dtypes
from ckptengine.format.columns import IndexBuilder, ShardColumns, columns_of
from ckptengine.format.digest import DIGEST_NBYTES
from ckptengine.format.geometry import Chunk
from ckptengine.format.index import Index, IndexedChunk, build_index, decode_index, index_from_headers
from ckptengine.format.scan import scan_header
from ckptengine.format.shard import (
    ShardHeader,
    TensorEntry,
    ViewEntry,
    decode_header,
    encode_header,
    seal_header,
)
from tests.format import examples
from tests.format.strategies import few, shard_headers, usual

PATH = "step-0000001000/INDEX"


def content(index: Index) -> dict[str, object]:
    return {name: (index.info(name), index.chunks(name)) for name in index.names()}


@few
@given(shard_headers())
def test_index_comes_back_and_equals_what_the_headers_give(header: ShardHeader) -> None:
    index = decode_index(build_index([header]), path=PATH)
    assert index.attempt == header.attempt
    assert content(index) == content(index_from_headers([header]))
    assert index.names() == sorted(index.names())
    for entry in header.tensors:
        assert (entry.name in index) == (entry.kind is None)
        if entry.kind is None:
            chunk = entry.chunk or Chunk.whole(entry.shape)
            assert index.info(entry.name) == (entry.dtype, chunk.global_shape, chunk.flat_of)
            assert index.chunks(entry.name) == [
                IndexedChunk(entry.name, header.rank, chunk, entry.start, entry.stop, entry.chunk is not None)
            ]


@few
@given(shard_headers())
def test_every_indexed_byte_range_is_as_long_as_its_chunk(header: ShardHeader) -> None:
    index = index_from_headers([header])
    for name in index.names():
        dtype, *_ = index.info(name)
        for chunk in index.chunks(name):
            assert chunk.stop - chunk.start == chunk.chunk.nelem * dtypes.itemsize(dtype)
            assert chunk.stop <= header.data_nbytes


def test_chunks_of_all_ranks_are_listed_by_rank() -> None:
    headers = [examples.shard_header(rank=1), examples.shard_header(rank=0)]
    index = decode_index(build_index(headers), path=PATH)
    chunks = index.chunks("embed.weight")
    assert [(c.rank, c.chunk.offsets, c.start, c.stop) for c in chunks] == [
        (0, (0, 0), 0, 64),
        (1, (4, 0), 0, 64),
    ]
    assert index.info("embed.weight") == ("bfloat16", (8, 8), None)
    assert index.info("flat") == ("float32", (12,), (3, 4))
    assert len(index) == len(index.names())


def test_order_of_the_headers_does_not_change_the_bytes() -> None:
    headers = [examples.shard_header(rank=0), examples.shard_header(rank=1)]
    assert build_index(headers) == build_index(headers[::-1])


def test_views_in_c_order_are_indexed_where_their_bytes_lie() -> None:
    index = index_from_headers([examples.shard_header()])
    assert index.chunks("head.weight")[0].start == 0
    assert index.chunks("head.weight")[0].stop == 64
    header = replace(
        examples.shard_header(),
        views=(ViewEntry("part", "embed.weight", 16, "bfloat16", (2, 4), (4, 1)),),
        tree=None,
    )
    assert index_from_headers([header]).chunks("part") == [
        IndexedChunk("part", 0, Chunk.whole((2, 4)), 16, 32, False)
    ]


def test_large_values_views_of_other_order_and_replicas_are_not_indexed() -> None:
    names = index_from_headers([examples.shard_header()]).names()
    assert not {"table", "blob", "transposed", "norm.weight"} & set(names)


def test_value_of_each_rank_under_one_name_is_the_lowest_ranks() -> None:
    def header(rank: int, nelem: int) -> ShardHeader:
        entry = TensorEntry("rng", "uint8", (nelem,), 0, nelem)
        return replace(
            examples.shard_header(rank=rank),
            tensors=(entry,),
            views=(),
            replicas={},
            data_nbytes=4096,
            tree=None,
        )

    index = index_from_headers([header(1, 7), header(0, 5)])
    assert index.info("rng") == ("uint8", (5,), None)
    assert [chunk.rank for chunk in index.chunks("rng")] == [0]
    same = index_from_headers([header(1, 5), header(0, 5)])
    assert [chunk.rank for chunk in same.chunks("rng")] == [0, 1]


def test_checkpoint_without_tensors_has_an_empty_index() -> None:
    header = replace(
        examples.shard_header(), tensors=(), views=(), replicas={}, data_nbytes=0, tree={"step": 5}
    )
    index = decode_index(build_index([header]), path=PATH)
    assert index.names() == []


def test_scalars_alone_are_indexed() -> None:
    entries = tuple(TensorEntry(f"s{i}", "int64", (), 8 * i, 8 * i + 8) for i in range(3))
    header = replace(
        examples.shard_header(), tensors=entries, views=(), replicas={}, data_nbytes=4096, tree=None
    )
    index = decode_index(build_index([header]), path=PATH)
    assert [index.chunks(f"s{i}")[0].start for i in range(3)] == [0, 8, 16]


def test_unknown_name_is_a_key_error() -> None:
    index = index_from_headers([examples.shard_header()])
    for ask in (index.info, index.chunks):
        with pytest.raises(KeyError):
            ask("nowhere")


def test_headers_of_different_attempts_are_refused() -> None:
    other = replace(examples.shard_header(rank=1), attempt=str(replace(examples.ATTEMPT, retry=1)))
    for headers in ([examples.shard_header(), other], []):
        with pytest.raises(ValueError, match="attempts"):
            build_index(headers)


@usual
@given(st.data())
def test_many_ragged_chunks_come_back(data: st.DataObject) -> None:
    """Columns hold chunks of different numbers of dimensions one after the other."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    entries = []
    at = 0
    for i in range(int(rng.integers(0, 30))):
        shape = tuple(int(n) for n in rng.integers(0, 4, size=int(rng.integers(0, 4))))
        stop = at + int(np.prod(shape))
        entries.append(TensorEntry(f"{rng.integers(0, 99)}.{i}", "int8", shape, at, stop))
        at = stop
    header = replace(
        examples.shard_header(),
        tensors=tuple(entries),
        views=(),
        replicas={},
        data_nbytes=-(-at // 4096) * 4096,
        tree=None,
    )
    index = decode_index(build_index([header]), path=PATH)
    for entry in entries:
        assert index.chunks(entry.name) == [
            IndexedChunk(entry.name, 0, Chunk.whole(entry.shape), entry.start, entry.stop, False)
        ]


@few
@given(shard_headers())
def test_scanning_a_headers_bytes_gives_what_decoding_it_gives(header: ShardHeader) -> None:
    count = header.blocks.count
    digests = [bytes(DIGEST_NBYTES)] * count
    stored, methods = ([1] * count, "1" * count) if header.codec == "zstd" else (None, None)
    sealed = seal_header(encode_header(header), digests, stored, methods)
    scanned, decoded = scan_header(sealed), columns_of(decode_header(sealed, path=PATH))
    for field in fields(ShardColumns):
        one, other = getattr(scanned, field.name), getattr(decoded, field.name)
        assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other, field.name


def test_what_an_index_cannot_tell_is_named() -> None:
    index = decode_index(examples.index_bytes(), path=PATH)
    assert index.partial == {"transposed"}
    assert index.hidden == frozenset()
    views = tuple(ViewEntry(name, "flat", at, "float32", (2,)) for name, at in (("left", 0), ("right", 8)))
    shared = replace(examples.shard_header(), views=views, tree=[{"$": "t", "i": i} for i in (0, 2, 8, 9)])
    index = decode_index(build_index([shared]), path=PATH)
    assert (index.partial, index.hidden) == (frozenset(), {"flat"})


def test_a_name_of_which_ranks_say_different_things_is_partial() -> None:
    def header(rank: int, nelem: int) -> ShardHeader:
        entries = (TensorEntry("rng", "uint8", (nelem,), 0, nelem), TensorEntry("same", "uint8", (4,), 8, 12))
        return replace(
            examples.shard_header(rank=rank),
            tensors=entries,
            views=(),
            replicas={},
            data_nbytes=4096,
            tree=None,
        )

    index = decode_index(build_index([header(0, 5), header(1, 7)]), path=PATH)
    assert index.partial == {"rng"}
    assert [chunk.rank for chunk in index.chunks("same")] == [0, 1]


def test_an_index_without_the_later_columns_says_that_it_cannot_tell() -> None:
    builder = IndexBuilder()
    builder.add(columns_of(examples.shard_header()))
    content = builder.content()
    content.sharded = content.hidden = content.partial = None
    index = Index(content)
    assert index.partial is None
    assert [chunk.sharded for chunk in index.chunks("embed.weight")] == [True]


def test_an_index_is_built_in_the_order_of_the_ranks() -> None:
    builder = IndexBuilder()
    builder.add(columns_of(examples.shard_header(rank=1)))
    with pytest.raises(ValueError, match="rank 0 comes after rank 1"):
        builder.add(columns_of(examples.shard_header(rank=0)))
