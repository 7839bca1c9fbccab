"""How large is what is measured?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from native_bench.suites.sizes import FULL, QUICK, Sizes


@pytest.fixture(scope="session")
def sizes(request: pytest.FixtureRequest) -> Sizes:
    """Full, where times are taken; else small enough to be run with every change."""
    measuring = request.config.getoption("benchmark_enable") or request.config.getoption("benchmark_only")
    return FULL if measuring else QUICK


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """As many as a rank has on a machine like CI's, whatever this one has."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")
