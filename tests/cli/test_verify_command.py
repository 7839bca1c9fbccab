"""Does `ckpt verify` name all damage, and say what to do next?"""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.helpers.checkpoints import flip, write_checkpoint
from tests.helpers.privileges import modes_bind_root

ATTEMPT = "a000001-18c0de000000-0123abcd-000001.0"


@pytest.mark.parametrize("level", ["sizes", "structure", "data"])
def test_a_sound_checkpoint_is_good(ckpt: Run, root: Path, level: str) -> None:
    found = ckpt("verify", root, "--level", level)
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("step 100: ok\n")
    assert f"level {level}" in found.out


def test_every_damaged_block_is_named_with_its_tensors(ckpt: Run, root: Path) -> None:
    shard = root / "step-0000000020" / ATTEMPT / "shard-00001.safetensors"
    flip(shard, 4096 + 1)
    flip(shard, 8192 + 1)
    found = ckpt("verify", root / "step-0000000020")
    assert found.code == 3
    lines = found.out.splitlines()
    assert lines[0] == "step 20: damaged"
    assert f"rank 1, {ATTEMPT}/shard-00001.safetensors, block 0, offset 4096 (4096 bytes)" in found.out
    assert f"rank 1, {ATTEMPT}/shard-00001.safetensors, block 1, offset 8192 (4096 bytes)" in found.out
    assert "tensors: embed.weight, flat, head.weight" in found.out
    assert lines[-1].startswith("2 damaged places in 1 step. There is no older step to restore")
    document = ckpt("verify", root / "step-0000000020", "--json").json
    assert document["ok"] is False
    assert [(d["rank"], d["block"], d["offset"]) for d in document["reports"][0]["damages"]] == [
        (1, 0, 4096),
        (1, 1, 8192),
    ]


def test_lower_levels_read_less(ckpt: Run, root: Path) -> None:
    flip(root / "step-0000000020" / ATTEMPT / "shard-00001.safetensors", 4096 + 1)
    step = root / "step-0000000020"
    assert ckpt("verify", step, "--level", "structure").code == 0
    assert ckpt("verify", step, "--level", "data").code == 3


def test_all_checks_every_committed_step_and_advises_a_sound_one(ckpt: Run, root: Path) -> None:
    shard = next((root / "step-0000000100").glob("a*/shard-00000.ckptz"))
    flip(shard, shard.stat().st_size - 3)
    found = ckpt("verify", root, "--all")
    assert found.code == 3
    assert [line for line in found.out.splitlines() if line.startswith("step ")] == [
        "step 20: ok",
        "step 100: damaged",
    ]
    assert found.out.splitlines()[-1] == (
        "1 damaged place in 1 step. "
        "Next: restore step 20, which is sound, or copy them again if another copy exists."
    )
    last = ckpt("verify", root).out.splitlines()[-1]
    assert "Next: restore step 20, after `ckpt verify` has checked it" in last
    assert [report["step"] for report in ckpt("verify", root, "--all", "--json").json["reports"]] == [20, 100]


def test_a_damaged_manifest_is_damage(ckpt: Run, root: Path) -> None:
    flip(root / "step-0000000100" / "MANIFEST.json", 40)
    found = ckpt("verify", root)
    assert found.code == 3
    assert found.out.startswith("unknown step: damaged\n")
    assert "MANIFEST.json" in found.out


@pytest.mark.parametrize(
    ("path", "code", "kind"),
    [("nowhere", 5, "not_found"), ("step-0000000300", 4, "not_committed"), (".", 0, None)],
)
def test_exit_codes(ckpt: Run, root: Path, path: str, code: int, kind: str | None) -> None:
    found = ckpt("verify", root / path, "--json")
    assert found.code == code
    assert found.json.get("error", {}).get("kind") == kind


def test_all_of_a_root_without_commits(ckpt: Run, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, commit=False)
    assert ckpt("verify", tmp_path).code == 4
    assert ckpt("verify", tmp_path, "--all").code == 4


def test_a_newer_format_is_unsupported(ckpt: Run, root: Path) -> None:
    manifest = root / "step-0000000100" / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    assert ckpt("verify", root).code == 6


def test_an_unknown_level_is_wrong_usage(ckpt: Run, root: Path) -> None:
    found = ckpt("verify", root, "--level", "everything")
    assert (found.code, found.out) == (2, "")
    assert "everything" in found.err


# --- what is not damage ------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["a*/shard-00001*", "a*", "INDEX"])
def test_what_may_not_be_read_is_not_damaged(ckpt: Run, root: Path, what: str) -> None:
    (path,) = (root / "step-0000000100").glob(what)
    mode = stat.S_IMODE(path.stat().st_mode)
    path.chmod(0)
    try:
        with modes_bind_root():
            found = ckpt("verify", root)
    finally:
        path.chmod(mode)
    assert (found.code, found.out) == (1, "")
    assert found.err.startswith("ckpt: could not ")
    assert "Permission denied" in found.err
    assert str(path) in found.err
    assert "check the owner and mode" in found.err
    assert found.err.count("\n") == 1


@pytest.mark.parametrize("content", [None, b"garbage"])
def test_a_step_with_a_bad_index_restores_whole(ckpt: Run, root: Path, content: bytes | None) -> None:
    index = root / "step-0000000100" / "INDEX"
    index.unlink()
    if content is not None:
        index.write_bytes(content)
    found = ckpt("verify", root)
    assert found.code == 3
    assert found.out.splitlines()[-1] == (
        "1 damaged place in 1 step. The step restores whole: INDEX only repeats the shards' headers, and is "
        "rebuilt from them when it is needed. Committing the step again replaces it."
    )
    last = ckpt("verify", root, "--level", "sizes").out.splitlines()
    if content is None:
        assert "As far as level sizes tells, the step restores whole" in last[-1]


def test_a_step_with_a_bad_index_is_better_than_a_damaged_one(ckpt: Run, root: Path) -> None:
    (root / "step-0000000020" / "INDEX").unlink()
    next((root / "step-0000000100").glob("a*/shard-00000*")).unlink()
    last = ckpt("verify", root, "--all").out.splitlines()[-1]
    assert "Next: restore step 20, of which only INDEX is damaged, or copy" in last


# --- paths that are something else -------------------------------------------------------------------


def test_all_of_one_step_is_that_step(ckpt: Run, root: Path) -> None:
    step = root / "step-0000000020"
    found = ckpt("verify", step, "--all")
    assert (found.code, found.out.splitlines()[0]) == (0, "step 20: ok")
    assert found.err == f"note: {step} is one step; for all, give its root: {root}\n"
    assert ckpt("verify", step / "MANIFEST.json", "--all").code == 0
    assert ckpt("verify", root / "step-0000000300", "--all").code == 4


@pytest.mark.parametrize("more", [[], ["--all"]])
def test_a_single_shard_is_not_a_checkpoint(ckpt: Run, root: Path, tmp_path: Path, more: list[str]) -> None:
    step = root / "step-0000000100"
    shard = next(step.glob("a*/shard-00001*"))
    found = ckpt("verify", shard, *more)
    assert (found.code, found.out) == (5, "")
    assert "it is a single shard, not a checkpoint" in found.err
    assert found.err.endswith(f"; give its step: {step}\n")
    alone = shard.rename(tmp_path / shard.name)
    assert "give the directory of the step it is of" in ckpt("verify", alone, *more).err
