"""Which figures of docs/benchmarks.md stand in the README? Taken from the document, so that they agree."""

from __future__ import annotations

import re
from collections.abc import Sequence

from native_bench import report

BEGIN = "<!-- begin figures of docs/benchmarks.md, by `make bench-report` -->"
END = "<!-- end figures -->"

ENGINE, LIMITS = "**ckptengine**", ("native limit", "raw (Python threads)")
BESIDE = (
    "**ckptengine**, `save`",
    "DCP, `thread_count=1`",
    "DCP, `thread_count=2`",
    "DCP `async_save`, kept `DefaultStager`",
    "NVRx `TorchAsyncCheckpoint`",
    "NVRx `FileSystemWriterAsync`",
    "safetensors `safe_open`",
    "safetensors `load_file`",
    "torch.save / torch.load",
    "torch.load, mmap",
    "flashpack",
)
"""Whose figures are shown beside, too, where they were measured."""

Row = dict[str, str]


def insert(page: str, generated: str) -> str:
    """Raises ValueError if the page has no place for it."""
    if BEGIN not in page:
        raise ValueError(f"the README has no line {BEGIN!r}")
    return report.insert(page, generated, BEGIN, END)


def figures(document: str) -> str:
    """Markdown: a table for each of the comparison's first cases, and what machine it is of.

    Raises ValueError if the document has none.
    """
    chapters = _chapters(document)
    machine = next((text for title, text in chapters if title == "The machine"), "")
    parts = []
    for title, text in chapters:
        tables = _tables(text)
        if title.startswith(("One rank, 2 GiB", "One rank, 20,000")) and len(tables) >= 2:
            parts.append(_figures(title, *tables[:2]))
    if not parts:
        raise ValueError("the document has no case of one rank; run make bench and make bench-report first")
    known = dict(re.findall(r"^\| (.+?) \| (.+) \|$", machine, re.MULTILINE))
    day = re.search(r"Run of (\S+),", machine)
    where = f"{known.get('CPU', 'unknown')}, {known.get('file system', 'unknown').partition(';')[0]}"
    told = (
        f"Seconds, medians of one run ({where}; {day[1] if day else 'no date'}). The page cache is dropped "
        "before a cold restore; the\nfaster of the first two rows is the limit. "
        "`make bench && make bench-report` measures your machine (three quarters of an hour, 20 GiB of\n"
        "memory) and renews these lines. All systems, how it was measured, and all targets, met and missed: "
        "[docs/benchmarks.md](docs/benchmarks.md)."
    )
    if any("(aliases)" in part for part in parts):
        told += (
            "\n*Aliases*: the snapshot is no copy when the call returns; "
            "what training changes then can get into the file."
        )
    return "\n\n".join([*parts, told])


def _figures(title: str, save: Sequence[Row], restore: Sequence[Row]) -> str:
    saves, restores = ({row[""]: row for row in table} for table in (save, restore))
    head = [title, "stall", "save to durable", "restore, cold", "restore, hot"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for name in (*LIMITS, ENGINE, *BESIDE):
        if name not in saves and name not in restores:
            continue
        cells = [_first(saves.get(name, {}).get(column, "–")) for column in ("stall s", "to durable s")]
        cells += [_first(restores.get(name, {}).get(column, "–")) for column in ("cold s", "hot s")]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def _first(cell: str) -> str:
    """The median, without its spread; a stall that copied nothing is not to be taken for one that did."""
    return f"{cell.split(' ')[0]}{' (aliases)' if '(aliases)' in cell else ''}"


def _chapters(document: str) -> list[tuple[str, str]]:
    parts = re.split(r"^## (.+)$", document, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def _tables(text: str) -> list[list[Row]]:
    """The tables of a chapter, as rows by their heads."""
    found: list[list[Row]] = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *rows = [_cells(line) for line in block.strip().splitlines()]
        found.append([dict(zip(head, row, strict=False)) for row in rows])
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split(" | ")]
