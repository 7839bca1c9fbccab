"""How does a trace look in a document? A timeline as SVG, which needs nothing to be drawn with.

A row for each thread, cut into columns of a few pixels. What a thread did in the time of a column is stacked
in it, each part as high as its share of that time: reads and digests that take turns a hundred times in a
column are then seen as the shares they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from xml.sax.saxutils import escape

from ckptengine.tracing.files import Span
from ckptengine.tracing.merge import Timeline

WIDTH = 1000
MAX_PROCESSES = 16

_LEFT = 150
_RIGHT = 12
_COLUMN = 2
_ROW = 12
_GAP = 2
_HEAD = 18
# Heights are cut to so many steps, so that neighbouring columns are often alike and become one.
_STEPS = 6
_TICKS = 8

# Of middling lightness: to be told apart on white and on black.
_KINDS = {
    "read": "#3f8fd2",
    "write": "#e0833a",
    "sync": "#d1495b",
    "other I/O": "#9a6fc4",
    "digest": "#4fa35f",
    "copy": "#c9a227",
    "codec": "#2a9d8f",
    "prepare": "#8d8068",
    "wait": "#a9adb3",
}
_OF_NAME = {
    "read": "read",
    "read file": "read",
    "write": "write",
    "fsync": "sync",
    "fsync directory": "sync",
    "publish": "sync",
    "digest": "digest",
    "digest and copy": "digest",
    "copy": "copy",
    "copy small tensors": "copy",
    "compress": "codec",
    "decompress": "codec",
}
_OF_CATEGORY = {"io": "other I/O", "cpu": "prepare", "wait": "wait"}


def picture(timeline: Timeline, *, title: str = "") -> str:
    """An SVG of all threads that did anything, up to `MAX_PROCESSES` processes."""
    length_us = max(timeline.length_us, 1)
    scale = (WIDTH - _LEFT - _RIGHT) / length_us
    body: list[str] = []
    y = 22 if title else 6
    top = y
    used: set[str] = set()
    shown = [(file, shift) for file, shift in timeline.each() if file.spans]
    for file, shift in shown[:MAX_PROCESSES]:
        body.append(f'<text class="b" x="4" y="{y + 13}">{escape(file.name)}</text>')
        y += _HEAD
        threads: dict[int, list[Span]] = {}
        for span in file.spans:
            threads.setdefault(span.thread, []).append(span)
        for thread in sorted(threads):
            name = file.threads.get(thread, f"thread {thread}")
            body.append(f'<text class="e" x="{_LEFT - 6}" y="{y + 10}">{escape(name[:24])}</text>')
            for kind, path in _row(threads[thread], shift, scale, y):
                used.add(kind)
                body.append(f'<path class="{_class(kind)}" d="{path}"/>')
            y += _ROW + _GAP
        y += 4
    if len(shown) > MAX_PROCESSES:
        body.append(f'<text x="4" y="{y + 12}">and {len(shown) - MAX_PROCESSES} more processes</text>')
        y += _HEAD
    axis = list(_axis(length_us, scale, top, y))
    y += 20
    legend = list(_legend(used, y))
    y += 18
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        f'role="img" font-family="system-ui,sans-serif" font-size="10">',
        f"<title>{escape(title or 'Timeline of a save and a restore')}</title>",
        "<style>text{fill:#6b7280}.b{font-weight:600;font-size:11px}.e{text-anchor:end}.m{text-anchor:middle}"
        ".a{stroke:#9ca3af;stroke-opacity:.35;stroke-width:.5}.whole{fill:#9ca3af;fill-opacity:.18}"
        + "".join(f".{_class(kind)}{{fill:{colour}}}" for kind, colour in _KINDS.items())
        + "@media(prefers-color-scheme:dark){text{fill:#9ca3af}}</style>",
    ]
    if title:
        head.append(f'<text class="b" x="4" y="14">{escape(title)}</text>')
    return "\n".join([*head, *axis, *body, *legend, "</svg>"]) + "\n"


def _class(kind: str) -> str:
    return kind.replace(" ", "-").replace("/", "").lower()


def _kind(span: Span) -> str | None:
    """None for what contains other events."""
    return _OF_NAME.get(span.name) or _OF_CATEGORY.get(span.category)


def _row(spans: list[Span], shift: int, scale: float, y: int) -> Iterator[tuple[str, str]]:
    """The paths of one thread, by kind; first where it was busy at all."""
    columns: dict[int, dict[str, float]] = {}
    busy: set[int] = set()
    for span in spans:
        begun, ended = (span.began + shift) * scale / _COLUMN, (span.ended + shift) * scale / _COLUMN
        kind = _kind(span)
        for column in range(int(begun), max(int(begun) + 1, ceil(ended))):
            busy.add(column)
            if kind is not None:
                # Hardly anything is still seen: an fsync that took no time has been made.
                share = max(min(ended, column + 1) - max(begun, column), 0.01)
                shares = columns.setdefault(column, {})
                shares[kind] = shares.get(kind, 0.0) + share
    yield "whole", "".join(_box(first, last, y, _ROW) for first, last in _runs(busy))
    paths: dict[str, list[str]] = {}
    stacks = {column: _stack(shares) for column, shares in columns.items()}
    for first, last in _runs(set(stacks), stacks.get):
        at = y + _ROW
        for kind, height in stacks[first]:
            at -= height
            paths.setdefault(kind, []).append(_box(first, last, at, height))
    for kind in _KINDS:
        if kind in paths:
            yield kind, "".join(paths[kind])


def _stack(shares: dict[str, float]) -> tuple[tuple[str, int], ...]:
    """Kinds and their heights, from below; every kind has some, and all have no more than the row."""
    whole = max(sum(shares.values()), 1.0)
    step = _ROW // _STEPS
    heights = {kind: max(round(shares[kind] / whole * _STEPS), 1) * step for kind in _KINDS if kind in shares}
    while sum(heights.values()) > _ROW:
        heights[max(heights, key=lambda kind: heights[kind])] -= step
    return tuple((kind, height) for kind, height in heights.items() if height > 0)


def _runs(
    columns: set[int], content: Callable[[int], object] = lambda column: None
) -> Iterator[tuple[int, int]]:
    """First and last of neighbouring columns that have the same content."""
    first = last = None
    for column in sorted(columns):
        if first is None or last is None:
            first = column
        elif column != last + 1 or content(column) != content(first):
            yield first, last
            first = column
        last = column
    if first is not None and last is not None:
        yield first, last


def _box(first: int, last: int, y: int, height: int) -> str:
    width = (last - first + 1) * _COLUMN
    return f"M{_LEFT + first * _COLUMN} {y}h{width}v{height}h-{width}z"


def _axis(length_us: int, scale: float, top: int, bottom: int) -> Iterator[str]:
    step = next(
        unit * 10**power
        for power in range(17)
        for unit in (1, 2, 5)
        if length_us / (unit * 10**power) <= _TICKS
    )
    for at in range(0, length_us + 1, step):
        x = round(_LEFT + at * scale, 1)
        yield f'<line class="a" x1="{x}" y1="{top}" x2="{x}" y2="{bottom}"/>'
        yield f'<text class="m" x="{x}" y="{bottom + 12}">{_time(at, step)}</text>'


def _time(at_us: int, step_us: int) -> str:
    if step_us >= 1_000_000:
        return f"{at_us // 1_000_000} s"
    if step_us >= 1000:
        return f"{at_us // 1000} ms"
    return f"{at_us} µs"


def _legend(used: set[str], y: int) -> Iterator[str]:
    x = _LEFT
    for kind in _KINDS:
        if kind in used:
            yield f'<rect class="{_class(kind)}" x="{x}" y="{y}" width="9" height="9"/>'
            yield f'<text x="{x + 13}" y="{y + 8.5}">{escape(kind)}</text>'
            x += 30 + 6 * len(kind)
