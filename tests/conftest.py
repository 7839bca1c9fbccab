"""Which tests can run here?"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest

# How long an example takes says nothing about the code on a machine that does something else, too.
hypothesis.settings.register_profile(
    "ckptengine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ckptengine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lustre-root",
        metavar="PATH",
        help="a directory on a mounted Lustre file system: tests/lustre runs there, too",
    )


def pytest_configure() -> None:
    # Spawned workers and the command line tool must speak as in a plain terminal, whatever the caller's is.
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "PYTHONWARNINGS", "CKPT_DEBUG"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def lent_writers() -> Iterator[None]:
    """End, after the last test, the writer processes that went from one Checkpointer to the next."""
    yield
    from tests.helpers.writers import end_all

    end_all()


@pytest.fixture
def lent_writer(lent_writers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Checkpointers of this test take the writer process of an earlier one, if it is still good."""
    from tests.helpers.writers import LentWriter

    monkeypatch.setattr("ckptengine.monitor.WriterProcess", LentWriter)


def _has_cuda() -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        import torch
    return bool(torch.cuda.is_available())
