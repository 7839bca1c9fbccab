"""Whole programs as a user would run them, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from tests.helpers.ranks import ENVIRONMENT, ROOT, commands, session, wait_until

GONE_S = 30.0


class Script:
    """A running program, leader of a session of its own. The first argument is its source, a file's path, or
    "-m", before the rest of the command."""

    def __init__(
        self, text: str | Path, *arguments: str, before: Sequence[str] = (), env: dict[str, str] | None = None
    ) -> None:
        given = isinstance(text, Path) or text == "-m"
        program = [str(text)] if given else ["-c", textwrap.dedent(str(text))]
        self._files = contextlib.ExitStack()
        self._directory = Path(self._files.enter_context(tempfile.TemporaryDirectory(prefix="script-")))
        with open(self._directory / "out", "wb") as out, open(self._directory / "err", "wb") as err:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-W", "ignore", *program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, **(env or {})},
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return (self._directory / "out").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self._directory / "err").read_text(errors="replace")

    def says(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until it has printed `text`."""

        def said() -> bool:
            ended = self.process.poll() is not None  # asked first: it may have said so just before
            if text in self.stdout:
                return True
            assert not ended, self.stdout + self.stderr
            return False

        wait_until(said, timeout_s)

    def interrupt(self) -> None:
        """Ctrl-C: to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ends(self, timeout_s: float = 60.0) -> int:
        """Wait for its end; returns the exit code (negative: a signal)."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s:g} s\n{self.stdout}\n{self.stderr}") from None

    def left(self) -> list[str]:
        """Command lines of the processes it has left behind, after they had a while to end."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.others(), GONE_S)
        return commands(self.others())

    def others(self) -> list[psutil.Process]:
        """The processes it has started, with or without it."""
        return [process for process in session(self.process.pid) if process.pid != self.process.pid]

    def writers(self) -> list[str]:
        """Command lines of those that multiprocessing has spawned."""
        return [command for command in commands(self.others()) if "spawn_main" in command]

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        for process in session(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._files.close()


@contextlib.contextmanager
def mounted_tmpfs(at: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A tmpfs of its own at `at`; gives a function that mounts it again with an option. Skips where mounting
    is not allowed."""
    import pytest

    at.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", at], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
    try:
        yield lambda option: subprocess.run(["mount", "-o", f"remount,{option}", at], check=True) and None
    finally:
        subprocess.run(["umount", "--lazy", at], check=True)
