"""Do the native programs measure what they say, and notice when it went wrong?"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from native_bench import building, limits
from native_bench.building import Build
from native_bench.limits import LimitError, Unavailable
from native_bench.limits import __main__ as limit_table
from native_bench.limits.values import (
    Best,
    Limit,
    ReadKnobs,
    ReadLimit,
    WriteKnobs,
)

# The first test to ask for the programs waits until they are compiled.
pytestmark = pytest.mark.timeout(300)

KIB = 1 << 10
MIB = 1 << 20

PROGRAMS = (
    "direct_read",
    "direct_write",
    "buffered_read",
    "memcpy",
    "xxh3_128",
    "zstd_rate",
    "metadata_rate",
)

FAULTS = r"""
// The calls that a program under test makes, with one of them broken. Small reads are its own checks.
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sys/types.h>
#include <dlfcn.h>

static bool broken(const char* fault) {
  const char* set = std::getenv("FAULT");
  return set && !std::strcmp(set, fault);
}
template <typename F> static F real(const char* name, F) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

extern "C" ssize_t pread(int fd, void* data, size_t n, off_t at) {
  if (n >= 65536 && broken("short read")) n -= 4096;
  if (n >= 65536 && at != 0 && broken("lost read")) return static_cast<ssize_t>(n);
  if (n >= 65536 && broken("failed read")) { errno = EIO; return -1; }
  return real("pread", &pread)(fd, data, n, at);
}
extern "C" ssize_t pwrite(int fd, const void* data, size_t n, off_t at) {
  if (broken("short write")) n -= 4096;
  if (at != 0 && broken("lost write")) return static_cast<ssize_t>(n);
  return real("pwrite", &pwrite)(fd, data, n, at);
}
extern "C" int fsync(int fd) {
  if (broken("failed fsync")) { errno = EIO; return -1; }
  return real("fsync", &fsync)(fd);
}
extern "C" void* memcpy(void* to, const void* from, size_t n) noexcept {
  if (n == 65536 && broken("lost copy")) return to;
  return std::memmove(to, from, n);
}
"""


def run(build: Build, program: str, *arguments: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C"}
    if fault:
        environment |= {"FAULT": fault, "LD_PRELOAD": str(build.directory / "faults.so")}
    command = [build.directory / program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def has(build: Build, program: str) -> None:
    missing = build.why_missing(program)
    if missing:
        pytest.skip(missing)


def or_skip(measure: Callable[[], Limit]) -> Limit:
    try:
        return measure()
    except Unavailable as exc:
        pytest.skip(str(exc))


def consistent(limit: Limit, program: str, nbytes: int, repeat: int) -> None:
    assert (limit.program, limit.nbytes, limit.flags["repeat"]) == (program, nbytes, repeat)
    assert len(limit.seconds) == len(limit.cpu_seconds) == repeat
    assert all(seconds > 0 for seconds in limit.seconds)
    assert limit.gib_s == pytest.approx(nbytes / 2**30 / median(limit.seconds), rel=1e-6)
    assert limit.best_gib_s >= limit.gib_s * 0.999999


@pytest.fixture
def files(programs: Build, tmp_path: Path) -> list[Path]:
    """Files whose sizes are no multiple of anything, one of them empty."""
    made = [tmp_path / name for name in ("a", "-b", "empty", "c")]
    for path, nbytes in zip(made, (MIB + 4097, 1, 0, 300_001), strict=True):
        path.write_bytes(os.urandom(nbytes))
    return made


def into_all_places() -> list[ReadKnobs]:
    ways = [
        ReadKnobs(block=64 * KIB, threads=3),
        ReadKnobs(block=4 * KIB, threads=2, pages="huge"),
        ReadKnobs(engine="io_uring", block=64 * KIB, threads=2, depth=3),
    ]
    return [replace(way, into=into) for way in ways for into in ("target", "copy", "pool")] + [
        ReadKnobs(direct=False, block=64 * KIB),
        ReadKnobs(engine="io_uring", direct=False, block=64 * KIB, depth=4),
    ]


@pytest.mark.parametrize("knobs", into_all_places(), ids=str)
def test_files_are_read_whole(programs: Build, files: list[Path], knobs: ReadKnobs) -> None:
    found = or_skip(lambda: limits.direct_read(files, knobs, repeat=2, build_dir=programs.directory))
    consistent(found, "direct_read", MIB + 4097 + 1 + 300_001, 2)
    assert isinstance(found, ReadLimit)
    assert (found.samples_checked > 0) == (knobs.into != "pool")
    assert found.flags["paths"] == [str(path) for path in files]


def test_cached_files_are_read_whole(programs: Build, files: list[Path]) -> None:
    found = limits.buffered_read(files, threads=2, block=64 * KIB, repeat=2, build_dir=programs.directory)
    consistent(found, "buffered_read", MIB + 4097 + 1 + 300_001, 2)
    assert found.samples_checked > 0


@pytest.mark.parametrize("program", ["direct_read", "buffered_read"])
def test_a_reader_makes_its_own_files_and_removes_them(programs: Build, program: str, tmp_path: Path) -> None:
    done = run(programs, program, f"--dir={tmp_path}", "--bytes=1M", "--files=3", "--repeat", "1")
    if done.returncode == 3:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["bytes"] == MIB
    assert len(told["flags"]["paths"]) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "knobs",
    [
        WriteKnobs(block=64 * KIB, threads=3),
        WriteKnobs(block=64 * KIB, preallocate=False, pages="huge"),
        WriteKnobs(engine="io_uring", block=64 * KIB, threads=2, depth=3),
        WriteKnobs(direct=False, block=64 * KIB),
    ],
    ids=str,
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_files_are_written_whole(programs: Build, tmp_path: Path, knobs: WriteKnobs, overwrite: bool) -> None:
    nbytes = MIB + 12 * KIB

    def write(keep: bool) -> limits.WriteLimit:
        where = programs.directory
        return limits.direct_write(
            tmp_path, nbytes, knobs, files=3, overwrite=overwrite, keep=keep, repeat=2, build_dir=where
        )

    found = or_skip(lambda: write(False))
    consistent(found, "direct_write", nbytes, 2)
    assert list(tmp_path.iterdir()) == []
    kept = write(True)
    assert sorted(map(str, tmp_path.iterdir())) == sorted(kept.kept)
    contents = [Path(path).read_bytes() for path in kept.kept]
    assert sum(map(len, contents)) == nbytes
    blocks = [content[at : at + 4096] for content in contents for at in range(0, len(content), 4096)]
    assert len(set(blocks)) == len(blocks), "no block is repeated, missing or empty"
    for whole, *parts in zip(
        kept.seconds, kept.create_seconds, kept.write_seconds, kept.fsync_seconds, strict=True
    ):
        assert sum(parts) <= whole


@pytest.mark.parametrize("into", ["warm", "fresh"])
@pytest.mark.parametrize("pages", ["4k", "huge"])
@pytest.mark.parametrize("block", [0, 64 * KIB])
def test_memory_is_copied(programs: Build, into: str, pages: str, block: int) -> None:
    nbytes = 4 * MIB + 5000
    found = limits.memcpy(
        nbytes,
        2,
        into=into,  # type: ignore[arg-type]
        pages=pages,  # type: ignore[arg-type]
        block=block,
        repeat=2,
        build_dir=programs.directory,
    )
    consistent(found, "memcpy", nbytes, 2)
    if pages == "4k":
        assert found.huge_page_bytes == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="has no non-temporal stores here")
@pytest.mark.parametrize(("nbytes", "block"), [(4 * MIB + 5000, 0), (4 * MIB + 37, 64 * KIB), (4096, 192)])
def test_memory_is_copied_with_non_temporal_stores(programs: Build, nbytes: int, block: int) -> None:
    found = limits.memcpy(nbytes, 2, block=block, stores="streaming", repeat=2, build_dir=programs.directory)
    consistent(found, "memcpy", nbytes, 2)
    assert found.flags["stores"] == "streaming"


@pytest.mark.parametrize("code", ["auto", "sse2", "avx2", "avx512", "library"])
def test_memory_is_digested(programs: Build, code: str) -> None:
    where = programs.directory
    nbytes = MIB + 77
    found = or_skip(
        lambda: limits.xxh3_128(nbytes, 2, block=1000, code=code, repeat=2, build_dir=where)  # type: ignore[arg-type]
    )
    consistent(found, "xxh3_128", nbytes, 2)


def test_compression_tells_kinds_of_data_apart(programs: Build, tmp_path: Path) -> None:
    has(programs, "zstd_rate")
    text = tmp_path / "text"
    text.write_text("as in every step of every run\n" * 1000)
    ratios = {}
    for data, shuffle in (
        ("random", 1),
        ("zeros", 1),
        ("bf16-normal", 1),
        ("bf16-normal", 2),
        (f"file:{text}", 3),
    ):
        found = limits.zstd_rate(
            MIB + 77, 2, data=data, shuffle=shuffle, block=64 * KIB, repeat=2, build_dir=programs.directory
        )
        consistent(found, "zstd_rate", text.stat().st_size if data.startswith("file") else MIB + 77, 2)
        assert len(found.decompress_seconds) == 2
        ratios[data, shuffle] = found.ratio
    assert ratios["random", 1] < 1.001
    assert ratios["zeros", 1] > 100
    assert 1.2 < ratios["bf16-normal", 1] < ratios["bf16-normal", 2] < 1.6
    assert ratios[f"file:{text}", 3] > 5


def test_small_files_are_made_and_removed(programs: Build, tmp_path: Path) -> None:
    found = limits.metadata_rate(tmp_path, 20, 2, size=100, repeat=2, build_dir=programs.directory)
    consistent(found, "metadata_rate", 2000, 2)
    assert set(found.phases) == {"create", "read", "rename", "unlink"}
    assert all(phase.files_s > 0 and len(phase.seconds) == 2 for phase in found.phases.values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_wrong_flags_are_usage_errors(programs: Build, program: str) -> None:
    has(programs, program)
    for arguments, complaint in (
        (["--bogus", "1"], "--bogus is unknown"),
        (["--threads"], "--threads needs a value: N"),
        (["--threads", "two"], '"two" is no whole number'),
        (["--threads=0"], "0 is not from 1 to"),
        (["--repeat=-1"], '"-1" is no whole number'),
    ):
        done = run(programs, program, *arguments)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert done.stderr.startswith(f"{program}: ")
        assert complaint in done.stderr
    shown = run(programs, program, "--help")
    assert shown.returncode == 0
    assert f"usage: {program}" in shown.stdout
    assert run(programs, program, "--version").stdout.startswith(f"{program} ")


@pytest.mark.parametrize(
    ("program", "arguments", "complaint"),
    [
        ("direct_read", ["--block=5000", "x"], "5000 is no multiple of 4096"),
        ("direct_read", ["--depth=2", "x"], "use more --threads, or --engine io_uring"),
        ("direct_read", [], "name the files to read, or --dir"),
        ("direct_read", ["--dir=.", "x"], "name the files to read, or --dir"),
        ("direct_read", ["/dev/zero"], "no regular file"),
        ("direct_write", ["--bytes=5000"], "5000 is no multiple of 4096"),
        ("direct_write", ["--engine=aio"], "is none of threads|io_uring"),
        ("direct_write", ["--fsync=maybe"], "neither on nor off"),
        ("direct_write", ["here"], '"here" is no flag'),
        ("buffered_read", ["/dev/null"], "no regular file"),
        ("memcpy", ["--bytes=8X"], "is no size"),
        ("memcpy", ["--bytes=99999999999T"], "is no size"),
        ("memcpy", ["--bytes="], "is no size"),
        ("memcpy", ["--stores=plain"], "is none of libc|streaming"),
        pytest.param(
            *("memcpy", ["--stores=streaming", "--block=100"], "multiples of 64"),
            marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="unavailable here"),
        ),
        ("zstd_rate", ["--level=999"], "no whole number from"),
        ("zstd_rate", ["--data=words"], "is none of bf16-normal"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(
    programs: Build, program: str, arguments: list[str], complaint: str
) -> None:
    has(programs, program)
    done = run(programs, program, *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert complaint in done.stderr


def test_failures_name_the_file(programs: Build, tmp_path: Path) -> None:
    where = programs.directory
    with pytest.raises(LimitError, match=r"direct_read: .*/absent: open: No such file or directory"):
        limits.direct_read([tmp_path / "absent"], build_dir=where)
    with pytest.raises(LimitError, match=r"/absent/direct_write-.*No such file|/absent: open: No such file"):
        limits.direct_write(tmp_path / "absent", MIB, build_dir=where)
    with pytest.raises(LimitError, match=r"/absent/metadata_rate-\d+: mkdir: No such file"):
        limits.metadata_rate(tmp_path / "absent", build_dir=where)


def test_too_little_memory_is_told_before(programs: Build) -> None:
    with pytest.raises(Unavailable, match="MiB of memory are needed"):
        limits.memcpy(1 << 40, build_dir=programs.directory)


def test_a_program_has_a_time_bound(programs: Build) -> None:
    with pytest.raises(LimitError, match=r"memcpy .*killed after 0\.05 s"):
        limits.memcpy(64 * MIB, repeat=1000, timeout_s=0.05, build_dir=programs.directory)


@pytest.fixture(scope="module")
def faulty(programs: Build) -> Build:
    source, library = programs.directory / "faults.cpp", programs.directory / "faults.so"
    source.write_text(FAULTS)
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")))
    command = [
        *compiler.split(),
        "-O1",
        "-fno-builtin",
        "-shared",
        "-fPIC",
        str(source),
        "-o",
        str(library),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return programs


@pytest.mark.parametrize(
    ("fault", "program", "complaint"),
    [
        ("short read", "direct_read", "61440 instead of 65536 bytes"),
        ("lost read", "direct_read", "what was read differs from the file at offset"),
        ("failed read", "direct_read", "Input/output error"),
        ("short read", "buffered_read", "61440 instead of 65536 bytes"),
        ("lost read", "buffered_read", "what was read differs from the file at offset"),
        ("short write", "direct_write", "61440 instead of 65536 bytes"),
        ("lost write", "direct_write", "differs from what was written"),
        ("failed fsync", "direct_write", "fsync: Input/output error"),
        ("lost copy", "memcpy", "the copy differs from its source"),
        ("failed fsync", "metadata_rate", "fsync: Input/output error"),
    ],
)
def test_a_wrong_result_is_no_result(
    faulty: Build, tmp_path: Path, fault: str, program: str, complaint: str
) -> None:
    arguments = ["--block=64K"]
    if program.endswith("_read"):
        (tmp_path / "file").write_bytes(os.urandom(MIB))
        arguments += ["--direct=off"] if program == "direct_read" else []
        arguments += [str(tmp_path / "file")]
    elif program == "direct_write":
        arguments += [f"--dir={tmp_path}", "--bytes=1M", "--direct=off"]
    elif program == "memcpy":
        arguments += ["--bytes=1M"]
    else:
        arguments = [f"--dir={tmp_path}", "--files=3"]
    good = run(faulty, program, *arguments, fault="none")
    assert good.returncode == 0, good.stderr
    bad = run(faulty, program, *arguments, fault=fault)
    assert (bad.returncode, bad.stdout) == (1, ""), bad
    assert complaint in bad.stderr
    assert [path.name for path in tmp_path.iterdir()] in ([], ["file"]), "and nothing is left behind"


def test_a_read_into_the_pool_is_noticed_when_lost(faulty: Build, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(MIB))
    arguments = ["--block=64K", "--direct=off", "--into=pool", str(tmp_path / "file")]
    assert "left its buffer unchanged" in run(faulty, "direct_read", *arguments, fault="lost read").stderr


def test_the_best_knobs_are_those_of_the_fastest_trial(programs: Build, tmp_path: Path) -> None:
    where = programs.directory
    few = [WriteKnobs(block=64 * KIB), WriteKnobs(block=128 * KIB, threads=1)]
    best: Best[WriteKnobs] = limits.best_direct_write(tmp_path, MIB, grid=few, build_dir=where)
    assert {trial for trial, _ in best.trials} in (set(few), {replace(one, direct=False) for one in few})
    assert (best.knobs, best.gib_s) == best.trials[0]
    assert best.gib_s == max(rate for _, rate in best.trials)
    kept = limits.direct_write(tmp_path, MIB, best.knobs, keep=True, build_dir=where).kept
    read = limits.best_direct_read(kept, grid=[ReadKnobs(block=64 * KIB)], build_dir=where)
    assert replace(read.knobs, direct=True) == ReadKnobs(block=64 * KIB)


def test_without_direct_io_the_best_goes_through_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def direct_read(paths: object, knobs: ReadKnobs, **_: object) -> Limit:
        tried.append(knobs)
        if knobs.direct or knobs.engine == "io_uring":
            raise Unavailable("no io_uring" if knobs.engine == "io_uring" else "no direct I/O")
        return Limit(
            program="",
            version="",
            flags={},
            nbytes=1,
            seconds=(1.0,),
            cpu_seconds=(),
            gib_s=float(knobs.threads),
        )

    monkeypatch.setattr(limits, "direct_read", direct_read)
    grid = [ReadKnobs(threads=1), ReadKnobs(threads=3), ReadKnobs(engine="io_uring")]
    best = limits.best_direct_read([], grid=grid, rounds=2)
    assert best.knobs == ReadKnobs(threads=3, direct=False)
    assert best.skipped == ("no direct I/O", "no io_uring")
    assert len(tried) == 3 + 3 + 2, "what is unavailable is asked for once"
    with pytest.raises(Unavailable, match="no io_uring"):
        limits.best_direct_read([], grid=grid[2:])


def test_without_the_libraries_the_rest_works_and_says_what_to_install(
    bare_programs: Build, tmp_path: Path
) -> None:
    where = bare_programs.directory
    assert bare_programs.missing_libraries == building.LIBRARIES
    with pytest.raises(Unavailable, match="libxxhash is missing; on Debian: apt-get install libxxhash-dev"):
        limits.xxh3_128(MIB, build_dir=where)
    with pytest.raises(Unavailable, match="libzstd is missing; on Debian: apt-get install libzstd-dev"):
        limits.zstd_rate(MIB, build_dir=where)
    with pytest.raises(Unavailable, match=r"built without liburing.*apt-get install liburing-dev"):
        limits.direct_write(tmp_path, MIB, WriteKnobs(engine="io_uring", depth=2), build_dir=where)
    limits.direct_write(tmp_path, MIB, WriteKnobs(direct=False), repeat=1, build_dir=where)
    with pytest.raises(Unavailable, match="there is no native program 'fio'"):
        limits.run("fio", Limit, build_dir=where)


@pytest.mark.parametrize("libraries", ["programs", "bare_programs"])
def test_the_table_has_every_limit(
    libraries: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    build: Build = request.getfixturevalue(libraries)
    tiny = limit_table.Sizes(memory=MIB, storage=MIB, zstd=MIB, files=3, repeat=1, grid_rounds=1)
    monkeypatch.setattr(limit_table, "QUICK", tiny)
    arguments = ["--quick", f"--dir={tmp_path}", f"--build-dir={build.directory}"]
    assert limit_table.main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert set(told) == {"condition", "features", "limits"}
    skipped = {row["name"] for row in told["limits"] if row["skipped"]}
    assert {name for name in skipped if not name.startswith(("zstd", "xxh3"))} == set()
    # Who waits is told what for, on whatever stderr is.
    assert all(f"measuring: {row['name']}" in err for row in told["limits"] if row["name"] != "the storage")
    assert ("apt-get install liburing-dev" in err) == (not build.features.liburing)
    assert all(row["limit"]["gib_s_median"] > 0 for row in told["limits"] if not row["skipped"])
    assert limit_table.main(arguments) == 0
    table = capsys.readouterr().out
    assert all(row["name"] in table for row in told["limits"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("absent", "there is not there; --dir takes a directory"),
        ("file", "there is not a directory; --dir takes a directory"),
        ("below a file", "below is not there"),
        ("/proc", "/proc cannot be written to: "),
        ("full", "GiB free, and 4.06 are needed; free some, or measure less with --quick"),
    ],
)
def test_a_place_that_cannot_be_measured_is_named_before_anything_is_measured(
    kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "there"
    if kind in ("file", "below a file"):
        place.write_text("")
        place = place / "below" if kind == "below a file" else place
    elif kind == "full":
        place.mkdir()
        used = shutil.disk_usage(tmp_path)._replace(free=4 << 30)
        monkeypatch.setattr(limit_table.shutil, "disk_usage", lambda path: used)
    elif kind == "/proc":
        place = Path(kind)

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("something was built or measured")

    monkeypatch.setattr(limits, "build", measured)
    monkeypatch.setattr(limits, "memcpy", measured)
    assert limit_table.main([f"--dir={place}"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1
