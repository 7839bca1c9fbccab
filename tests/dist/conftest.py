"""Groups of ranks that the tests of a module share, and where they save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist import cases
from tests.helpers.ranks import Ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        ranks.call(cases.lend_writers)
        yield ranks


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")
