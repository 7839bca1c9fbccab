"""Where are the native programs, built from the sources as they are now?"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

SOURCE = Path(__file__).resolve().parent
DEFAULT_DIRECTORY = SOURCE.parent / "build" / "native_bench"

# What each optional library is for, and the Debian package that has it.
LIBRARIES = {"liburing": "liburing-dev", "libxxhash": "libxxhash-dev", "libzstd": "libzstd-dev"}
NEEDS = {"xxh3_128": "libxxhash", "zstd_rate": "libzstd"}
_BUILD_TIMEOUT_S = 600.0


class BuildError(RuntimeError):
    """The programs cannot be built here. The message says what to install, or ends with the compiler's own
    words."""


class ToolMissing(BuildError):
    """There is no cmake, make or compiler."""


class Features(msgspec.Struct, frozen=True):
    """What the configuration found: features.json in the build directory."""

    compiler: str
    build_type: str
    liburing: bool
    libxxhash: bool
    libzstd: bool
    programs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Build:
    """Programs that match the sources."""

    directory: Path
    features: Features

    def why_missing(self, program: str) -> str | None:
        """Why there is no such program here, and what to install; None if there is."""
        if program in self.features.programs:
            return None
        library = NEEDS.get(program)
        if library is None:
            return f"there is no native program {program!r}"
        return (
            f"{program} was not built: {library} is missing; on Debian: apt-get install {LIBRARIES[library]}"
        )

    @property
    def missing_libraries(self) -> dict[str, str]:
        """Optional libraries that were not found → the Debian package to install."""
        return {name: package for name, package in LIBRARIES.items() if not getattr(self.features, name)}


_built: dict[Path, tuple[str, Build]] = {}


def build(directory: str | os.PathLike[str] | None = None, *, options: Sequence[str] | None = None) -> Build:
    """The programs in `directory` (default: build/native_bench beside the package), built if they have to be.

    The first call of a process configures afresh, so that libraries installed meanwhile are found; later ones
    only look whether a source changed. `options` go to cmake ("-DNATIVE_BENCH_LIBURING=OFF"); None: those of
    the last time. Several processes may call this at the same time. Raises `BuildError`.
    """
    where = Path(DEFAULT_DIRECTORY if directory is None else directory).resolve()
    sources = _digest_of_sources()
    known = _built.get(where)
    if known is not None and options is None and known[0] == sources and known[1].directory.is_dir():
        return known[1]
    cmake = _cmake()
    _require_compiler()
    try:
        where.mkdir(parents=True, exist_ok=True)
        with _locked(where / ".lock"):
            _run_cmake(cmake, where, None if options is None else list(options), sources)
        features = msgspec.json.decode((where / "features.json").read_bytes(), type=Features)
    except OSError as exc:
        raise BuildError(
            f"cannot build in {where}: {exc.strerror}; give a build directory that can be written"
        ) from exc
    made = Build(where, features)
    _built[where] = (sources, made)
    return made


class _Stamp(msgspec.Struct, frozen=True):
    """What the programs in a build directory were made from."""

    sources: str
    options: list[str]


def _run_cmake(cmake: str, where: Path, options: list[str] | None, sources: str) -> None:
    stamp = where / ".made_from.json"
    last = _read_stamp(stamp)
    wanted = _Stamp(sources, options if options is not None else last.options if last else [])
    # A build directory that came with a copied checkout remembers where it was made, and cmake refuses it.
    cache = where / "CMakeCache.txt"
    if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={SOURCE}\n" not in cache.read_text():
        cache.unlink()
        shutil.rmtree(where / "CMakeFiles", ignore_errors=True)
    # As stale as no stamp, until the build has succeeded; but its options are those to be kept.
    stamp.write_bytes(msgspec.json.encode(_Stamp("", wanted.options)))
    generator = (
        [] if cache.exists() else ["-G", "Ninja"] if shutil.which("ninja") else ["-G", "Unix Makefiles"]
    )
    _run([cmake, "-S", str(SOURCE), "-B", str(where), *generator, *wanted.options], "configure")
    command = [cmake, "--build", str(where), "--parallel", str(len(os.sched_getaffinity(0)))]
    # make and ninja go by times alone, and would take an older file that replaced a newer one for unchanged.
    _run([*command, *(["--clean-first"] if last != wanted else [])], "build")
    stamp.write_bytes(msgspec.json.encode(wanted))


def _read_stamp(path: Path) -> _Stamp | None:
    """None too for one whose writer was ended half way: what it says is then found out anew."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Stamp)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _run(command: list[str], doing: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise BuildError(f"cmake could not {doing} within {_BUILD_TIMEOUT_S:.0f} s") from exc
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
        raise BuildError(f"cmake could not {doing} the native programs ({' '.join(command)}):\n{tail}")


def _digest_of_sources() -> str:
    digest = hashlib.sha256(os.environ.get("CXX", "").encode())
    for path in [SOURCE / "CMakeLists.txt", *sorted((SOURCE / "src").iterdir())]:
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _cmake() -> str:
    # The PyPI package puts a cmake beside the interpreter, which is on the PATH of an activated environment
    # only.
    beside = Path(sys.executable).parent / "cmake"
    found = shutil.which("cmake") or (str(beside) if beside.exists() else None)
    if found is None:
        raise ToolMissing("no cmake: pip install cmake, or on Debian: apt-get install cmake")
    if not shutil.which("ninja") and not shutil.which("make"):
        raise ToolMissing("neither ninja nor make: on Debian: apt-get install make")
    return found


def _require_compiler() -> None:
    chosen = os.environ.get("CXX", "").split()
    candidates = chosen[:1] or ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in candidates):
        raise ToolMissing(
            f"no C++ compiler ({', '.join(candidates)}): on Debian: apt-get install g++ (11 or later)"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
