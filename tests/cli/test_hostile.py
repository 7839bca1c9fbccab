"""Does every malformed file give the named exit code and one line, never a traceback, from every command?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptengine.cli.exit_codes import code_for
from ckptengine.format.digest import hexdigest
from ckptengine.format.manifest import IndexRef, decode_manifest
from ckptengine.read import tensors
from tests.cli.conftest import Outcome, Run
from tests.format.abuse import ABUSE, COMPRESSED_ABUSE, Abuse
from tests.helpers.checkpoints import rewrite_manifest, write_checkpoint

# The decoders are held to the whole corpus in tests/format; here every seventh case shows that what they
# raise ends well, and the slow tests go through all.
each = pytest.mark.parametrize(
    "each", [7, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)


def cases(target: str, each: int, corpus: Iterable[Abuse] = ABUSE) -> list[Abuse]:
    return [abuse for abuse in corpus if abuse.target == target][::each]


def expected(abuse: Abuse) -> int:
    return code_for(abuse.error(""))


def is_one_line(found: Outcome) -> bool:
    return found.out == "" and found.err.startswith("ckpt: ") and found.err.count("\n") == 1


def make_manifest_agree(step: Path) -> None:
    """The manifest names the damaged files as they are, as a hostile writer's would."""
    manifest = decode_manifest((step / "MANIFEST.json").read_bytes(), path="")
    refs = []
    for ref in manifest.shards:
        data = (step / ref.path).read_bytes()
        refs.append(replace(ref, size=len(data), header_digest=hexdigest(data[: ref.header_nbytes])))
    index = (step / "INDEX").read_bytes()
    rewrite_manifest(
        step,
        shards=tuple(refs),
        nbytes=sum(ref.size for ref in refs),
        index=IndexRef(len(index), hexdigest(index)) if index else None,
    )


@each
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_malformed_headers(ckpt: Run, tmp_path: Path, codec: str, each: int) -> None:
    step = write_checkpoint(tmp_path, 1, ranks=1, codec=codec)
    shard = next(step.glob("a*/shard-*"))
    manifest = step / "MANIFEST.json"
    sound, committed = shard.read_bytes(), manifest.read_bytes()
    corpus = cases("header", each, ABUSE if codec == "raw" else COMPRESSED_ABUSE)
    assert corpus
    for abuse in corpus:
        shard.write_bytes(abuse.mutate(sound[:4096]) + sound[4096:])
        alone = ckpt("inspect", shard)
        assert (alone.code, is_one_line(alone)) == (expected(abuse), True), f"{abuse}: {alone}"
        if shard.stat().st_size % 4096 == 0:
            make_manifest_agree(step)
            found = ckpt("verify", step)
            assert found.code in (3, 6), f"{abuse}: {found}"
            manifest.write_bytes(committed)
    found = ckpt("inspect", step)
    assert (found.code, is_one_line(found)) == (3, True)
    assert ckpt("list", tmp_path).code == 0


@each
def test_malformed_manifests(ckpt: Run, tmp_path: Path, each: int) -> None:
    step = write_checkpoint(tmp_path, 1)
    path = step / "MANIFEST.json"
    sound = path.read_bytes()
    for number, abuse in enumerate(cases("manifest", each)):
        path.write_bytes(abuse.mutate(sound))
        found = ckpt("inspect", [step, path, tmp_path][number % 3])
        assert (found.code, is_one_line(found)) == (expected(abuse), True), f"{abuse}: {found}"
        for args in (["list", tmp_path], ["verify", tmp_path, "--all"]):
            found = ckpt(*args)
            assert found.code == expected(abuse), f"{abuse}: {found}"
    assert ckpt("inspect", next(step.glob("a*/shard-00000*"))).code == 0


@each
@pytest.mark.parametrize("agreed", [False, True])
def test_a_malformed_index_is_found_and_done_without(
    ckpt: Run, tmp_path: Path, agreed: bool, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "HEADERS_UP_TO_NBYTES", 0)
    step = write_checkpoint(tmp_path, 1)
    path = step / "INDEX"
    # "own" differs between the ranks, which only the headers tell.
    options = ["inspect", step, "--filter", "[!o]*", "--json"]
    sound, shown = path.read_bytes(), ckpt(*options).json["tensors"]
    for abuse in cases("index", each):
        path.write_bytes(abuse.mutate(sound))
        if agreed:
            make_manifest_agree(step)
        assert ckpt(*options).json["tensors"] == shown, abuse
        found = ckpt("verify", step)
        assert found.code in (0, 3, 6), f"{abuse}: {found}"


@pytest.mark.parametrize("what", ["shard", "MANIFEST.json", "INDEX"])
@pytest.mark.parametrize("kind", ["gone", "empty", "directory", "link", "dangling", "loop", "fifo", "device"])
def test_the_wrong_kind_of_file(ckpt: Run, tmp_path: Path, what: str, kind: str) -> None:
    root = tmp_path / "root"
    step = write_checkpoint(root, 1)
    path = next(step.glob("a*/shard-00001*")) if what == "shard" else step / what
    outside = tmp_path / "outside"
    shutil.copy(path, outside)
    path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(outside)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    codes = {
        ckpt(*args).code
        for args in (["inspect", step], ["verify", step], ["verify", root, "--level", "sizes"])
    }
    wanted = {3} if what == "shard" else {3, 4, 5, 0} if what == "MANIFEST.json" else {0, 3}
    assert codes <= wanted
    assert ckpt("list", root).code in (0, 3)
    assert ckpt("inspect", path).code in (1, 3, 4, 5)


def test_a_shard_path_that_leads_out_is_refused(ckpt: Run, tmp_path: Path) -> None:
    root = tmp_path / "root"
    step = write_checkpoint(root, 1)
    attempt = next(step.glob("a*"))
    attempt.rename(tmp_path / "elsewhere")
    attempt.symlink_to(tmp_path / "elsewhere")
    found = ckpt("inspect", step)
    assert (found.code, is_one_line(found)) == (3, True)
    assert "leads out of the step directory" in found.err
    assert ckpt("verify", step).code == 3


def test_no_permission_is_a_failure(ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = write_checkpoint(tmp_path, 1)
    real = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if "shard-00001" in os.fsdecode(path if isinstance(path, (str, bytes)) else ""):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    found = ckpt("inspect", step)
    assert (found.code, is_one_line(found)) == (1, True)
    assert "shard-00001" in found.err
