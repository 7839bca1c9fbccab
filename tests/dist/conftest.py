"""Groups of ranks that all these tests share, and where they save."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist import cases
from tests.helpers.ranks import Ranks


class Groups:
    """By the number of ranks, each started when it is first asked for: most seconds of a test that starts ranks are
    imports. A group that a test has broken is replaced by another."""

    def __init__(self) -> None:
        self._made: dict[int, Ranks] = {}

    def __getitem__(self, size: int) -> Ranks:
        made = self._made.get(size)
        if made is not None and any(made.exitcode(rank) is not None for rank in range(size)):
            self._made.pop(size).close(check=False)
            made = None
        if made is None:
            made = self._made[size] = Ranks(size)
            made.call(cases.lend_writers)
        return made

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for made in self._made.values():
                stack.callback(made.close)


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    made = Groups()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def pair(groups: Groups) -> Ranks:
    return groups[2]


@pytest.fixture(scope="module")
def trio(groups: Groups) -> Ranks:
    return groups[3]


@pytest.fixture(scope="module")
def four(groups: Groups) -> Ranks:
    return groups[4]


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")
