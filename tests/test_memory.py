"""How much memory does a restore need beside the target? Measured in processes that do nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ranks import ENVIRONMENT

MIB = 1 << 20
POOL_NBYTES = 256 * MIB

RESTORE = """
import sys, threading, time
import psutil, torch
from ckptengine import Checkpointer

root, layout, n, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rows = nbytes // n // 4096
me = psutil.Process()

def target():
    if layout == "straight":
        return {f"t{i}": torch.full((rows, 1024), -1.0) for i in range(n)}
    return {f"t{i}": torch.full((1024, rows), -1.0).t() for i in range(n)}

with Checkpointer(root) as ckpt:
    state = target()
    before = me.memory_info().rss
    peak, done = before, False
    def watch():
        global peak
        while not done:
            peak = max(peak, me.memory_info().rss)
            time.sleep(0.001)
    watcher = threading.Thread(target=watch)
    watcher.start()
    ckpt.restore(state)
    done = True
    watcher.join()
for i in range(n):
    rows_of = state[f"t{i}"]
    assert torch.equal(rows_of[:, 7], torch.arange(rows) + float(i)), i
print(peak - before)
"""

SAVE = """
import sys
import torch
from ckptengine import Checkpointer, Config
root, codec, n, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rows = nbytes // n // 4096
ramp = torch.arange(rows).view(-1, 1).expand(rows, 1024)
state = {f"t{i}": ramp + float(i) for i in range(n)}
if codec == "zstd":
    for tensor in state.values():
        tensor[:, 100:900] = torch.randn(rows, 800)
with Checkpointer(root, config=Config(codec=codec)) as ckpt:
    ckpt.save(1, state)
"""


N = 8
NBYTES = 512 * MIB


def run(script: str, *args: object) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("codec", ["raw", pytest.param("zstd", marks=[pytest.mark.slow, pytest.mark.sample])])
def test_a_restore_needs_no_more_than_its_pool_beside_the_target(tmp_path: Path, codec: str) -> None:
    run(SAVE, tmp_path, codec, N, NBYTES)
    for layout in ("straight", "turned"):
        peak = int(run(RESTORE, tmp_path, layout, N, NBYTES))
        assert peak <= POOL_NBYTES, f"{layout}: {peak / MIB:.0f} MiB"
        print(f"{codec}, {layout}: {peak / MIB:.0f} MiB beside a target of {NBYTES // MIB} MiB")
