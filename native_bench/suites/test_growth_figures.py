"""Does the report of what grows with the world come to figures?"""

from __future__ import annotations

from native_bench.growth import measure


def test_every_figure_is_measured() -> None:
    figures = {figure.name: figure for figure in measure(quick=True)}
    assert all(figure.value >= 0 for figure in figures.values())
    assert sum(figure.target is not None for figure in figures.values()) == 6
    assert figures["INDEX on disk"].value > 0
    assert figures["INDEX, growth of peak memory"].value > 0
    assert figures["restore metadata of a rank, large world"].value > 0
