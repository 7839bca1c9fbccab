"""How does a command end, whatever happens in it?"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TextIO

import typer

from ckptengine.cli import render
from ckptengine.cli.exit_codes import BROKEN_PIPE, FAILED, GOOD, INTERRUPTED, code_for, kind_of
from ckptengine.errors import CheckpointError

DEBUG_VARIABLE = "CKPT_DEBUG"
"""Set, it adds the traceback to the message."""


def guarded(command: Callable[..., int]) -> Callable[..., None]:
    """Makes a typer command of a function that returns its exit code.

    An error becomes one line on stderr and its exit code, and with `--json` (the parameter `as_json`) an
    object on stdout too, so that a program that reads stdout always gets a document.
    """

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = command(*args, **kwargs)
        except typer.BadParameter:
            raise
        except (Exception, KeyboardInterrupt) as error:
            code = report(error, as_json=bool(kwargs.get("as_json")))
        raise typer.Exit(code)

    run.__doc__ = reflowed(command.__doc__ or "")
    return run


def reflowed(text: str) -> str:
    """Each paragraph on one line, for the help to wrap to the terminal's width."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


def report(error: BaseException, *, as_json: bool = False) -> int:
    """Says what went wrong, and gives the exit code."""
    code = code_for(error)
    if code == BROKEN_PIPE:
        return code
    text = describe(error)
    try:
        if as_json and code != INTERRUPTED:
            render.json({"error": {"kind": kind_of(code), "message": text, "exit_code": code}})
        if os.environ.get(DEBUG_VARIABLE):
            import traceback

            traceback.print_exception(error)
        render.failure(text)
    except BrokenPipeError:
        pass
    return code


def describe(error: BaseException) -> str:
    """One line: what, where, and what to do next."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename is not None else error.strerror
    return f"{type(error).__name__}: {error} (unexpected; {DEBUG_VARIABLE}=1 shows where)"


def close_streams(code: int, *, has_stdout: bool = True) -> int:
    """Flushes what was printed; what cannot be written is a failure, except to a reader that has gone."""
    problem = None if has_stdout else "stdout is closed"
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = BROKEN_PIPE
        _lead_nowhere(sys.stdout)
    except OSError as error:
        problem = describe(error)
        _lead_nowhere(sys.stdout)
    if problem is not None:
        render.failure(f"the result could not be written: {problem}")
        code = FAILED if code == GOOD else code
    try:
        sys.stderr.flush()
    except OSError:
        _lead_nowhere(sys.stderr)
    return code


def _lead_nowhere(stream: TextIO) -> None:
    # The interpreter flushes once more as it ends, and would fail once more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
