"""How often is a system measured? The farther it is behind the engine, the less, to save minutes."""

from __future__ import annotations

from native_bench.results import System

FIGURES = ("save_s", "restore_cold_s", "restore_hot_s")


def enough(seen: System, engine: System | None, rounds: int, patience: float) -> str | None:
    """Why a system is not to be measured again, or None.

    seen: what is known of it, after `rounds` rounds; after none, what its untimed first turn has shown. It
    has enough when its rounds have taken `patience` times as long as one of the engine's, of the figures it
    has.
    """
    figures = [figure for figure in FIGURES if seen.rounds(figure)]
    own, engines = (
        sum(system.median(figure) or 0.0 for figure in figures) if system is not None else 0.0
        for system in (seen, engine)
    )
    if not engines or max(rounds, 1) * own <= patience * engines:
        return None
    which = f"stopped after {rounds}" if rounds else "only its first turn was measured"
    return f"{which}: {own / engines:.0f} × the engine's time"
