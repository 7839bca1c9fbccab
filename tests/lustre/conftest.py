"""Where the tests for Lustre run: on a FUSE file system that answers as Lustre does, and with
`--lustre-root PATH` on a real one, too."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptengine.storage import linux, lustre
from tests.cli.conftest import ckpt as ckpt
from tests.helpers.fuse_lustre import Mounted, mounted, pretend
from tests.helpers.ranks import Ranks
from tests.lustre import cases


@dataclass(frozen=True)
class Place:
    """A directory on it. mount: where what goes wrong can be chosen; None on a real Lustre."""

    path: Path
    osts: int
    mount: Mounted | None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" in metafunc.fixturenames:
        places = ["fuse"]
        if metafunc.config.getoption("--lustre-root"):
            places.append(pytest.param("lustre", marks=pytest.mark.lustre))
        metafunc.parametrize("place", places, indirect=True, scope="package")


@pytest.fixture(scope="package")
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        if request.param == "fuse":
            mount = stack.enter_context(mounted(8))
            stack.callback(setattr, linux, "file_system_type", linux.file_system_type)
            pretend()
            yield Place(Path(mount.path), 8, mount)
            return
        root = request.config.getoption("--lustre-root")
        fd = os.open(root, os.O_RDONLY)
        try:
            assert lustre.is_lustre(fd), f"{root} is not on Lustre"
            osts = lustre.ost_count(fd)
        finally:
            os.close(fd)
        assert osts is not None, f"the file system of {root} does not say how many OSTs it has"
        path = tempfile.mkdtemp(prefix="ckptengine-test-", dir=root)
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        yield Place(Path(path), osts, None)


@pytest.fixture
def directory(place: Place) -> Iterator[Path]:
    """An empty directory there."""
    path = Path(tempfile.mkdtemp(dir=place.path))
    yield path
    if place.mount is None:  # a mount of ours goes away whole; a writer may be tidying up there
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="package")
def pair(place: Place) -> Iterator[Ranks]:
    """Two ranks that take the place for Lustre."""
    with Ranks(2) as ranks:
        ranks.call(cases.begin, place.mount is not None)
        yield ranks
