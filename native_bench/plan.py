"""What is to be measured, and how often?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from native_bench.cases import Case


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    rounds: of every system. The slower it is, the earlier it stops: when its rounds have taken `patience`
    times as long as one of the engine's, unless the case names it, or one round took `round_s`; its first
    turn, which else is not counted, is all it has if that alone took so long. The report shows how often each
    was measured.
    deadline_s: for one save or restore of a GiB, and at least for one of anything; a system that needs longer
    has failed.
    warm: systems have an untimed turn first, in which memory is made, and restores are checked for which
    another system's are timed; without it only the engine has one.
    """

    mode: str
    cases: tuple[Case, ...]
    systems: tuple[str, ...]
    directory: Path
    rounds: int = 5
    patience: float = 6.0
    round_s: float = 45.0
    deadline_s: float = 120.0
    limits: bool = True
    warm: bool = True
