"""`ckpt inspect`: what is in a checkpoint, a shard or a tensor?"""

from __future__ import annotations

from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Annotated

import typer

from ckptengine.cli import exit_codes
from ckptengine.cli.options import AsJson

_DEFAULT_LIMIT = 50


def inspect_command(
    path: Annotated[
        str,
        typer.Argument(
            help="A checkpoint root (its newest step), a step's directory, its manifest, or one shard file.",
        ),
    ],
    fqn: Annotated[
        str | None,
        typer.Argument(help="A tensor's full name: show where it lies, and its statistics."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option("--filter", metavar="GLOB", help="Only tensors whose name matches: 'model.layers.*'."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0, help=f"At most so many tensors; 0: all. Without it {_DEFAULT_LIMIT}, with --json all."
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="With FQN: what this rank holds, where ranks hold values of their own."),
    ] = None,
    statistics: Annotated[
        bool, typer.Option("--stats/--no-stats", help="With FQN: read the tensor and compute its statistics.")
    ] = True,
    as_json: AsJson = False,
) -> int:
    """Show what a checkpoint holds: its summary and its tensors, or one tensor's place and statistics.

    Reading a tensor checks the digest of every block it touches.
    """
    from ckptengine.cli import inspect_tensor, inspect_whole, striping
    from ckptengine.cli.contents import not_found, open_contents
    from ckptengine.storage.posix import PosixStore

    ignored = (
        {"--rank": rank is not None, "--no-stats": not statistics}
        if fqn is None
        else {"--filter": pattern is not None, "--limit": limit is not None}
    )
    for option, given in ignored.items():
        if given:
            when = "with the name of a tensor" if fqn is None else "without the name of a tensor"
            raise typer.BadParameter(f"it means something only {when}", param_hint=option)
    store = PosixStore()
    layouts = striping.look(store, path) if fqn is None else {}
    contents = open_contents(store, path)
    if fqn is None:
        if limit is None:
            limit = 0 if as_json else _DEFAULT_LIMIT
        names = [
            name
            for name in contents.tensors.names()
            if fnmatchcase(name, "*" if pattern is None else pattern)
        ]
        show = inspect_whole.to_json if as_json else inspect_whole.show
        show(contents, names, limit or len(names), layouts)
        return exit_codes.GOOD

    row = contents.row(fqn)
    if row is None:
        raise not_found(contents, fqn)
    reading = nullcontext() if contents.manifest is None else store.lock_shared(contents.step_path)
    with reading:
        described = inspect_tensor.describe(store, contents, row, rank) if statistics else None
    show_tensor = inspect_tensor.to_json if as_json else inspect_tensor.show
    show_tensor(contents, row, described)
    return exit_codes.GOOD
