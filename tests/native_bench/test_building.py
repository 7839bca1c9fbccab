"""Are the native programs always those of the sources as they are?"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from native_bench import building
from native_bench.building import Build, BuildError, ToolMissing

# The first test to ask for the programs waits until they are compiled.
pytestmark = pytest.mark.timeout(300)

CMAKE = """\
cmake_minimum_required(VERSION 3.20)
project(small LANGUAGES CXX)
add_executable(small src/small.cpp)
file(WRITE ${CMAKE_BINARY_DIR}/features.json [=[%s]=])
"""
FEATURES = {
    "compiler": "c++",
    "build_type": "Release",
    "liburing": True,
    "libxxhash": False,
    "libzstd": True,
    "programs": ["small"],
}


@pytest.fixture
def source(programs: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one program, in place of the real one."""
    root = tmp_path / "source"
    (root / "src").mkdir(parents=True)
    (root / "CMakeLists.txt").write_text(CMAKE % json.dumps(FEATURES))
    write(root, 1)
    monkeypatch.setattr(building, "SOURCE", root)
    return root


def write(root: Path, answer: int) -> Path:
    path = root / "src" / "small.cpp"
    path.write_text(f"int main() {{ return {answer}; }}\n")
    return path


def answer(build: Build) -> int:
    return subprocess.run([build.directory / "small"], check=False).returncode


def test_a_changed_source_is_built_again(source: Path, tmp_path: Path) -> None:
    first = building.build(tmp_path / "build")
    assert answer(first) == 1
    assert building.build(tmp_path / "build") is first, "nothing changed"
    changed = write(source, 2)
    os.utime(changed, (0, 0))  # older than the program: as when another revision is unpacked
    assert answer(building.build(tmp_path / "build")) == 2


def test_another_process_finds_the_change(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    building.build(tmp_path / "build")
    monkeypatch.setattr(building, "_built", {})
    os.utime(write(source, 3), (0, 0))
    assert answer(building.build(tmp_path / "build")) == 3


def test_a_removed_program_is_built_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(building.build(tmp_path / "build").directory)
    assert answer(building.build(tmp_path / "build")) == 1


def test_a_copied_build_directory_is_made_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    building.build(tmp_path / "build")
    other = tmp_path / "other"
    shutil.copytree(source, other)
    write(other, 4)
    monkeypatch.setattr(building, "SOURCE", other)
    assert answer(building.build(tmp_path / "build")) == 4


def test_options_are_those_of_the_last_time(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "src" / "small.cpp").write_text("int main() { return A; }\n")
    with open(source / "CMakeLists.txt", "a") as lists:
        lists.write("target_compile_definitions(small PRIVATE A=${A})\n")
    assert answer(building.build(tmp_path / "build", options=["-DA=6"])) == 6
    monkeypatch.setattr(building, "_built", {})
    assert answer(building.build(tmp_path / "build")) == 6
    assert answer(building.build(tmp_path / "build", options=["-DA=7"])) == 7


@pytest.mark.parametrize("stamp", [b"", b'{"sources": "', b"\xff", b"[]"])
def test_a_stamp_that_was_half_written_makes_it_build_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stamp: bytes
) -> None:
    directory = tmp_path / "build"
    building.build(directory)
    (directory / ".made_from.json").write_bytes(stamp)
    monkeypatch.setattr(building, "_built", {})
    assert answer(building.build(directory)) == 1


def test_a_compiler_error_is_shown(source: Path, tmp_path: Path) -> None:
    (source / "src" / "small.cpp").write_text("int main() { return undeclared; }\n")
    with pytest.raises(BuildError, match=r"cmake could not build the native programs[\s\S]*undeclared"):
        building.build(tmp_path / "build")
    write(source, 5)
    assert answer(building.build(tmp_path / "build")) == 5


def test_what_is_missing_is_named_with_its_package(source: Path, tmp_path: Path) -> None:
    made = building.build(tmp_path / "build")
    assert made.missing_libraries == {"libxxhash": "libxxhash-dev"}
    assert made.why_missing("small") is None
    assert "apt-get install libxxhash-dev" in (made.why_missing("xxh3_128") or "")


@pytest.mark.parametrize(
    ("present", "advice"),
    [
        ([], "pip install cmake"),
        (["cmake"], "apt-get install make"),
        (["cmake", "make"], r"apt-get install g\+\+"),
    ],
)
def test_a_missing_tool_is_told_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: list[str], advice: str
) -> None:
    for name in present:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", " ")  # as good as none
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ToolMissing, match=advice):
        building.build(tmp_path / "build")


def test_a_directory_that_cannot_be_written_is_told(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match=r"cannot build in .*/file/build: Not a directory"):
        building.build(tmp_path / "file" / "build")
