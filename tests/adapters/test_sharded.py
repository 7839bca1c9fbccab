"""Sharded state on real process groups: FSDP1, FSDP2, DDP, DTensor."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.adapters.ranks import run_ranks


def _functions() -> list[str]:
    tree = ast.parse(Path(__file__).with_name("sharded_cases.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith(("fsdp", "ddp", "dtensor", "build", "training", "replicas"))
        and not node.args.args
    ]


CASES = _functions()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    # One pair of processes for all: starting torch takes longer than most cases.
    return run_ranks(tmp_path_factory.mktemp("ranks"), "tests.adapters.sharded_cases", CASES)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(outcome: dict[str, str], case: str) -> None:
    assert not outcome[case], outcome[case]


@pytest.mark.dist
def test_on_four_ranks(tmp_path: Path) -> None:
    failed = run_ranks(
        tmp_path,
        "tests.adapters.sharded_cases",
        [name for name in CASES if name.startswith("replicas")],
        world_size=4,
    )
    assert not any(failed.values()), "\n".join(failed.values())
