"""`ckpt trace`: who did what when, in a save or a restore?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptengine.cli import exit_codes, render
from ckptengine.cli.options import AsJson

if TYPE_CHECKING:
    from ckptengine.tracing.merge import Timeline
    from ckptengine.tracing.totals import Total

_COLUMNS = (
    render.Column("PROCESS"),
    render.Column("KIND"),
    render.Column("WHAT"),
    render.Column("COUNT", right=True),
    render.Column("THREAD TIME", right=True),
    render.Column("LONGEST", right=True),
    render.Column("RANK", right=True),
    render.Column("BYTES", right=True),
    render.Column("A SECOND", right=True),
)
_OF_SEVERAL = (5, 6)
_LONGEST_S = 1e9


def trace_command(
    paths: Annotated[
        list[str],
        typer.Argument(help="The directory that Config(trace=…) names, or single trace files out of it."),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write one trace of all processes, for ui.perfetto.dev."
        ),
    ] = None,
    svg: Annotated[
        str | None, typer.Option("--svg", metavar="FILE", help="Draw the timeline as a picture.")
    ] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Only this rank; may be repeated.")] = None,
    start: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Only what begins so long after the first event."),
    ] = None,
    stop: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Only what begins before that much time has passed."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Put the traces of all ranks together, and show what took how long.

    THREAD TIME is of all threads of all ranks, so it is more than the time that passed; LONGEST is the same
    of one rank, of that which was longest at it. What is "whole" contains other rows.

    All processes of a machine have one clock; machines are set beside each other by their wall clocks.
    """
    from ckptengine.tracing.files import find, read_trace
    from ckptengine.tracing.merge import align, window
    from ckptengine.tracing.totals import totals

    start_us, stop_us = _microseconds(start, "--start"), _microseconds(stop, "--stop")
    if stop_us is not None and stop_us <= (start_us or 0):
        raise typer.BadParameter(
            f"nothing can begin before {stop:g} s and not before {start or 0:g} s", param_hint="--stop"
        )
    files = [read_trace(path) for path in find(paths)]
    if rank:
        missing = sorted(set(rank) - {file.rank for file in files})
        if missing:
            raise typer.BadParameter(f"no trace is of rank {render.ranges(missing)}", param_hint="--rank")
        files = [file for file in files if file.rank in rank]
    whole = timeline = align(files)
    if start_us is not None or stop_us is not None:
        timeline = window(whole, start_us or 0, whole.length_us + 1 if stop_us is None else stop_us)
        if not any(file.spans for file in timeline.files):
            raise typer.BadParameter(
                f"nothing begins between these times; the trace is {whole.length_us / 1e6:g} s long",
                param_hint="--start, --stop",
            )
    found = totals(timeline.files)
    if output is not None:
        _write_merged(timeline, output)
    if svg is not None:
        _draw(timeline, svg)
    if as_json:
        render.json(_to_json(timeline, found))
    else:
        _show(timeline, found)
    for file in files:
        if file.dropped:
            count = render.plural(file.dropped, "event")
            render.message(f"note: {render.clean(file.path)}: {count} not recorded, for lack of room")
    return exit_codes.GOOD


def _microseconds(seconds: float | None, option: str) -> int | None:
    if seconds is None:
        return None
    if not seconds >= 0:  # "nan" is a number to the parser, and passes its lower bound
        raise typer.BadParameter("it must be a number of seconds", param_hint=option)
    return round(min(seconds, _LONGEST_S) * 1e6)


def _write_merged(timeline: Timeline, path: str) -> None:
    from ckptengine.tracing.merge import merged

    with open(path, "wb") as file:
        file.writelines(merged(timeline))
    render.message(f"{render.clean(path)}: open it at https://ui.perfetto.dev, or at chrome://tracing")


def _draw(timeline: Timeline, path: str) -> None:
    from ckptengine.tracing.picture import picture

    with open(path, "w", encoding="utf-8") as file:
        file.write(picture(timeline))


def _show(timeline: Timeline, found: list[Total]) -> None:
    ranks = {file.rank for file in timeline.files}
    hosts = {file.boot_id for file in timeline.files}
    facts = [
        ("began", render.human_time(timeline.began_us / 1e6)),
        ("length", f"{timeline.length_us / 1e6:.3f} s"),
        (
            "of",
            f"{render.plural(len(ranks), 'rank')}, {render.plural(len(timeline.files), 'trace')}, "
            f"{render.plural(len(hosts), 'machine')}",
        ),
    ]
    render.facts(facts)
    render.line()
    whole = [number for number, one in enumerate(found) if one.category == "whole"]
    # With one rank, it is the one that was longest at everything.
    left = [i for i in range(len(_COLUMNS)) if len(ranks) > 1 or i not in _OF_SEVERAL]
    rows = [_to_cells(one) for one in found]
    render.table([_COLUMNS[i] for i in left], [[row[i] for i in left] for row in rows], dim=whole)


def _to_cells(one: Total) -> list[str]:
    return [
        one.role,
        render.clean(one.category),
        render.clean(one.name),
        f"{one.count:,}",
        f"{one.seconds:.3f} s",
        f"{one.longest_seconds:.3f} s",
        str(one.longest_rank),
        render.human_nbytes(one.nbytes) if one.nbytes else "-",
        f"{render.human_nbytes(one.nbytes / one.seconds)}/s" if one.nbytes and one.seconds else "-",
    ]


def _to_json(timeline: Timeline, found: list[Total]) -> dict[str, Any]:
    return {
        "began": timeline.began_us / 1e6,
        "seconds": timeline.length_us / 1e6,
        "processes": [
            {
                "rank": file.rank,
                "role": file.role,
                "host": file.host,
                "os_pid": file.os_pid,
                "file": file.path,
                "events": len(file.spans),
                "dropped": file.dropped,
                "ended": file.ended,
            }
            for file in timeline.files
        ],
        "totals": [one.to_dict() for one in found],
    }
