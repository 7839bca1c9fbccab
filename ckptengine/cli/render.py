"""How do results, messages and progress look?

Results go to stdout, everything else to stderr. Tables are plain aligned text: they can be cut, grepped and
read in a log, and cost no import. Only the progress bar uses rich, which is imported when a bar is shown.

Text out of a checkpoint goes through `clean` before it is printed: a name may hold anything, a terminal's
control sequences included.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

import msgspec

BAR_FROM_NBYTES = 16 << 20
"""Less than this is read before a bar could be looked at."""

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    right: bool = False


def line(text: str = "", style: str | None = None) -> None:
    """One line of the result."""
    sys.stdout.write(_styled(text, style, sys.stdout) + "\n")


def message(text: str) -> None:
    """One line to the person at the terminal."""
    _to_stderr(text)


def failure(text: str) -> None:
    """One line that says why the command failed."""
    _to_stderr(_styled("ckpt: ", "red", sys.stderr) + clean(text))


def _to_stderr(text: str) -> None:
    # Where nobody can be told, the exit code has to do.
    with suppress(OSError):
        sys.stderr.write(text + "\n")


def json(value: Any) -> None:
    """The result as one JSON document, in UTF-8 whatever the terminal's encoding is."""
    sys.stdout.flush()
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(_encodable(value)), indent=2) + b"\n")


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, dim: Collection[int] = ()) -> None:
    """Aligned columns under a heading; `dim` are the numbers of rows to show as less important."""
    widths = [
        max(len(column.title), *(len(row[i]) for row in rows)) if rows else len(column.title)
        for i, column in enumerate(columns)
    ]

    def aligned(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, column, width in zip(cells, columns, widths, strict=True)
        ).rstrip()

    line(aligned([column.title for column in columns]), "bold")
    for number, row in enumerate(rows):
        line(aligned(row), "dim" if number in dim else None)


def facts(pairs: Sequence[tuple[str, str]]) -> None:
    """Names and values, one pair a line."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        line(f"{_styled(name.ljust(width), 'bold', sys.stdout)}  {value}")


def bar(share: float, width: int = 20) -> str:
    """A share of one as a bar: in eighths of a character, where stdout's encoding has those."""
    share = min(max(share, 0.0), 1.0)
    if not _can_encode(_EIGHTHS, sys.stdout):
        return "#" * round(share * width)
    full, rest = divmod(round(share * width * 8), 8)
    return _EIGHTHS[8] * full + (_EIGHTHS[rest] if rest else "")


def human_nbytes(nbytes: float) -> str:
    """`1536` → `1.5 KiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        nbytes /= 1024
        if nbytes < 999.95:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} PiB"


def human_seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def human_time(unix_seconds: float) -> str:
    """Local time, to the second; a time no calendar has is shown as the number it is."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))
    except (OverflowError, ValueError, OSError):
        return f"{unix_seconds:g}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ranges(numbers: Collection[int]) -> str:
    """`{0, 1, 2, 5}` → `0-2,5`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def clean(text: str) -> str:
    """The text on one line, with everything escaped that could move a cursor or break an encoding."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with the bytes done and in all; shows a bar where someone can see it."""
    with ExitStack() as stack:
        advance: Callable[[int, int], None] | None = None

        def report(done: int, total: int) -> None:
            nonlocal advance
            if advance is None:
                seen = total >= BAR_FROM_NBYTES and _is_terminal(sys.stderr)
                advance = stack.enter_context(_progress_bar(label, total)) if seen else _ignore
            advance(done, total)

        yield report


@contextmanager
def _progress_bar(label: str, total_nbytes: int) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(label, total=total_nbytes)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _ignore(done: int, total: int) -> None:
    pass


def prepare_streams() -> bool:
    """Makes both streams safe to write to. Was there a stdout to begin with?

    A character that the terminal's encoding lacks is escaped, not an error. A stream that was closed, which
    Python shows as None, becomes one that leads nowhere.
    """
    has_stdout = sys.stdout is not None
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    return has_stdout


def _can_encode(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _styled(text: str, style: str | None, stream: TextIO) -> str:
    # https://no-color.org: set to anything but the empty string, it means no colour.
    if style is None or os.environ.get("NO_COLOR") or not _is_terminal(stream):
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def _encodable(value: Any) -> Any:
    """The value with lone surrogates (from file names that are not UTF-8) escaped: JSON cannot carry them."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encodable(one) for one in value]
    return value
