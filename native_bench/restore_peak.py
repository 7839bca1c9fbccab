"""A process that restores, and tells by how much its resident memory grew beyond its target at the peak.

    python -m native_bench.restore_peak save ROOT CODEC TENSORS NBYTES
    python -m native_bench.restore_peak restore ROOT LAYOUT TENSORS NBYTES

`restore` prints the bytes. LAYOUT: `straight`, as the tensors lie in the checkpoint, or `turned`, transposed,
so that none can be read in place.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch

from ckptengine import Checkpointer, Config

COLUMNS = 1024


def save(root: str, codec: str, tensors: int, nbytes: int) -> None:
    rows = nbytes // tensors // COLUMNS // 4
    ramp = torch.arange(rows).view(-1, 1).expand(rows, COLUMNS)
    state = {f"t{i}": ramp + float(i) for i in range(tensors)}
    if codec == "zstd":
        for tensor in state.values():
            tensor[:, 100:900] = torch.randn(rows, 800)
    with Checkpointer(root, config=Config(codec=codec)) as ckpt:  # type: ignore[arg-type]
        ckpt.save(1, state)


def restore(root: str, layout: str, tensors: int, nbytes: int) -> int:
    rows = nbytes // tensors // COLUMNS // 4
    if layout == "straight":
        state = {f"t{i}": torch.full((rows, COLUMNS), -1.0) for i in range(tensors)}
    else:
        state = {f"t{i}": torch.full((COLUMNS, rows), -1.0).t() for i in range(tensors)}
    with Checkpointer(root) as ckpt:
        before = resident()
        peak, done = before, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.is_set():
                peak = max(peak, resident())
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            ckpt.restore(state)
        finally:
            done.set()
            watcher.join()
    for i in range(tensors):
        if not torch.equal(state[f"t{i}"][:, 7], torch.arange(rows) + float(i)):
            raise AssertionError(f"t{i} came back as something else")
    return peak - before


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    what, root, how, tensors, nbytes = sys.argv[1:]
    if what == "save":
        save(root, how, int(tensors), int(nbytes))
    else:
        print(restore(root, how, int(tensors), int(nbytes)))
