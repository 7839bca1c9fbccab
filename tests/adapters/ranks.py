"""Runs functions in several processes that are one gloo group, and tells how each ended."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

GROUP_TIMEOUT_S = 60
ROOT = Path(__file__).parents[2]


def run_ranks(
    directory: Path, module: str, cases: list[str], *, world_size: int = 2, timeout_s: float = 110
) -> dict[str, str]:
    """Call `module.<case>()` for each case, in order, on every rank. Returns case → what went wrong, "" if
    nothing did.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.adapters.ranks",
        str(directory),
        module,
        str(world_size),
    ]
    processes = []
    logs = []
    try:
        for rank in range(world_size):
            log = (directory / f"log-{rank}").open("wb")
            logs.append(log)
            processes.append(
                subprocess.Popen([*command, str(rank), *cases], env=env, cwd=ROOT, stdout=log, stderr=log)
            )
        for process in processes:
            process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    outcome = dict.fromkeys(cases, "")
    for rank in range(world_size):
        path = directory / f"results-{rank}"
        results = json.loads(path.read_text()) if path.exists() else {}
        for case in cases:
            text = results.get(case, "did not run: " + (directory / f"log-{rank}").read_text()[-4000:])
            if text:
                outcome[case] += f"rank {rank}: {text}\n"
    return outcome


def _main(directory: Path, module: str, world_size: int, rank: int, cases: list[str]) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/group",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    functions = importlib.import_module(module)
    results: dict[str, str] = {}
    for case in cases:
        try:
            getattr(functions, case)()
            results[case] = ""
        except BaseException:
            results[case] = traceback.format_exc()
        partial = directory / f"results-{rank}.partial"
        partial.write_text(json.dumps(results))
        partial.replace(directory / f"results-{rank}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
