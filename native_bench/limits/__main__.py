"""All limits of this machine in one table: what `python -m native_bench.limits` prints."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from native_bench import limits
from native_bench.building import Build, BuildError
from native_bench.condition import Condition, condition_of
from native_bench.limits.values import Limit, MetadataLimit, ReadKnobs, WriteKnobs, WriteLimit, ZstdLimit

MIB = 1 << 20
GIB = 1 << 30
SPARE = 64 * MIB
PREFIX = ".limits-"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    memory: int
    storage: int
    zstd: int
    files: int
    repeat: int
    grid_rounds: int


FULL = Sizes(memory=1024 * MIB, storage=2048 * MIB, zstd=256 * MIB, files=1000, repeat=5, grid_rounds=2)
QUICK = Sizes(memory=256 * MIB, storage=256 * MIB, zstd=64 * MIB, files=100, repeat=3, grid_rounds=1)


@dataclass(frozen=True, slots=True)
class Row:
    """One limit, or why it could not be measured."""

    name: str
    limit: Limit | None = None
    knobs: ReadKnobs | WriteKnobs | None = None
    skipped: str | None = None


def check_place(directory: Path, sizes: Sizes) -> None:
    """Raises OSError, with words for the user, if `directory` is nothing that files of these sizes can be
    written to."""
    if not directory.is_dir():
        what = "not a directory" if directory.exists() else "not there"
        raise OSError(f"{directory} is {what}; --dir takes a directory on the storage that is to be measured")
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=directory):
            pass
    except OSError as exc:
        raise OSError(
            f"{directory} cannot be written to: {exc.strerror}; give another one with --dir"
        ) from exc
    # What is read is kept while other files are written.
    needed, free = 2 * sizes.storage + SPARE, shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            f"{directory} has {free / GIB:.2f} GiB free, and {needed / GIB:.2f} are needed; free some, or "
            "measure less with --quick"
        )


def rows(
    directory: Path,
    sizes: Sizes,
    cores: int,
    build_dir: Path | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> Iterator[Row]:
    """Measures one limit after the other. `directory` is left as it was. say: told what is measured next."""
    by: dict[str, Any] = {"repeat": sizes.repeat, "build_dir": build_dir}
    threads = sorted({1, cores})

    def row(name: str, measure: Callable[..., Limit], *arguments: object, **flags: object) -> Row:
        say(name)
        knobs = next((one for one in arguments if isinstance(one, (ReadKnobs, WriteKnobs))), None)
        try:
            return Row(name, measure(*arguments, **by, **flags), knobs)
        except limits.LimitError as exc:
            return Row(name, skipped=str(exc))

    for n in threads:
        for into in ("warm", "fresh"):
            for pages, called in (("4k", "4 KiB"), ("huge", "huge")):
                name = f"memcpy into {into} {called} pages, {_threads(n)}"
                yield row(name, limits.memcpy, sizes.memory, n, into=into, pages=pages)
        name = f"copy by non-temporal stores into warm 4 KiB pages, {_threads(n)}"
        yield row(name, limits.memcpy, sizes.memory, n, stores="streaming")
    for n in threads:
        yield row(f"xxh3-128, {_threads(n)}", limits.xxh3_128, sizes.memory, n)
    for level in (-5, 1, 3):
        for shuffle, called in ((1, ""), (2, ", byte planes")):
            name = f"zstd {level} on bf16 weights{called}, {_threads(cores)}"
            yield row(name, limits.zstd_rate, sizes.zstd, cores, level=level, shuffle=shuffle)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=directory) as scratch:
        tried: dict[str, Any] = {"rounds": sizes.grid_rounds, "build_dir": build_dir}
        try:
            say("which settings write fastest")
            write = limits.best_direct_write(scratch, sizes.storage, **tried).knobs
            say("write to durable")
            files = limits.direct_write(scratch, sizes.storage, write, keep=True, **by)
            limits.drop_caches(files.kept)
            say("which settings read fastest")
            read = limits.best_direct_read(files.kept, **tried).knobs
            say("which settings read fastest into huge pages")
            into_huge = limits.best_direct_read(files.kept, grid=limits.HUGE_READ_GRID, **tried).knobs
        except limits.LimitError as exc:
            yield Row("the storage", skipped=str(exc))
            return
        yield Row("write to durable", files, write)
        name = "write over existing blocks, to durable"
        yield row(name, limits.direct_write, scratch, sizes.storage, write, overwrite=True)
        name = "write through the page cache, to durable"
        yield row(name, limits.direct_write, scratch, sizes.storage, WriteKnobs(direct=False))
        yield row("read, cold", limits.direct_read, files.kept, read)
        yield row("read into huge pages, cold", limits.direct_read, files.kept, into_huge)
        name = "read through the page cache, cold"
        yield row(name, limits.direct_read, files.kept, ReadKnobs(direct=False, threads=4))
        for n in threads:
            yield row(f"read from the page cache, {_threads(n)}", limits.buffered_read, files.kept, threads=n)
        for n in threads:
            yield row(f"files of 4 KiB, {_threads(n)}", limits.metadata_rate, scratch, sizes.files, n)


def to_json(condition: Condition, build: Build, found: list[Row]) -> dict[str, object]:
    """All of it as JSON values."""
    return {
        "condition": condition.to_json(),
        "features": msgspec.to_builtins(build.features),
        "limits": [
            {
                "name": row.name,
                "limit": msgspec.to_builtins(row.limit),
                "knobs": asdict(row.knobs) if is_dataclass(row.knobs) else None,
                "skipped": row.skipped,
            }
            for row in found
        ],
    }


def _cells(row: Row) -> tuple[str, str, str, str]:
    """name, median, range, remarks"""
    limit = row.limit
    if limit is None:
        return row.name, "–", "", f"skipped: {row.skipped}"
    rates = [limit.nbytes / 2**30 / seconds for seconds in limit.seconds]
    remarks = []
    if row.knobs is not None:
        knobs = row.knobs
        remarks.append(f"{knobs.engine}, {knobs.block // MIB} MiB × {knobs.threads} × {knobs.depth}")
        if isinstance(knobs, ReadKnobs) and knobs.into == "copy":
            remarks.append(f"copied from a pool of {knobs.pool_pages} pages")
        if isinstance(knobs, WriteKnobs) and not knobs.preallocate:
            remarks.append("not preallocated")
    if isinstance(limit, WriteLimit):
        remarks.append(f"fsync {1e3 * median(limit.fsync_seconds):.1f} ms")
    elif isinstance(limit, ZstdLimit):
        remarks.append(f"ratio {limit.ratio:.3f}, decompress {limit.decompress_gib_s:.2f} GiB/s")
    elif isinstance(limit, MetadataLimit):
        return row.name, "–", "", ", ".join(f"{k} {v.files_s:,.0f}/s" for k, v in limit.phases.items())
    if limit.flags.get("pages") == "huge" and not getattr(limit, "huge_page_bytes", 1):
        remarks.append("the kernel gave no huge pages")
    return row.name, f"{limit.gib_s:.2f}", f"{min(rates):.2f}–{max(rates):.2f}", "; ".join(remarks)


def _threads(n: int) -> str:
    return "1 thread" if n == 1 else f"{n} threads"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m native_bench.limits", description=limits.__doc__)
    parser.add_argument("--dir", type=Path, default=Path(), help="the storage to measure (default: here)")
    parser.add_argument("--quick", action="store_true", help="small sizes: a look, not a measurement")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument(
        "--build-dir", type=Path, help="where to build the programs (default: build/native_bench)"
    )
    given = parser.parse_args(arguments)
    errors = Console(stderr=True, highlight=False)
    sizes = QUICK if given.quick else FULL
    try:
        check_place(given.dir, sizes)
        condition = condition_of(given.dir)
        errors.print("building the native programs, if they are not there", markup=False)
        build = limits.build(given.build_dir)
        for warning in condition.warnings:
            errors.print(f"Warning: {warning}.", markup=False)
        for library, package in build.missing_libraries.items():
            errors.print(
                f"{library} was not found; on Debian: apt-get install {package}", markup=False, soft_wrap=True
            )

        def say(what: str) -> None:
            errors.print(f"measuring: {what}", markup=False, soft_wrap=True)

        found = list(rows(given.dir, sizes, max(1, int(condition.cores)), given.build_dir, say))
    except (BuildError, limits.LimitError, OSError) as exc:
        errors.print(str(exc), markup=False, soft_wrap=True)
        return 1
    if given.json:
        print(json.dumps(to_json(condition, build, found), indent=2))
        return 0
    table = Table(
        "limit", "GiB/s", "from–to", "", title=f"{condition.cpu_model}, {condition.mount.file_system}"
    )
    for column in (1, 2):
        table.columns[column].justify = "right"
    for row in found:
        table.add_row(*_cells(row))
    # Redirected into a file, the table keeps its lines whole.
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 150).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
