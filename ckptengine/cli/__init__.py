"""The command line tool `ckpt`: one command per file, each imported without torch."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from ckptengine.cli import about, guard, render
from ckptengine.cli.exit_codes import MEANINGS
from ckptengine.cli.inspect_ import inspect_command
from ckptengine.cli.list_ import list_command
from ckptengine.cli.trace_ import trace_command
from ckptengine.cli.verify_ import verify_command

EXIT_CODES = "Exit codes: " + ", ".join(f"{code} {meaning}" for code, meaning in MEANINGS) + "."

app = typer.Typer(
    name="ckpt",
    add_completion=False,
    no_args_is_help=True,
    # An error is one line and an exit code: see guard.py.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        about.show()
        raise typer.Exit


def _about(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions at work here, whether the compiled helper is, and exit.",
        ),
    ] = False,
) -> None:
    """Look into the checkpoints that ckptengine writes, and check that they are sound.

    A checkpoint root is the directory a training run saves to. It holds one directory for each saved step; a
    step counts only once its MANIFEST.json is there. Start with: ckpt list ROOT
    """


_about.__doc__ = guard.reflowed(_about.__doc__ or "")
app.callback()(_about)
for _name, _command in (
    ("list", list_command),
    ("inspect", inspect_command),
    ("verify", verify_command),
    ("trace", trace_command),
):
    app.command(_name, epilog=EXIT_CODES, no_args_is_help=True)(guard.guarded(_command))


def main() -> NoReturn:
    """Entry point of the console script."""
    has_stdout = render.prepare_streams()
    try:
        app()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        code = guard.report(error)
    sys.exit(guard.close_streams(code, has_stdout=has_stdout))
