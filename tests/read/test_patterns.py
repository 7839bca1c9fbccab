"""Which names does a pattern mean?"""

from __future__ import annotations

import pytest

from ckptengine.read.patterns import matches, matches_any


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("rng", "rng", True),
        ("rng", "rng.torch", True),
        ("rng", "rngs", False),
        ("rng", "a.rng", False),
        ("*.bias", "model.0.bias", True),
        ("*.bias", "model.0.bias.x", True),
        ("*.bias", "bias", False),
        ("*", "anything.at all", True),
        ("*", "", True),
        ("model.layers.[01]", "model.layers.1.w", True),
        ("model.layers.[01]", "model.layers.10", False),
        ("model.layers.?", "model.layers.7", True),
        ("model.*.weight", "model.a.b.weight", True),
        ("a+b", "a+b.c", True),
        ("a", "a\n", False),
        ("a*", "a\nb", True),
        ("A", "a", False),
    ],
)
def test_a_pattern_means_what_matches_and_all_below(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected
    assert matches_any(["nothing", pattern], name) is expected


def test_no_patterns_mean_nothing() -> None:
    assert not matches_any([], "")
    assert not matches_any([], "a")
