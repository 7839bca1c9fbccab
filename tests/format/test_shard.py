"""Does a header come back as it was, keep its size while digests are pending, and read as safetensors?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.format.blocks import AS_IT_IS
from ckptengine.format.digest import DIGEST_NBYTES, digest
from ckptengine.format.geometry import Chunk
from ckptengine.format.shard import (
    PREFIX_NBYTES,
    ShardHeader,
    TensorEntry,
    ViewEntry,
    decode_header,
    encode_header,
    header_nbytes,
    seal_header,
    tensor_spans,
)
from tests.format import examples
from tests.format.strategies import few, shard_headers

PATH = "shard-00000.safetensors"


Sealed = tuple[bytes, list[bytes], list[int] | None, str | None]


def sealed(header: ShardHeader, seed: int = 0) -> Sealed:
    """The header's bytes, and the digests, stored lengths and methods in it."""
    template = encode_header(header)
    digests = [digest(bytes([seed, i % 256])) for i in range(template.n_blocks)]
    stored = methods = None
    if header.codec == "zstd":
        spans = [header.blocks.span(i) for i in range(template.n_blocks)]
        stored = [stop - start - (seed + i) % (stop - start) for i, (start, stop) in enumerate(spans)]
        methods = "".join(
            AS_IT_IS if length == stop - start else "1248"[(seed + i) % 4]
            for i, (length, (start, stop)) in enumerate(zip(stored, spans, strict=True))
        )
    return seal_header(template, digests, stored, methods), digests, stored, methods


@few
@given(shard_headers(), st.integers(0, 255))
def test_header_comes_back_with_its_digests(header: ShardHeader, seed: int) -> None:
    template = encode_header(header)
    data, digests, stored, methods = sealed(header, seed)
    assert len(data) == template.nbytes
    assert header_nbytes(data[:PREFIX_NBYTES], PATH) == len(data)
    assert decode_header(data, path=PATH) == replace(
        header,
        digests=b"".join(digests),
        stored_nbytes=None if stored is None else tuple(stored),
        methods=methods,
        header_nbytes=len(data),
    )


@few
@given(shard_headers())
def test_decoded_header_encodes_to_the_same_bytes(header: ShardHeader) -> None:
    data, *filled = sealed(header)
    again = encode_header(decode_header(data, path=PATH))
    assert seal_header(again, *filled) == data


@few
@given(shard_headers())
def test_header_starts_the_data_on_a_page_and_is_padded_with_spaces(header: ShardHeader) -> None:
    data, *_ = sealed(header)
    assert len(data) % 4096 == 0
    at = 16 if header.codec == "zstd" else 8
    assert int.from_bytes(data[at - 8 : at], "little") == len(data) - at
    outer = json.loads(data[at:])
    assert next(iter(outer)) == "__metadata__"
    assert data == data.rstrip(b" ").ljust(len(data), b" ")


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_example_with_everything_comes_back(codec: str) -> None:
    data = examples.sealed_header(codec=codec)
    header = decode_header(data, path=PATH)
    assert replace(
        header, digests=b"", stored_nbytes=None, methods=None, header_nbytes=0
    ) == examples.shard_header(codec=codec)
    assert header.leaf_names[0] == "embed.weight"
    assert header.leaf_names[-1] == "norm.weight"
    assert header.blocks.count == 3
    assert header.block_digest(2) == digest(examples.shard_data()[8192:])
    assert header.tensors[1].nbytes == 20


def test_twenty_thousand_tensors_come_back() -> None:
    tensors = tuple(
        TensorEntry(
            f"layers.{i}.weight", "float32", (2, 4), 32 * i, 32 * i + 32, Chunk((4, 4), (2, 0), (2, 4))
        )
        for i in range(20_000)
    )
    header = replace(
        examples.shard_header(),
        tensors=tensors,
        views=(),
        replicas={},
        data_nbytes=157 * 4096,
        tree={t.name: {"$": "t", "i": i} for i, t in enumerate(tensors)},
    )
    data, *_ = sealed(header)
    assert decode_header(data, path=PATH).tensors == tensors


def test_foreign_spelling_of_the_same_json_is_accepted() -> None:
    """Spaces, escapes and another order of keys mean the same to any JSON reader."""
    data = examples.sealed_header()
    outer = json.loads(data[8:])
    metadata = outer.pop("__metadata__")
    text = json.dumps(outer | {"__metadata__": metadata | {"other tool's": "note"}}, indent=1).encode()
    n = -(-(8 + len(text)) // 4096) * 4096 - 8
    foreign = n.to_bytes(8, "little") + text.ljust(n)
    assert replace(decode_header(foreign, path=PATH), header_nbytes=0) == replace(
        decode_header(data, path=PATH), header_nbytes=0
    )


def test_metadata_key_inside_a_name_or_value_does_not_misplace_the_digests() -> None:
    trap = '"ckptengine.digests":"'
    header = replace(
        examples.shard_header(),
        tensors=(TensorEntry(trap, "uint8", (4096,), 0, 4096, placement=trap),),
        views=(ViewEntry("\\" + trap, trap, 0, "uint8", (1,)),),
        replicas={trap + "\\": 1},
        data_nbytes=4096,
        tree={trap: trap, "\\" + trap: {"$": "t", "i": 0}},
    )
    data, digests, *_ = sealed(header)
    assert decode_header(data, path=PATH) == replace(
        header, digests=b"".join(digests), header_nbytes=len(data)
    )


def test_seal_refuses_digests_that_do_not_fit() -> None:
    raw, compressed = (
        encode_header(examples.shard_header()),
        encode_header(examples.shard_header(codec="zstd")),
    )
    good = [bytes(DIGEST_NBYTES)] * 3
    seal_header(raw, good)
    seal_header(compressed, good, [1, 1, 1], "012")
    for template, digests, stored, methods in (
        (raw, good[:2], None, None),
        (raw, [*good[:2], b"short"], None, None),
        (raw, good, [1, 1, 1], None),
        (raw, good, None, "000"),
        (raw, good, [1, 1, 1], "000"),
        (compressed, good, None, None),
        (compressed, good, [1, 1, 1], None),
        (compressed, good, None, "111"),
        (compressed, good, [1, 1], "111"),
        (compressed, good, [1, 1, 0], "111"),
        (compressed, good, [1, 1, 2**32], "111"),
        (compressed, good, [1, 1, 1], "11"),
        (compressed, good, [1, 1, 1], "1111"),
        (compressed, good, [1, 1, 1], "113"),
    ):
        with pytest.raises(ValueError):
            seal_header(template, digests, stored, methods)


def test_compressed_header_of_before_byte_planes_says_by_its_lengths_what_is_compressed() -> None:
    data = examples.sealed_header(codec="zstd")
    outer = json.loads(data[16:])
    assert outer["__metadata__"].pop("ckptengine.methods") == "102"
    text = json.dumps(outer).encode().ljust(len(data) - 16)
    header = decode_header(data[:8] + len(text).to_bytes(8, "little") + text, path=PATH)
    assert header.stored_nbytes == (300, 4096, 5)
    assert header.methods == "101"


@few
@given(shard_headers())
def test_template_tells_what_lies_where(header: ShardHeader) -> None:
    spans = tensor_spans(encode_header(header))
    assert spans == [(t.name, t.dtype, t.start, t.stop) for t in header.tensors]


def tensor(**changes: Any) -> TensorEntry:
    return msgspec.structs.replace(TensorEntry("t", "uint8", (4096,), 0, 4096), **changes)


def view(**changes: Any) -> ViewEntry:
    return msgspec.structs.replace(ViewEntry("v", "t", 0, "uint8", (1,)), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": (tensor(name="__pad__.0"),)}, "reserved"),
        ({"tensors": (tensor(name="__metadata__"),)}, "reserved"),
        ({"views": (view(name="__pad__.x"),)}, "reserved"),
        ({"replicas": {"__metadata__": 1}}, "reserved"),
        ({"views": (view(name="t"),)}, "same name"),
        ({"replicas": {"t": 1}}, "same name"),
        ({"tensors": (tensor(shape=(2048,), stop=2048), tensor(start=2048, shape=(2048,)))}, "same name"),
        ({"tensors": (tensor(dtype="float33"),)}, "unknown dtype"),
        ({"tensors": (tensor(shape=(4095,)),)}, "has 4095 bytes"),
        (
            {"tensors": (tensor(stop=4095, shape=(4095,)), tensor(name="u", start=4000, shape=(96,)))},
            "overlap",
        ),
        ({"tensors": (tensor(start=1, stop=4089, dtype="float64", shape=(511,)),)}, "must not start"),
        ({"tensors": ()}, "data section"),
        ({"data_nbytes": 8192}, "data section"),
        ({"data_nbytes": 4097}, "multiple"),
        ({"block_nbytes": 5}, "multiple"),
        ({"block_nbytes": 1 << 32}, "4 GiB"),
        ({"codec": "lzma"}, "codec"),
        ({"step": -1}, "step"),
        ({"step": 2**63}, "step"),
        ({"rank": 2}, "rank 2"),
        ({"run": "x"}, "not of run"),
        ({"attempt": "x"}, "not an attempt"),
        ({"replicas": {"r": 0}}, "replica 'r'"),
        ({"tree": {"$": "t", "i": 1}}, "tensor 1 of 1"),
        ({"tree": {"a": float("nan")}}, "not finite"),
        ({"tree": {"a": object()}}, "not JSON"),
        ({"tensors": (tensor(name="\ud800"),)}, "surrogates"),
        ({"views": (view(of="u"),)}, "no tensor 'u'"),
        ({"views": (view(byte_offset=4096),)}, "not in 't'"),
    ],
)
def test_header_that_breaks_a_rule_is_not_written(changes: dict[str, Any], message: str) -> None:
    sound = replace(
        examples.shard_header(), tensors=(tensor(),), views=(), replicas={}, data_nbytes=4096, tree=None
    )
    encode_header(sound)
    with pytest.raises(ValueError, match=message):
        encode_header(replace(sound, **changes))


def test_header_above_the_limit_is_not_written() -> None:
    header = replace(examples.shard_header(), tree="x" * 100_000_001)
    with pytest.raises(ValueError, match="keep large values"):
        encode_header(header)


@pytest.fixture
def raw_shard(tmp_path: Path) -> Path:
    path = tmp_path / PATH
    path.write_bytes(examples.sealed_header() + examples.shard_data())
    return path


def test_raw_shard_is_read_by_safetensors(raw_shard: Path) -> None:
    data = examples.shard_data()
    with safetensors.safe_open(raw_shard, "np") as f:
        assert f.metadata()["ckptengine.format"] == "1"
        assert {"embed.weight", "flat", "channels_last", "fourier", "empty", "scalar", "table", "blob"} < set(
            f.keys()
        )
        flat = f.get_tensor("flat")
        assert flat.tobytes() == data[64:84]
        assert flat.shape == (5,)
        assert f.get_tensor("channels_last").shape == (1, 2, 3, 4)
        assert f.get_tensor("empty").shape == (0, 7)
        assert f.get_tensor("scalar") == np.frombuffer(data[256:264], "<i8")[0]
        assert f.get_tensor("fourier").tobytes() == data[192:256]
        assert f.get_tensor("blob").tobytes() == data[288:9288]


def test_raw_shard_is_read_by_safetensors_for_torch(raw_shard: Path) -> None:
    import torch

    with safetensors.safe_open(raw_shard, "pt") as f:
        embed = f.get_tensor("embed.weight")
    assert embed.dtype == torch.bfloat16
    assert embed.shape == (4, 8)
    assert embed.view(torch.uint8).numpy().tobytes() == examples.shard_data()[:64]


@few
@given(shard_headers().filter(lambda header: header.codec == "raw"))
def test_safetensors_sees_every_tensor_where_it_lies(header: ShardHeader) -> None:
    data, *_ = sealed(header)
    section = np.arange(header.data_nbytes, dtype=np.uint32).astype(np.uint8).tobytes()
    found = dict(safetensors.deserialize(data + section))
    for entry in header.tensors:
        assert bytes(found[entry.name]["data"]) == section[entry.start : entry.stop]
    assert len(found) == len(header.tensors) + sum(name.startswith("__pad__.") for name in found)


def test_unfinished_or_compressed_shard_is_refused_by_safetensors() -> None:
    nbytes = len(examples.sealed_header())
    for head in (bytes(nbytes), examples.sealed_header(codec="zstd")):
        with pytest.raises(safetensors.SafetensorError):
            safetensors.numpy.load(head + examples.shard_data())
