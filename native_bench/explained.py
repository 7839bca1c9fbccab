"""Where is it said why a target is short? A chapter of docs/design/performance.md for each family of rows."""

from __future__ import annotations

DOCUMENT = "design/performance.md"
"""Beside docs/benchmarks.md."""

FAMILIES = (
    ("small tensors", "small-tensors"),
    ("two ranks", "two-ranks"),
    ("tmpfs", "tmpfs"),
    ("stall", "stall"),
    ("step time", "stall"),
    ("save", "save"),
    ("restore cold", "restore-cold"),
    ("restore hot", "restore-hot"),
)
"""Of the comparison's rows: how the figure begins, and the chapter's anchor."""

SECTIONS = {
    "step-time": "stall",
    "streaming": "streaming-restore",
    "memory": "memory",
    "codecs": "codecs",
    "slow-device": "codecs",
    "reshard": "resharding",
    "exchange": "read-once",
    "growth": "growth",
}
"""Of what is measured beside the comparison: by the part's name."""

ANCHORS = tuple(dict.fromkeys([anchor for _, anchor in FAMILIES] + list(SECTIONS.values())))


def anchor(figure: str, section: str = "") -> str | None:
    """The chapter that explains this row. section: the part that it is of, if it is not the comparison's."""
    if section:
        return SECTIONS.get(section)
    return next((anchor for begin, anchor in FAMILIES if figure.startswith(begin)), None)
