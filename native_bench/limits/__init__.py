"""How fast can this machine go at best? `python -m native_bench.limits [--dir DIR]` prints all of it.

One function per native program: runs it once, with a time bound, and returns what it said. Rates are GiB
(2**30 bytes) per second. All raise `BuildError` where the programs cannot be built, `Unavailable` where the
machine, the kernel, the file system or the build lacks what was asked for (both say what to install), and
`LimitError` where the program failed, found a wrong result, or took too long.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from native_bench.building import BuildError, build
from native_bench.limits.values import (
    HUGE_READ_GRID,
    MIB,
    READ_GRID,
    WRITE_GRID,
    Best,
    CopyLimit,
    DigestLimit,
    Knobs,
    Limit,
    MetadataLimit,
    Pages,
    Phase,
    ReadKnobs,
    ReadLimit,
    WriteKnobs,
    WriteLimit,
    ZstdLimit,
    flag,
    flags_of,
    without_direct_io,
)
from native_bench.page_cache import cached_bytes, drop_caches

__all__ = [
    # how
    "ReadKnobs", "WriteKnobs", "Best", "READ_GRID", "HUGE_READ_GRID", "WRITE_GRID",
    # what comes back
    "Limit", "CopyLimit", "DigestLimit", "MetadataLimit", "Phase", "ReadLimit", "WriteLimit", "ZstdLimit",
    # the limits
    "best_direct_read", "best_direct_write", "buffered_read", "direct_read", "direct_write", "memcpy",
    "metadata_rate", "xxh3_128", "zstd_rate",
    # around them
    "BuildError", "LimitError", "Unavailable", "build", "cached_bytes", "drop_caches", "run",
]  # fmt: skip

StrPath = str | os.PathLike[str]
Result = TypeVar("Result", bound=Limit)

TIMEOUT_S = 300.0
_EXIT_UNAVAILABLE = 3


class LimitError(RuntimeError):
    """A native program failed, or its result was wrong. The message is the program's own."""


class Unavailable(LimitError):
    """This machine, kernel, file system or build does not have what was asked for."""


def run(
    program: str,
    result: type[Result],
    *arguments: str,
    timeout_s: float = TIMEOUT_S,
    build_dir: StrPath | None = None,
) -> Result:
    """Builds the programs if they have to be, runs one, returns what it said."""
    made = build(build_dir)
    missing = made.why_missing(program)
    if missing:
        raise Unavailable(missing)
    command = [str(made.directory / program), *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired as exc:
        raise LimitError(f"{' '.join(command)}: killed after {timeout_s:g} s") from exc
    if done.returncode != 0:
        said = done.stderr.strip() or f"{program}: ended with exit code {done.returncode} and no message"
        raise (Unavailable if done.returncode == _EXIT_UNAVAILABLE else LimitError)(said)
    return msgspec.json.decode(done.stdout, type=result)


def direct_read(
    paths: Sequence[StrPath],
    knobs: ReadKnobs | None = None,
    *,
    repeat: int = 3,
    timeout_s: float = TIMEOUT_S,
    build_dir: StrPath | None = None,
) -> ReadLimit:
    """The files, from the storage into memory that has its pages, in the order of `paths`. They are not
    changed."""
    return run(
        "direct_read",
        ReadLimit,
        *flags_of(knobs or ReadKnobs()),
        f"--repeat={repeat}",
        "--",
        *(os.fspath(path) for path in paths),
        timeout_s=timeout_s,
        build_dir=build_dir,
    )


def direct_write(
    directory: StrPath,
    nbytes: int,
    knobs: WriteKnobs | None = None,
    *,
    files: int = 1,
    overwrite: bool = False,
    keep: bool = False,
    repeat: int = 3,
    timeout_s: float = TIMEOUT_S,
    build_dir: StrPath | None = None,
) -> WriteLimit:
    """`nbytes` (a multiple of 4096) from memory to durable in `files` new files, removed unless `keep`.

    `overwrite`: over the same files each time, an untimed first time aside. A program that is killed, by its
    time bound or otherwise, leaves its files: give it a directory that you remove.
    """
    return run(
        "direct_write",
        WriteLimit,
        *flags_of(knobs or WriteKnobs()),
        f"--dir={os.fspath(directory)}",
        f"--bytes={nbytes}",
        f"--files={files}",
        f"--overwrite={flag(overwrite)}",
        f"--keep={flag(keep)}",
        f"--repeat={repeat}",
        timeout_s=timeout_s,
        build_dir=build_dir,
    )


def buffered_read(
    paths: Sequence[StrPath],
    *,
    threads: int = 2,
    block: int = 1 * MIB,
    pages: Pages = "4k",
    repeat: int = 5,
    timeout_s: float = TIMEOUT_S,
    build_dir: StrPath | None = None,
) -> ReadLimit:
    """The files, from the page cache (they are read once before) into memory that has its pages."""
    return run(
        "buffered_read",
        ReadLimit,
        f"--threads={threads}",
        f"--block={block}",
        f"--pages={pages}",
        f"--repeat={repeat}",
        "--",
        *(os.fspath(path) for path in paths),
        timeout_s=timeout_s,
        build_dir=build_dir,
    )


def memcpy(
    nbytes: int,
    threads: int = 1,
    *,
    into: Literal["warm", "fresh"] = "warm",
    pages: Pages = "4k",
    block: int = 0,
    stores: Literal["libc", "streaming"] = "libc",
    repeat: int = 5,
    timeout_s: float = TIMEOUT_S,
    build_dir: StrPath | None = None,
) -> CopyLimit:
    """`nbytes` copied in memory. `into`: memory that has its pages, or gets them on the way. block 0: each
    thread copies its share with one call. stores: libc's memcpy, or non-temporal stores (x86-64 only)."""
    return run(
        "memcpy",
        CopyLimit,
        f"--bytes={nbytes}",
        f"--threads={threads}",
        f"--into={into}",
        f"--pages={pages}",
        f"--block={block}",
        f"--stores={stores}",
        f"--repeat={repeat}",
        timeout_s=timeout_s,
        build_dir=build_dir,
    )


def xxh3_128(
    nbytes: int,
    threads: int = 1,
    *,
    block: int = 8 * MIB,
    code: Literal["auto", "sse2", "avx2", "avx512", "library"] = "auto",
    repeat: int = 5,
    timeout_s: float = TIMEOUT_S,
    build_dir: StrPath | None = None,
) -> DigestLimit:
    """`nbytes` of memory digested, block by block."""
    return run(
        "xxh3_128",
        DigestLimit,
        f"--bytes={nbytes}",
        f"--threads={threads}",
        f"--block={block}",
        f"--code={code}",
        f"--repeat={repeat}",
        timeout_s=timeout_s,
        build_dir=build_dir,
    )


def zstd_rate(
    nbytes: int,
    threads: int = 1,
    *,
    level: int = 1,
    data: str = "bf16-normal",
    shuffle: int = 1,
    block: int = 8 * MIB,
    repeat: int = 3,
    timeout_s: float = TIMEOUT_S,
    build_dir: StrPath | None = None,
) -> ZstdLimit:
    """Blocks compressed and decompressed. data: "bf16-normal", "random", "zeros" or "file:PATH"; shuffle: the
    size of the elements whose bytes are split into planes first, 1 for none (the times include it)."""
    return run(
        "zstd_rate",
        ZstdLimit,
        f"--bytes={nbytes}",
        f"--threads={threads}",
        f"--level={level}",
        f"--data={data}",
        f"--shuffle={shuffle}",
        f"--block={block}",
        f"--repeat={repeat}",
        timeout_s=timeout_s,
        build_dir=build_dir,
    )


def metadata_rate(
    directory: StrPath,
    files: int = 1000,
    threads: int = 1,
    *,
    size: int = 4096,
    fsync: bool = True,
    repeat: int = 3,
    timeout_s: float = TIMEOUT_S,
    build_dir: StrPath | None = None,
) -> MetadataLimit:
    """Small files made durable, read, renamed and removed, in a directory of their own below `directory`."""
    return run(
        "metadata_rate",
        MetadataLimit,
        f"--dir={os.fspath(directory)}",
        f"--files={files}",
        f"--threads={threads}",
        f"--size={size}",
        f"--fsync={flag(fsync)}",
        f"--repeat={repeat}",
        timeout_s=timeout_s,
        build_dir=build_dir,
    )


def best_direct_read(
    paths: Sequence[StrPath],
    *,
    grid: Sequence[ReadKnobs] = READ_GRID,
    rounds: int = 2,
    timeout_s: float = TIMEOUT_S,
    build_dir: StrPath | None = None,
) -> Best[ReadKnobs]:
    """The knobs of the grid that read these files fastest. Where the file system takes no direct I/O: of the
    same grid through the page cache. Each trial reads all bytes once per round and needs memory for them."""
    return _best(
        grid,
        lambda knobs: direct_read(paths, knobs, repeat=1, timeout_s=timeout_s, build_dir=build_dir),
        rounds,
    )


def best_direct_write(
    directory: StrPath,
    nbytes: int,
    *,
    files: int = 1,
    grid: Sequence[WriteKnobs] = WRITE_GRID,
    rounds: int = 2,
    timeout_s: float = TIMEOUT_S,
    build_dir: StrPath | None = None,
) -> Best[WriteKnobs]:
    """The knobs of the grid that make `nbytes` durable fastest; otherwise as `best_direct_read`."""
    return _best(
        grid,
        lambda knobs: direct_write(
            directory, nbytes, knobs, files=files, repeat=1, timeout_s=timeout_s, build_dir=build_dir
        ),
        rounds,
    )


def _best(grid: Sequence[Knobs], measure: Callable[[Knobs], Limit], rounds: int) -> Best[Knobs]:
    """Rounds of one trial each, so that a slow moment of the machine does not hit all trials of one set of
    knobs. What counts is the best of them: nothing makes a transfer faster than the machine is."""
    rates: dict[Knobs, float] = {}
    skipped: dict[Knobs, str] = {}
    for _ in range(rounds):
        for knobs in grid:
            if knobs in skipped:
                continue
            try:
                rates[knobs] = max(rates.get(knobs, 0.0), measure(knobs).gib_s)
            except Unavailable as exc:
                skipped[knobs] = str(exc)
    if not rates:
        buffered = [knobs for knobs in grid if knobs.direct]
        if not buffered:
            raise Unavailable("; ".join(dict.fromkeys(skipped.values())))
        best: Best[Knobs] = _best([without_direct_io(knobs) for knobs in buffered], measure, rounds)
        why = dict.fromkeys((*skipped.values(), *best.skipped))
        return Best(best.knobs, best.gib_s, best.trials, tuple(why))
    trials = tuple(sorted(rates.items(), key=lambda trial: -trial[1]))
    return Best(*trials[0], trials, tuple(dict.fromkeys(skipped.values())))
