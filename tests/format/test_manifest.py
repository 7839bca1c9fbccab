"""Does a manifest come back as it was, read well, and carry its own fingerprint?"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from ckptengine.format.digest import hexdigest
from ckptengine.format.manifest import IndexRef, Manifest, decode_manifest, encode_manifest
from tests.format import examples
from tests.format.strategies import few, manifests

PATH = "step-0000001000/MANIFEST.json"


@few
@given(manifests())
def test_manifest_comes_back_with_its_fingerprint(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    decoded = decode_manifest(data, path=PATH)
    assert decoded == replace(manifest, fingerprint=decoded.fingerprint)
    assert encode_manifest(decoded) == data


@few
@given(manifests())
def test_any_json_reader_sees_the_same(manifest: Manifest) -> None:
    value = json.loads(encode_manifest(manifest))
    assert value["format"] == "ckptengine"
    assert value["version"] == 1
    assert value["metadata"] == manifest.metadata
    assert [shard["path"] for shard in value["shards"]] == [shard.path for shard in manifest.shards]


def test_fingerprint_is_over_all_before_the_ending() -> None:
    data = examples.manifest_bytes()
    body, ending = data.split(b',\n  "digest": "')
    assert ending == hexdigest(body).encode() + b'"\n}\n'
    assert decode_manifest(data, path=PATH).fingerprint == hexdigest(body)


def test_text_is_for_people() -> None:
    lines = examples.manifest_bytes().decode().splitlines()
    assert lines[:5] == [
        "{",
        '  "format": "ckptengine",',
        '  "version": 1,',
        '  "features": [],',
        '  "step": 1000,',
    ]
    assert [line.startswith('    {"rank": ') for line in lines].count(True) == 2
    assert '    "note": "a “quoted”\\nnote",' in lines
    assert lines[-2].startswith('  "digest": "')


def test_changed_metadata_changes_the_fingerprint() -> None:
    one = decode_manifest(encode_manifest(examples.manifest()), path=PATH)
    other = decode_manifest(encode_manifest(replace(examples.manifest(), metadata={"note": "b"})), path=PATH)
    assert one.fingerprint != other.fingerprint


def change_shard(i: int, **changes: Any) -> dict[str, Any]:
    shards = list(examples.manifest().shards)
    shards[i] = replace(shards[i], **changes)
    return {"shards": tuple(shards)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": ("parity",)}, "unknown features"),
        ({"created": float("nan")}, "created"),
        ({"created": float("inf")}, "created"),
        ({"step": -1}, "step"),
        ({"attempt": "x"}, "not an attempt"),
        ({"run": "x"}, "not of run"),
        ({"world_size": 3}, "shards"),
        ({"world_size": 2**40}, "shards"),
        ({"codec": "lzma"}, "codec"),
        ({"codec": "zstd"}, "ckptz"),
        ({"block_nbytes": 1}, "block_nbytes"),
        ({"nbytes": 1}, "sum"),
        ({"tensors": -1}, "tensors"),
        ({"metadata": {"$": "t", "i": 0}}, "metadata"),
        ({"metadata": object()}, "metadata"),
        ({"index": IndexRef(0, "0" * 32)}, "index"),
        ({"index": IndexRef(5, "0")}, "index"),
        (change_shard(0, path="../x.safetensors"), "lead out"),
        (change_shard(1, path=examples.manifest().shards[0].path), "same shard"),
        (change_shard(1, rank=0), "in order"),
        (change_shard(1, header_digest="A" * 32), "digest"),
        (change_shard(1, header_nbytes=4095), "bytes"),
        (change_shard(1, header_nbytes=20480), "bytes"),
    ],
)
def test_manifest_that_breaks_a_rule_is_not_written(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_manifest(replace(examples.manifest(), **changes))
