"""What a measurement beside the comparison leaves behind: tables, and the targets it decides."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from native_bench.targets import Target


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """head, rows: cells of Markdown, the first column on the left, the others on the right."""

    head: list[str]
    rows: list[list[str]]


class Section(msgspec.Struct, kw_only=True):
    """One chapter of the report. text: paragraphs before the tables. samples: every measurement, by figure.

    name, title: as `native_bench.more` has them, which puts them in. started: when it was measured, in UTC.
    error: why there is nothing.
    """

    name: str = ""
    title: str = ""
    text: list[str] = []
    tables: list[Table] = []
    targets: list[Target] = []
    samples: dict[str, list[float]] = {}
    started: str = ""
    seconds: float = 0.0
    error: str | None = None


def write(section: Section, path: Path) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(section), indent=1) + b"\n")
    os.replace(temporary, path)


def read(path: Path) -> Section:
    """Raises FileNotFoundError, or ValueError if the file is no section."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Section)
    except msgspec.DecodeError as exc:
        raise ValueError(f"{path} is no section of native_bench: {exc}") from exc
