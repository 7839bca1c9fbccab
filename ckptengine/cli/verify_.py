"""`ckpt verify`: is a checkpoint what was committed?"""

from __future__ import annotations

import os
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptengine.cli import exit_codes, render
from ckptengine.cli.options import AsJson

if TYPE_CHECKING:
    from ckptengine.read.damage import Damage
    from ckptengine.storage.store import Store
    from ckptengine.verification import VerifyReport

_TENSORS_SHOWN = 8


class Level(str, Enum):
    """How much is checked; each includes the one before it."""

    sizes = "sizes"
    structure = "structure"
    data = "data"


def verify_command(
    path: Annotated[
        str,
        typer.Argument(help="A checkpoint root (its newest step), a step's directory, or its manifest."),
    ],
    level: Annotated[
        Level,
        typer.Option(
            help="sizes: every file is there, with its size. structure: and every header is intact, and the "
            "shards fit together. data: and every block has its digest, which reads everything.",
        ),
    ] = Level.data,
    every: Annotated[
        bool, typer.Option("--all", help="Check every committed step of a root, not only the newest.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Check that a checkpoint is exactly what was committed.

    Names every damaged place with its rank, file, offset and the tensors it touches, and ends with 3 if there
    is one. Nothing is written.
    """
    from ckptengine.storage.posix import PosixStore

    store = PosixStore()
    paths = _committed_steps(store, path) if every else [path]
    reports = []
    for one in paths:
        report = _verify(store, one, level)
        reports.append(report)
        if not as_json:
            _show(report)
    sound = all(report.ok for report in reports)
    if as_json:
        render.json({"ok": sound, "reports": [_to_json(report) for report in reports]})
    else:
        _conclude(store, reports)
    return exit_codes.GOOD if sound else exit_codes.DAMAGED


def _committed_steps(store: Store, path: str) -> list[str]:
    from ckptengine.catalog.catalog import list_steps, resolve

    if os.path.isfile(path):
        return [path]
    # Raises where nothing is committed, with the message for what is there instead.
    root, _ = resolve(store, path)
    if root is not None:
        return [step.path for step in list_steps(store, root)]
    parent = os.path.dirname(os.path.abspath(path))
    render.message(f"note: {render.clean(path)} is one step; for all, give its root: {render.clean(parent)}")
    return [path]


def _verify(store: Store, path: str, level: Level) -> VerifyReport:
    from ckptengine.verification import verify

    with render.progress(f"checking {render.clean(os.path.basename(os.path.abspath(path)))}") as progress:
        return verify(path, level.value, progress=progress, store=store)


def _show(report: VerifyReport) -> None:
    verdict, style = ("ok", "green") if report.ok else ("damaged", "red")
    step = "unknown step" if report.step is None else f"step {report.step}"
    render.line(f"{step}: {verdict}", style)
    speed = report.nbytes / report.seconds if report.seconds > 0 else 0.0
    what = f"{render.plural(report.shards, 'shard')}, level {report.level}"
    if report.nbytes:
        what += f", {render.human_nbytes(report.nbytes)} in {render.human_seconds(report.seconds)}"
    if report.level == "data" and report.nbytes:
        what += f" ({render.human_nbytes(speed)}/s)"
    facts = [("path", render.clean(report.path)), ("checked", what)]
    if report.fingerprint is not None:
        facts.append(("fingerprint", report.fingerprint))
    render.facts([(f"  {name}", value) for name, value in facts])
    for damage in report.damages:
        render.line(f"  {_place(damage)}: {render.clean(damage.reason)}", "red")
        if damage.tensors:
            shown = ", ".join(render.clean(name) for name in damage.tensors[:_TENSORS_SHOWN])
            more = len(damage.tensors) - _TENSORS_SHOWN
            render.line(f"    tensors: {shown}" + (f" and {more} more" if more > 0 else ""))
        elif damage.block is not None:
            render.line("    tensors: none (padding)")
    for note in report.notes:
        render.line(f"  note: {render.clean(note)}", "dim")


def _place(damage: Damage) -> str:
    parts = [] if damage.rank is None else [f"rank {damage.rank}"]
    parts.append(render.clean(damage.file))
    if damage.block is not None:
        parts.append(f"block {damage.block}")
    if damage.offset is not None:
        length = "" if damage.nbytes is None else f" ({damage.nbytes} bytes)"
        parts.append(f"offset {damage.offset}{length}")
    return ", ".join(parts)


def _conclude(store: Store, reports: list[VerifyReport]) -> None:
    """The last line says what to do next."""
    damaged = [report for report in reports if not report.ok]
    if not damaged:
        level = reports[0].level
        count = render.plural(len(reports), "step")
        if level == "data":
            render.line(f"{count} checked, every byte as committed; nothing to do.")
        else:
            render.line(f"{count} checked at level {level}; --level data would check every byte too.")
        return
    places = render.plural(sum(len(report.damages) for report in damaged), "damaged place")
    render.line(f"{places} in {render.plural(len(damaged), 'step')}. {_advice(store, reports)}")


def _advice(store: Store, reports: list[VerifyReport]) -> str:
    from ckptengine.catalog.catalog import list_steps
    from ckptengine.errors import CheckpointError

    again = "copy them again if another copy exists"
    broken = [report for report in reports if not report.restorable]
    if not broken:
        return _advice_for_index(reports)
    bad = {os.path.abspath(report.path) for report in broken}
    newest_bad = max((report.step for report in broken if report.step is not None), default=None)
    root = os.path.dirname(os.path.abspath(reports[0].path))
    try:
        steps = list_steps(store, root)
    except (CheckpointError, OSError):
        steps = []
    older = [
        step.step
        for step in steps
        if os.path.abspath(step.path) not in bad and (newest_bad is None or step.step < newest_bad)
    ]
    if not older:
        return f"There is no older step to restore: {again}."
    which = older[-1]
    checked = {report.step: report for report in reports if report.restorable}
    known = "after `ckpt verify` has checked it"
    if which in checked:
        known = "which is sound" if checked[which].ok else "of which only INDEX is damaged"
    return f"Next: restore step {which}, {known}, or {again}."


def _advice_for_index(reports: list[VerifyReport]) -> str:
    steps = [report for report in reports if not report.ok]
    one = len(steps) == 1
    which = "The step restores" if one else "These steps restore"
    if steps[0].level != "data":
        which = f"As far as level {steps[0].level} tells, {which[0].lower()}{which[1:]}"
    again = "the step" if one else "a step"
    return (
        f"{which} whole: INDEX only repeats the shards' headers, and is rebuilt from them when it is needed. "
        f"Committing {again} again replaces it."
    )


def _to_json(report: VerifyReport) -> dict[str, Any]:
    return report.to_dict()
