"""How do the processes of one group run a task, and what did they find?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LOOK_S = 0.02
LAST_WORDS_CHARS = 500


def run_group(
    module: str, arguments: Sequence[str], world: int, quick: bool, results: Path, deadline_s: float
) -> dict[str, list[float]]:
    """Let `world` processes run `python -m module *arguments RANK QUICK`, each on one thread. Returns the
    figures that one of them has written to `results`; none if none has.

    Raises RuntimeError as soon as one fails, whatever the others do, with which one it is, how it ended, and
    the last it said; subprocess.TimeoutExpired if they have not all ended `deadline_s` after they were
    started. None outlives this.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [results.with_suffix(f".{rank}.log") for rank in range(world)]
    deadline = time.monotonic() + deadline_s
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as out:
                processes.append(
                    subprocess.Popen([*command, str(rank), str(int(quick))], env=env, stdout=out, stderr=out)
                )
        while True:
            codes = [process.poll() for process in processes]
            # Of several, the others may have failed because the first one did: the reader will see.
            if failed := [rank for rank, code in enumerate(codes) if code]:
                told = (f"rank {rank} {_how_ended(codes[rank])}{_last_words(logs[rank])}" for rank in failed)
                raise RuntimeError(f"{results.stem}: {'; '.join(told)}")
            if all(code == 0 for code in codes):
                break
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(command, deadline_s)
            time.sleep(LOOK_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found: dict[str, list[float]] = json.loads(results.read_text()) if results.exists() else {}
    return found


def _how_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"


def _last_words(log: Path) -> str:
    words = log.read_text(errors="replace").strip()[-LAST_WORDS_CHARS:]
    return f": {words}" if words else ""
