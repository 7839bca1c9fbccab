"""What is measured beside the comparison? Each part in a process of its own, with a deadline.

    python -m native_bench.more NAME [--quick] [--dir DIR] [--out FILE]

measures one of them here and now, and prints it as JSON; `python -m native_bench run` starts these.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path

import msgspec

from native_bench import sections
from native_bench.sections import Section

Say = Callable[[str], None]

LAST_WORDS_CHARS = 300
END_S = 10.0
TELL_S = 10.0
"""A part says nothing by itself while it measures."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Part:
    """module: has `section(directory, quick)`. typical_s: how long it takes on two cores at full size."""

    title: str
    module: str
    typical_s: float
    deadline_s: float


PARTS = {
    "step-time": Part("What a save costs the training steps beside it", "step_time", 55, 400),
    "streaming": Part("Training that begins while it is restored", "streaming_restore", 60, 400),
    "memory": Part("Memory", "memory", 110, 600),
    "codecs": Part("Compression", "codecs", 57, 300),
    "slow-device": Part("Compression on slow devices", "slow_device", 50, 300),
    "reshard": Part("Restores into another layout", "reshard", 90, 600),
    "exchange": Part("Restores that read once what several ranks need", "exchange", 45, 420),
    "growth": Part("What grows with the number of ranks", "growth", 15, 300),
}


def run(name: str, directory: Path, path: Path, *, quick: bool, say: Say = lambda text: None) -> Section:
    """Measure `name` in a process of its own and write it to `path`. What fails is a section with an error.

    Whatever happens, the process and those it has started are gone before this returns.
    """
    part = PARTS[name]
    command = [sys.executable, "-W", "ignore", "-m", "native_bench.more", name]
    command += ["--dir", str(directory), "--out", str(path), *(["--quick"] if quick else [])]
    root = str(Path(__file__).resolve().parent.parent)
    search = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    path.unlink(missing_ok=True)
    say(f"{name}: {part.title}")
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
        start_new_session=True,
    )
    problem = ""
    try:
        said = _wait(
            process, part, lambda seconds: say(f"{name}: {seconds:.0f} of about {part.typical_s:.0f} s")
        )
        if process.returncode:
            lines = said.strip().splitlines() or [f"exit status {process.returncode}"]
            problem = lines[-1][:LAST_WORDS_CHARS]
    except subprocess.TimeoutExpired:
        problem = f"not done after {part.deadline_s:.0f} s"
    finally:
        _end(process)
    if problem:
        sections.write(Section(name=name, title=part.title, error=problem, started=_now()), path)
        say(f"{name} failed: {problem}")
    return sections.read(path)


def _wait(process: subprocess.Popen[str], part: Part, tell: Callable[[float], None]) -> str:
    """What it says on stderr, when it has ended. Raises TimeoutExpired at its deadline."""
    start = time.monotonic()
    while True:
        left = part.deadline_s - (time.monotonic() - start)
        try:
            return process.communicate(timeout=min(TELL_S, left))[1]
        except subprocess.TimeoutExpired:
            if left <= TELL_S:
                raise
            tell(time.monotonic() - start)


def measure(name: str, directory: Path, *, quick: bool) -> Section:
    """In this process."""
    part = PARTS[name]
    began, started = time.monotonic(), _now()
    section: Section = import_module(f"native_bench.{part.module}").section(directory, quick)
    section.name, section.title, section.started = name, part.title, started
    section.seconds = time.monotonic() - began
    return section


def found(directory: Path) -> list[Section]:
    """The sections that lie there, in the order of `PARTS`."""
    paths = [directory / f"{name}.json" for name in PARTS]
    return [sections.read(path) for path in paths if path.exists()]


def _end(process: subprocess.Popen[str]) -> None:
    """The whole session: gently, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        for _ in _until(END_S):
            process.poll()
            if not _alive(process.pid):
                break
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _until(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.02)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m native_bench.more", description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--dir", type=Path, default=Path("."), help="where files go (default: here)")
    parser.add_argument("--out", type=Path, help="write it there instead of printing it")
    given = parser.parse_args(arguments)
    section = measure(given.name, given.dir, quick=given.quick)
    if given.out is None:
        print(msgspec.json.format(msgspec.json.encode(section), indent=1).decode())
    else:
        sections.write(section, given.out)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that files are removed
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    sys.exit(main())
