"""Do the documents render as they were written?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "native_bench").rglob("*.md")]
)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
RUN_IN = re.compile(r"[.:;] - [*`A-Z]|\S {3,}\S")
"""An item within a line, or the indentation of one that was wrapped anew."""


def run_in(text: str) -> list[str]:
    """Lines of prose that have an item of a list in them."""
    prose = FENCE.sub("", text)
    return [line for line in prose.splitlines() if RUN_IN.search(line) and not line.startswith("|")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_list_has_run_into_a_paragraph(path: Path) -> None:
    assert run_in(path.read_text()) == []


def test_a_list_that_was_wrapped_as_prose_is_found() -> None:
    whole = "What paid:\n- Structs: 1.0.\n- A union, asked\n  once: 0.4.\n| a  -  b |\n```\na - B:   c\n```\n"
    assert run_in(whole) == []
    assert run_in("What paid: - Structs: 1.0.\n") == ["What paid: - Structs: 1.0."]
    assert run_in("A union, asked   once: 0.4.\n") == ["A union, asked   once: 0.4."]
