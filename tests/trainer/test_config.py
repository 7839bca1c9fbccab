"""The trainer's command line: what it accepts, and what it says to a mistake."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from trainer.config import TrainConfig, make_parser, parse_config
from trainer.launch import REPOSITORY


def test_defaults_need_a_root_only() -> None:
    assert parse_config(["--root", "/r"]) == TrainConfig(root="/r")


def test_every_field_is_a_flag_with_help() -> None:
    text = make_parser().format_help()
    for name in TrainConfig.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text


def test_flags_reach_their_fields_with_their_types() -> None:
    argv = ["--root", "r", "--fsdp", "2", "--steps", "7", "--lr", "0.5", "--tied-head"]
    config = parse_config([*argv, "--grad-clip", "1", "--keep-last", "3", "--codec", "zstd"])
    assert (config.fsdp, config.steps, config.lr, config.tied_head) == ("2", 7, 0.5, True)
    assert (config.grad_clip, config.keep_last, config.codec) == (1.0, 3, "zstd")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "the following arguments are required: --root"),
        (["--root", "r", "--fsdp", "3"], "argument --fsdp: invalid choice: '3'"),
        (["--root", "r", "--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--root", "r", "--steps", "0"], "--steps must be at least 1, not 0"),
        (["--root", ""], "--root must not be empty"),
        (["--root", "r", "--kill-rank", "1"], "--kill-rank and --kill-step go together"),
        (
            ["--root", "r", "--kill-rank", "1", "--kill-step", "99"],
            r"--kill-step must be a step of the run, in \[1, 60\]",
        ),
        (
            ["--root", "r", "--kill-once-file", "f"],
            "--kill-once-file and --kill-after-commit need --kill-rank and --kill-step",
        ),
        (["--root", "r", "--dim", "30"], "--dim must split into --n-heads heads of even size, not 30 into 4"),
        (["--root", "r", "--n-kv-heads", "3"], "--n-heads must be a multiple of --n-kv-heads, not 4 of 3"),
        (["--root", "r", "--dropout", "1"], r"--dropout must be in \[0, 1\), not 1.0"),
        (["--root", "r", "--noise", "-0.1"], r"--noise must be in \[0, 1\), not -0.1"),
        (["--root", "r", "--lr", "nan"], "--lr must be positive, not nan"),
        (["--root", "r", "--grad-clip", "0"], "--grad-clip must be positive"),
        (["--root", "r", "--keep-last", "0"], "--keep-last must be at least 1"),
        (["--root", "r", "--resize-rng", "keep"], "argument --resize-rng: invalid choice: 'keep'"),
        (["--root", "r", "--ste", "5"], "unrecognized arguments: --ste 5"),
    ],
)
def test_a_mistake_ends_with_code_2_and_one_line_that_names_it(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_config(argv)
    assert exit_.value.code == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert re.search(named, message)
    assert hint == "Try 'python -m trainer --help'."


def test_all_mistakes_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--root", "r", "--steps", "0", "--save-every", "-1", "--dim", "3"])
    message = capsys.readouterr().err
    assert all(flag in message for flag in ("--steps", "--save-every", "--dim"))


def test_help_answers_without_loading_torch() -> None:
    code = "import sys, trainer.config as c; c.make_parser().format_help(); sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=100, check=False).returncode == 0
    )
