"""Which versions are at work here, and is the compiled helper one of them?"""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from ckptengine import __version__
from ckptengine.cli import render

DEPENDENCIES = ("torch", "nvidia-resiliency-ext")


def show() -> None:
    """The lines of `ckpt --version`. None of the packages is imported for it."""
    # Where it is asked for: the other commands do not need it.
    from ckptengine.storage import streaming

    state = streaming.status
    if streaming.helper is None:
        state = f"not in use: {state}"
    render.line(f"ckpt {__version__}")
    render.facts(
        [
            ("python", f"{platform.python_version()} ({sys.executable})"),
            *((name, _version(name)) for name in DEPENDENCIES),
            ("compiled helper", render.clean(state)),
        ]
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
