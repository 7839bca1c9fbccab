"""Does `ckpt list` show what is there, in order?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.helpers.checkpoints import flip, write_checkpoint


def test_steps_are_listed_as_numbers_oldest_first(ckpt: Run, root: Path) -> None:
    found = ckpt("list", root)
    assert (found.code, found.err) == (0, "")
    heading, *rows = found.out.splitlines()
    assert heading.split() == [
        "STEP",
        "DATE",
        "RANKS",
        "SIZE",
        "TENSORS",
        "CODEC",
        "ATTEMPT",
        "FINGERPRINT",
        "STATE",
    ]
    assert [row.split()[0] for row in rows] == ["20", "100", "300"]
    assert [row.split()[-1] for row in rows] == ["committed", "committed", "incomplete"]
    assert rows[0].split()[3:9] == ["2", "24.0", "KiB", "10", "raw", "1.1"]
    assert "zstd" in rows[1]


def test_the_json_document_has_all_of_it(ckpt: Run, root: Path) -> None:
    found = ckpt("list", "--json", root)
    assert found.code == 0
    first, second, third = found.json["steps"]
    manifest = json.loads((root / "step-0000000020" / "MANIFEST.json").read_text())
    assert found.json["root"] == str(root)
    assert first == {
        "step": 20,
        "path": str(root / "step-0000000020"),
        "state": "committed",
        "created": 1_700_000_000.0,
        "world_size": 2,
        "nbytes": manifest["nbytes"],
        "tensors": manifest["tensors"],
        "codec": "raw",
        "attempt": manifest["attempt"],
        "fingerprint": manifest["digest"],
    }
    assert second["codec"] == "zstd"
    assert third == {"step": 300, "path": str(root / "step-0000000300"), "state": "incomplete"}


def test_a_damaged_manifest_is_named_and_the_others_are_listed(ckpt: Run, root: Path) -> None:
    flip(root / "step-0000000020" / "MANIFEST.json", 40)
    found = ckpt("list", root)
    assert found.code == 3
    assert [row.split()[-1] for row in found.out.splitlines()[1:]] == ["damaged", "committed", "incomplete"]
    assert found.err.startswith("ckpt: step 20: ")
    assert str(root / "step-0000000020" / "MANIFEST.json") in found.err
    assert len(found.err.splitlines()) == 1


def test_a_newer_format_is_named_and_the_others_are_listed(ckpt: Run, root: Path) -> None:
    manifest = root / "step-0000000020" / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    found = ckpt("list", "--json", root)
    assert found.code == 6
    assert [step["state"] for step in found.json["steps"]] == ["unsupported", "committed", "incomplete"]
    assert "newer version" in found.json["steps"][0]["error"]


def test_an_empty_root_is_good_and_says_so(ckpt: Run, tmp_path: Path) -> None:
    found = ckpt("list", tmp_path)
    assert (found.code, found.out) == (0, "")
    assert found.err == f"no checkpoints in {tmp_path}: nothing was saved here yet\n"
    assert ckpt("list", "--json", tmp_path).json["steps"] == []


def test_a_missing_root_is_not_found(ckpt: Run, tmp_path: Path) -> None:
    found = ckpt("list", tmp_path / "nowhere")
    assert (found.code, found.out) == (5, "")
    assert str(tmp_path / "nowhere") in found.err
    found = ckpt("list", "--json", tmp_path / "nowhere")
    assert found.json["error"]["kind"] == "not_found"
    assert found.json["error"]["exit_code"] == found.code == 5


def test_a_file_is_not_a_root(ckpt: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert ckpt("list", tmp_path / "file").code == 5


def test_a_retry_shows_in_the_attempt(ckpt: Run, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5, save=7, retry=2)
    assert " 1.7.2 " in ckpt("list", tmp_path).out


def test_what_looks_like_a_step_and_is_none_is_named(ckpt: Run, root: Path) -> None:
    (root / "step-0000000400").symlink_to(root / "step-0000000100")
    (root / "step-0000000500").write_text("")
    (root / "step-600").mkdir()
    (root / "notes").mkdir()
    (root / "best").symlink_to(root / "step-0000000020")
    found = ckpt("list", root)
    assert found.code == 0
    assert [row.split()[0] for row in found.out.splitlines()[1:]] == ["20", "100", "300"]
    link, file, spelling = found.err.splitlines()
    assert link.startswith(f"note: {root / 'step-0000000400'} is ignored: it is a symbolic link")
    assert file.startswith(f"note: {root / 'step-0000000500'} is ignored: it is a file")
    assert spelling.startswith(f"note: {root / 'step-600'} is ignored: the name")
    ignored = ckpt("list", "--json", root).json["ignored"]
    assert [one["path"] for one in ignored] == [
        str(root / name) for name in ("step-0000000400", "step-0000000500", "step-600")
    ]
    assert link.endswith(ignored[0]["reason"])


def test_nothing_ignored_is_an_empty_list(ckpt: Run, root: Path) -> None:
    found = ckpt("list", "--json", root)
    assert (found.json["ignored"], found.err) == ([], "")


@pytest.mark.parametrize("step", ["step-0000000100", "step-0000000300"])
def test_a_step_is_not_a_root(ckpt: Run, root: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    found = ckpt("list", root / step)
    assert (found.code, found.out) == (5, "")
    assert "it is a step's directory, not a root" in found.err
    assert found.err.endswith(f"; list its root: ckpt list {root}\n")
    monkeypatch.chdir(root / step)
    assert ckpt("list", ".").err.endswith(f"; list its root: ckpt list {root}\n")


def test_a_copied_step_is_not_a_root_either(ckpt: Run, root: Path) -> None:
    (root / "step-0000000100").rename(root / "best")
    found = ckpt("list", root / "best")
    assert found.code == 5
    assert "`ckpt inspect` and `ckpt verify` take this one" in found.err


def test_a_root_may_be_named_like_a_step(ckpt: Run, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step-0000000001", 7)
    assert ckpt("list", tmp_path / "step-0000000001").out.splitlines()[1].split()[0] == "7"


def test_a_directory_of_other_things_has_no_checkpoints(ckpt: Run, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    found = ckpt("list", tmp_path)
    assert (found.code, found.out) == (0, "")
    assert found.err == f"no checkpoints in {tmp_path}: nothing that is in it is a step\n"
