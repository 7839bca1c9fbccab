"""Does the installed tool behave at the terminal, in a pipe, and when it is interrupted?"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from ckptengine.cli import about
from ckptengine.storage import streaming
from tests.cli.conftest import SCRIPT, Outcome, Run
from tests.helpers.checkpoints import RankContent, Tensor, flip, write_checkpoint

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def in_terminal(
    *args: object, stdout_too: bool = False, env: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Runs `ckpt` with stderr, or stdout too, on a terminal: exit code, stdout, what the terminal got."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [SCRIPT, *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=follower if stdout_too else subprocess.PIPE,
        stderr=follower,
        env={**os.environ, "TERM": "xterm-256color", **(env or {})},
    )
    os.close(follower)
    seen = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([leader], [], [], 1)[0]:
            continue
        try:
            part = os.read(leader, 65536)
        except OSError:  # the last process closed the terminal
            break
        if not part:
            break
        seen += part
    out = process.communicate(timeout=60)[0]
    os.close(leader)
    return process.returncode, (out or b"").decode(), seen.decode()


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Large enough for a progress bar."""
    made = tmp_path / "large"
    values = np.arange(6 << 20, dtype=np.float32)
    write_checkpoint(made, 1, ranks=1, block_nbytes=1 << 20, tensors={"t": values})
    return made


def test_exit_codes_of_the_installed_script(ckpt_process: Run, root: Path, tmp_path: Path) -> None:
    assert ckpt_process("list", root).code == 0
    assert ckpt_process("list", tmp_path / "nowhere").code == 5
    assert ckpt_process("inspect", root / "step-0000000300").code == 4
    assert ckpt_process("list", "--no-such-option", root).code == 2
    assert ckpt_process("no-such-command").code == 2
    flip(next((root / "step-0000000020").glob("a*/shard-00000*")), 5000)
    assert ckpt_process("verify", root / "step-0000000020").code == 3


def test_help_and_version(ckpt_process: Run) -> None:
    from ckptengine import __version__

    assert ckpt_process("--version").out.startswith(f"ckpt {__version__}\npython ")
    for args in (["--help"], ["list", "-h"], ["inspect", "--help"], ["verify", "--help"]):
        found = ckpt_process(*args)
        assert (found.code, found.err) == (0, "")
        text = " ".join(found.out.split())
        assert (
            "Exit codes: 0 good, 1 failed (the message says why), 2 wrong usage, 3 damaged, 4 not committed"
            in text
        )
    assert "Usage" in ckpt_process().out + ckpt_process().err


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("", streaming.status if streaming.helper else f"not in use: {streaming.status}"),
        ("off", "not in use: switched off by CKPTENGINE_STREAMING"),
    ],
)
def test_the_version_says_what_is_at_work(ckpt_process: Run, choice: str, expected: str) -> None:
    found = ckpt_process("--version", env={"CKPTENGINE_STREAMING": choice})
    assert (found.code, found.err) == (0, "")
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in found.out.splitlines()[1:])
    assert facts == {
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": metadata.version("torch"),
        "nvidia-resiliency-ext": metadata.version("nvidia-resiliency-ext"),
        "compiled helper": expected,
    }


def test_a_package_that_is_not_there_is_no_error(monkeypatch: pytest.MonkeyPatch, ckpt: Run) -> None:
    monkeypatch.setattr(about, "DEPENDENCIES", ("no-such-package",))
    assert "no-such-package  not installed\n" in ckpt("--version").out


def test_a_progress_bar_is_shown_on_a_terminal_and_gone_at_the_end(large: Path) -> None:
    code, out, seen = in_terminal("verify", large)
    assert code == 0
    assert out.startswith("step 1: ok")
    assert "checking large" in seen
    assert re.search(r"[\d.]+/24\.\d MiB|/25\.\d MiB|24\.\d MiB|MB", seen), seen
    assert "\x1b[" not in out


def test_no_bar_where_nobody_looks(ckpt_process: Run, large: Path) -> None:
    found = ckpt_process("verify", large)
    assert (found.code, found.err) == (0, "")
    _, _, seen = in_terminal("verify", large, env={"TERM": "dumb"})
    assert seen == ""


def test_a_small_checkpoint_needs_no_bar(root: Path) -> None:
    code, _, seen = in_terminal("verify", root)
    assert (code, seen) == (0, "")


def test_colour_only_on_a_terminal_that_may_have_it(root: Path, ckpt_process: Run) -> None:
    assert COLOUR.search(in_terminal("list", root, stdout_too=True)[2])
    assert not COLOUR.search(in_terminal("list", root, stdout_too=True, env={"NO_COLOR": "1"})[2])
    assert not COLOUR.search(in_terminal("list", root, stdout_too=True, env={"TERM": "dumb"})[2])
    assert not COLOUR.search(ckpt_process("list", root).out)


def test_no_colour_in_the_bar_either(large: Path) -> None:
    seen = in_terminal("verify", large, env={"NO_COLOR": "1"})[2]
    assert "checking" in seen
    assert not re.search(r"\x1b\[(3[0-7]|38;|9[0-7])", seen)


def test_incomplete_steps_are_dimmed(root: Path) -> None:
    lines = in_terminal("list", root, stdout_too=True)[2].splitlines()
    assert [line for line in lines if line.startswith("\x1b[2m")] == [lines[-1]]
    assert "300" in lines[-1]


def test_a_reader_that_goes_is_no_error(root: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.Popen([SCRIPT, "inspect", root], stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, b"")


def test_a_result_that_cannot_be_written_is_a_failure(root: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [SCRIPT, "list", root], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr.startswith("ckpt: ")
    assert done.stderr.endswith("No space left on device\n")
    assert done.stderr.count("\n") == 1


def test_interrupted_ends_with_130_and_one_line(root: Path) -> None:
    waiting = (
        "import sys, time, ckptengine.verification\n"
        "def wait(*args, **kwargs):\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(60)\n"
        "ckptengine.verification.verify = wait\n"
        "from ckptengine.cli import main\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", waiting, "verify", root],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "ckpt: interrupted\n")


@pytest.mark.parametrize("debug", [False, True])
def test_an_unexpected_error_is_one_line_unless_asked(root: Path, debug: bool) -> None:
    broken = (
        "import ckptengine.verification\n"
        "def fail(*args, **kwargs):\n"
        "    raise RuntimeError('unforeseen')\n"
        "ckptengine.verification.verify = fail\n"
        "from ckptengine.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", broken, "verify", root],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **({"CKPT_DEBUG": "1"} if debug else {})},
    )
    assert (done.returncode, done.stdout) == (1, "")
    last = "ckpt: RuntimeError: unforeseen (unexpected; CKPT_DEBUG=1 shows where)\n"
    if debug:
        assert done.stderr.startswith("Traceback")
        assert done.stderr.endswith(last)
    else:
        assert done.stderr == last


def test_names_cannot_steer_the_terminal(ckpt_process: Run, tmp_path: Path) -> None:
    evil = "a\x1b[31m\r\nb\u202e\x07"

    def content(rank: int, ranks: int) -> RankContent:
        return RankContent([Tensor(evil, np.zeros(3, np.float32), placement="\x1b[2J")])

    step = write_checkpoint(tmp_path, 1, ranks=1, content=content, metadata={"\x1b[2J": "\x1b"})
    for args in (["inspect", step], ["inspect", step, evil], ["inspect", step, "\x1b[2J"]):
        found = ckpt_process(*args)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", found.out + found.err)
    assert r"a\x1b[31m\r\nb\u202e\x07" in ckpt_process("inspect", step).out
    assert json.loads(ckpt_process("inspect", step, "--json").out)["tensors"][0]["name"] == evil
    flip(next(step.glob("a*/*")), 4096)
    assert "\x1b" not in ckpt_process("verify", step).out


def test_paths_that_are_not_utf8_and_terminals_that_are_not_either(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path) + b"/caf\xe9-\xc3\xa9"
    write_checkpoint(os.fsdecode(root), 1, ranks=1)
    for args in (["list"], ["inspect", "--json"], ["verify"]):
        done = subprocess.run(
            [os.fsencode(SCRIPT), *args, root],
            capture_output=True,
            timeout=60,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
        assert (done.returncode, done.stderr) == (0, b"")
        if "--json" in args:
            assert json.loads(done.stdout)["path"].startswith(str(tmp_path))


def test_errors_in_json_mode_are_documents_too(ckpt_process: Run, tmp_path: Path) -> None:
    found = ckpt_process("inspect", tmp_path, "--json")
    assert found.code == 5
    assert found.json["error"] == {
        "kind": "not_found",
        "message": found.err.removeprefix("ckpt: ").rstrip("\n"),
        "exit_code": 5,
    }


def with_closed(redirection: str, *args: object, command: tuple[object, ...] = (SCRIPT,)) -> Outcome:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *map(str, (*command, *args))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


COMMANDS = [
    ["list"],
    ["list", "--json"],
    ["inspect"],
    ["inspect", "--json"],
    ["verify"],
    ["verify", "--json"],
]


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_a_closed_stdout_is_a_failure_in_one_line(root: Path, args: list[str]) -> None:
    found = with_closed(">&-", *args, root)
    assert (found.code, found.err) == (1, "ckpt: the result could not be written: stdout is closed\n")
    found = with_closed(">&- 2>&-", *args, root)
    assert (found.code, found.out, found.err) == (1, "", "")


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_without_stderr_the_result_is_the_same(ckpt_process: Run, root: Path, args: list[str]) -> None:
    flip(root / "step-0000000020" / "MANIFEST.json", 40)
    expected = ckpt_process(*args, root)
    for redirection in ("2>&-", "2>/dev/full"):
        found = with_closed(redirection, *args, root)
        assert (found.code, found.err) == (expected.code, "")
        assert found.out.split(" in ")[0] == expected.out.split(" in ")[0] or "--json" in args
        found = with_closed(redirection, *args, root / "nowhere")
        assert (found.code, found.err) == (5, "")


def test_a_worse_code_than_1_outlives_a_closed_stdout(root: Path) -> None:
    assert with_closed(">&-", "list", root / "nowhere").code == 5
    assert with_closed(">&-", "list", "--no-such-option").code == 2


def test_the_bar_is_ascii_where_the_encoding_is(ckpt_process: Run, root: Path) -> None:
    out = ckpt_process("inspect", root, env={"PYTHONIOENCODING": "ascii"}).out
    assert "\\u" not in out
    assert "###" in out
    out = ckpt_process("inspect", root, env={"PYTHONIOENCODING": "utf-8"}).out
    assert "\u2588" in out


def test_the_module_is_the_tool_too(root: Path) -> None:
    found = with_closed("", "verify", root, command=(sys.executable, "-m", "ckptengine"))
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("step 100: ok\n")
