"""A picture per case: bars of each system's save and restore, the limit beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from native_bench.reached import limit_of, memcpy_of
from native_bench.results import CaseResult, Results

FIGURES = (
    ("save_s", "save to durable"),
    ("restore_cold_s", "restore, cold"),
    ("restore_hot_s", "restore, hot"),
)


def draw(results: Results, directory: Path) -> dict[str, Path]:
    """One SVG per case, by the case's name. Empty if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return {}
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "native_bench", "svg.fonttype": "none", "font.size": 8})
    directory.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for case in results.cases:
        path = directory / f"{case.case.name}.svg"
        if _draw(case, path):
            drawn[case.case.name] = path
    return drawn


def _draw(case: CaseResult, path: Path) -> bool:
    import matplotlib.pyplot as plt

    figures = [
        (figure, title)
        for figure, title in FIGURES
        if any(system.rounds(figure) for system in case.systems if not system.limit)
    ]
    if not figures:
        return False
    most = max(len(_bars(case, figure)) for figure, _ in figures)
    made, axes = plt.subplots(1, len(figures), figsize=(3.6 * len(figures), 1.0 + 0.2 * most), squeeze=False)
    for axis, (figure, title) in zip(axes[0], figures, strict=True):
        bars = _bars(case, figure)
        names = [name for _, name in bars]
        colors = ["#1f77b4" if "ckptengine" in name else "#b0b0b0" for name in names]
        axis.barh(names, [seconds for seconds, _ in bars], color=colors)
        axis.invert_yaxis()
        axis.set_xscale("log")  # the slowest is a hundred times as slow as the fastest
        axis.set_title(f"{title} (s)")
        limit = memcpy_of(case) if figure == "restore_hot_s" else limit_of(case, figure)
        if limit is not None:
            axis.axvline(limit.seconds, color="#d62728", linewidth=1, linestyle="--")
    made.suptitle(f"{case.case.title}; dashed: the limit")
    made.tight_layout()
    made.savefig(path, metadata={"Date": None})
    plt.close(made)
    return True


def _bars(case: CaseResult, figure: str) -> Sequence[tuple[float, str]]:
    found = [
        (seconds, system.title.replace("*", "").replace("`", ""))
        for system in case.systems
        if not system.limit and (seconds := system.median(figure)) is not None
    ]
    return sorted(found)
