"""Is every malformed file refused with the named error, its path in it, and without much memory?"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from ckptengine.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError
from ckptengine.format.index import decode_index
from ckptengine.format.limits import MAX_MANIFEST_NBYTES
from ckptengine.format.manifest import decode_manifest
from ckptengine.format.shard import PREFIX_NBYTES, decode_header, header_nbytes
from tests.format import examples
from tests.format.abuse import ABUSE, COMPRESSED_ABUSE, Abuse

PATH = "step-0000001000/some/file"

SOUND: dict[str, bytes] = {
    "header": examples.sealed_header(),
    "compressed": examples.sealed_header(codec="zstd"),
    "manifest": examples.manifest_bytes(),
    "index": examples.index_bytes(),
}
PLAIN: dict[str, bytes] = {
    "header": examples.plain_header(),
    "compressed": examples.plain_header("zstd"),
    "manifest": examples.plain_manifest(),
    "index": examples.plain_index(),
}
DECODE: dict[str, Callable[[bytes], Any]] = {
    "header": lambda data: decode_header(data, path=PATH),
    "compressed": lambda data: decode_header(data, path=PATH),
    "manifest": lambda data: decode_manifest(data, path=PATH),
    "index": lambda data: decode_index(data, path=PATH),
}


def cases() -> list[Any]:
    compressed = [abuse for abuse in ABUSE if abuse.target == "header"] + COMPRESSED_ABUSE
    return [
        *(pytest.param(abuse.target, abuse, id=str(abuse)) for abuse in ABUSE),
        *(pytest.param("compressed", abuse, id=f"compressed {abuse}") for abuse in compressed),
    ]


@pytest.mark.parametrize("kind", SOUND)
def test_sound_examples_are_accepted(kind: str) -> None:
    DECODE[kind](SOUND[kind])
    DECODE[kind](PLAIN[kind])


@pytest.mark.parametrize(("kind", "abuse"), cases())
def test_malformed_file_is_refused_by_name(kind: str, abuse: Abuse) -> None:
    data = abuse.mutate(SOUND[kind])
    assert data != SOUND[kind]
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            DECODE[kind](data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert type(caught.value) is abuse.error
    assert caught.value.path == PATH
    assert PATH in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert peak < 16_000_000 + 20 * len(data)


@pytest.mark.parametrize(("kind", "abuse"), cases())
def test_corpus_holds_for_plain_files_too(kind: str, abuse: Abuse) -> None:
    with pytest.raises(abuse.error):
        DECODE[kind](abuse.mutate(PLAIN[kind]))


def test_names_of_the_corpus_are_unique() -> None:
    names = [str(abuse) for abuse in ABUSE]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", ["manifest", "index"])
@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF])
def test_every_flipped_byte_is_detected(kind: str, mask: int) -> None:
    sound = SOUND[kind]
    for at in range(len(sound)):
        data = bytearray(sound)
        data[at] ^= mask
        with pytest.raises((CorruptCheckpointError, UnsupportedFormatError)):
            DECODE[kind](bytes(data))


@pytest.mark.parametrize("kind", ["header", "compressed"])
@pytest.mark.parametrize("mask", [0x01, 0x04, 0x20, 0x80])
def test_flipped_header_byte_is_never_another_exception(kind: str, mask: int) -> None:
    """A header has no digest in itself: what flips go unnoticed here, the manifest's digest catches."""
    sound = SOUND[kind]
    for at in range(len(sound.rstrip(b" ")) + 2):
        data = bytearray(sound)
        data[at] ^= mask
        with suppress(CorruptCheckpointError, UnsupportedFormatError):
            DECODE[kind](bytes(data))


@pytest.mark.parametrize("kind", SOUND)
def test_cut_anywhere_is_detected(kind: str) -> None:
    sound = SOUND[kind]
    for at in range(0, len(sound), 7):
        with pytest.raises(CorruptCheckpointError):
            DECODE[kind](sound[:at])


@pytest.mark.parametrize("kind", ["header", "compressed"])
def test_hostile_length_is_refused_before_the_header_is_read(kind: str) -> None:
    at = 8 if kind == "compressed" else 0
    for n in (0, 1, 2**32, 2**63, 2**64 - 8):
        prefix = SOUND[kind][:at] + n.to_bytes(8, "little") + bytes(8)
        with pytest.raises(CorruptCheckpointError, match=PATH):
            header_nbytes(prefix[:PREFIX_NBYTES], PATH)


@pytest.mark.parametrize(("kind", "stored"), [("header", 12288), ("compressed", 4096 + 4096 + 4096)])
def test_file_size_other_than_the_headers_is_refused(kind: str, stored: int) -> None:
    data = SOUND[kind]
    decode_header(data, path=PATH, file_nbytes=len(data) + stored)
    for nbytes in (0, len(data), len(data) + stored - 1, len(data) + stored + 1, len(data) + stored + 4096):
        with pytest.raises(CorruptCheckpointError, match=PATH):
            decode_header(data, path=PATH, file_nbytes=nbytes)


def test_manifest_above_the_limit_is_refused_before_it_is_parsed() -> None:
    class Large(bytes):
        def __len__(self) -> int:
            return MAX_MANIFEST_NBYTES + 1

    with pytest.raises(CorruptCheckpointError, match=PATH):
        decode_manifest(Large(), path=PATH)
