"""How do the processes of one group run a task, and what did they find?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_group(
    module: str, arguments: Sequence[str], world: int, quick: bool, results: Path, deadline_s: float
) -> dict[str, list[float]]:
    """Let `world` processes run `python -m module *arguments RANK QUICK`, each on one thread. Returns the
    figures that one of them has written to `results`; none if none has.

    Raises RuntimeError with the last they said if one failed, subprocess.TimeoutExpired if one takes longer
    than `deadline_s`. None outlives this.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = results.with_suffix(".log")
    with log.open("wb") as out:
        processes = [
            subprocess.Popen([*command, str(rank), str(int(quick))], env=env, stdout=out, stderr=out)
            for rank in range(world)
        ]
    try:
        for process in processes:
            process.wait(deadline_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{results.stem}: {log.read_text(errors='replace').strip()[-500:]}")
    found: dict[str, list[float]] = json.loads(results.read_text()) if results.exists() else {}
    return found
