"""Progress in lines: one for what goes on, and never a long silence."""

from __future__ import annotations

import io
import time

from native_bench import lines
from native_bench.lines import Lines
from tests.helpers.ranks import wait_until


def test_what_takes_long_is_told_again_with_its_seconds() -> None:
    out = io.StringIO()
    with Lines(2, out, silent_s=0.02) as told:
        told.say("building the programs")
        wait_until(lambda: out.getvalue().count("s  building the programs: ") > 1)
        told.advance("large: a slow system begins")
        wait_until(lambda: out.getvalue().count("s  1/2  large: a slow system begins: ") > 1)
    said = out.getvalue()
    assert said.startswith("    0 s  building the programs\n")
    time.sleep(0.1)
    assert out.getvalue() == said  # it has ended with what it was about


def test_of_quick_steps_one_line_tells_and_nothing_of_none() -> None:
    out = io.StringIO()
    with Lines(4, out, silent_s=60.0) as told:
        for name in ("a", "", "b", "c"):
            told.advance(name)
    assert out.getvalue() == "    0 s  1/4  a\n"


def test_a_line_comes_before_anybody_takes_it_for_dead() -> None:
    assert lines.SILENT_S <= 30.0
