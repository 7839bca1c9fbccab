"""What is built where there is a C compiler, and where there is none? From a copy, and without a network."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="builds the package: needs hatchling (pip install -e '.[dev]')")

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore", "ckptengine")
LIBRARY = "ckptengine/storage/libstreaming.so"
SOURCE = "ckptengine/storage/streaming.c"
COMPILER = (os.environ.get("CC") or "cc").split()[0]

pytestmark = pytest.mark.skipif(
    not (ROOT / SOURCE).exists(), reason="tests an installed package: there is no checkout to build"
)
compiles = pytest.mark.skipif(
    shutil.which(COMPILER) is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="needs a C compiler, and x86-64",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy, in which an earlier build left a library that is no good."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, copy / name)
    (copy / LIBRARY).write_bytes(b"stale")
    return copy


def built(checkout: Path, target: str, **environment: str) -> tuple[Path, str]:
    """The wheel or sdist, and what the build said."""
    into = checkout.parent / "dist"
    shutil.rmtree(into, ignore_errors=True)
    if target == "editable":
        code = f"import hatchling.build as b, os; os.mkdir({str(into)!r}); b.build_editable({str(into)!r})"
        command = [sys.executable, "-c", code]
    else:
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    done = subprocess.run(
        command,
        cwd=checkout,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (file,) = into.iterdir()
    assert not list(checkout.glob(".streaming-*")), "nothing is left behind"
    return file, done.stdout


def status_of(path: Path) -> str:
    """What the package in this directory says of its helper, which it has used."""
    code = (
        "import ctypes\n"
        "from ckptengine.storage import memcopy, streaming\n"
        "to, of = ctypes.create_string_buffer(70000), ctypes.create_string_buffer(b'x' * 70000, 70000)\n"
        "memcopy.copy_all([ctypes.addressof(to), ctypes.addressof(of), 70000], 1)\n"
        "assert to.raw == of.raw\n"
        f"assert streaming.__file__.startswith({str(path)!r})\n"
        "print(streaming.status)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "CKPTENGINE_STREAMING"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,
        env={**environment, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def unpacked(wheel: Path, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into)
    return into


@compiles
def test_a_wheel_carries_the_helper_for_its_platform_and_any_python(checkout: Path, tmp_path: Path) -> None:
    wheel, said = built(checkout, "wheel")
    assert "without its compiled helper" not in said
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    site = unpacked(wheel, tmp_path / "site")
    names = [str(path.relative_to(site)) for path in site.rglob("*")]
    assert names.count(LIBRARY) == 1
    assert SOURCE in names, "by which it is told whether the library is stale"
    (metadata,) = site.glob("*.dist-info/WHEEL")
    assert "Root-Is-Purelib: false" in metadata.read_text()
    assert status_of(site) == "loaded"
    assert (checkout / LIBRARY).read_bytes() == b"stale", "a build leaves its sources as they are"


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("false", "failed with 1"),
        ("no-such-compiler", "there is no C compiler"),
        ("", "there is no C compiler"),
        ("true", "cannot be loaded"),
        pytest.param("cc -D__builtin_ia32_movntdq(to,value)", "does not copy right", marks=compiles),
        pytest.param("cc -no-such-option", "failed with", marks=compiles),
    ],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere, no compiler is called")
def test_without_a_compiler_that_works_the_wheel_is_pure_and_works(
    checkout: Path, tmp_path: Path, compiler: str, why: str
) -> None:
    environment = {"CC": compiler} if compiler else {"CC": "", "PATH": ""}
    wheel, said = built(checkout, "wheel", **environment)
    assert wheel.name.endswith("-py3-none-any.whl")
    (line,) = [line for line in said.splitlines() if "without its compiled helper" in line]
    assert why in line
    assert "stall" in line
    site = unpacked(wheel, tmp_path / "site")
    assert not list(site.rglob("*.so"))
    assert status_of(site).startswith("not built")


@compiles
def test_an_editable_build_replaces_the_library_beside_the_source(checkout: Path) -> None:
    before = (checkout / LIBRARY).open("rb")  # as a process has that uses it
    with before:
        built(checkout, "editable")
        assert before.read() == b"stale", "it was not written to"
    assert status_of(checkout) == "loaded"
    with (checkout / SOURCE).open("a") as source:
        source.write("\n")
    assert status_of(checkout).startswith("stale")
    built(checkout, "editable")
    assert status_of(checkout) == "loaded"


@compiles
def test_the_sdist_has_what_it_takes_to_build_the_helper(checkout: Path, tmp_path: Path) -> None:
    sdist, _ = built(checkout, "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked_sdist,) = tmp_path.glob("ckptengine-*")
    assert not list(unpacked_sdist.rglob("*.so"))
    wheel, _ = built(unpacked_sdist, "wheel")
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()
