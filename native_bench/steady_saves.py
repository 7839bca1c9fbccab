"""A job that trains a little and saves, many times, and tells what it and its writer hold.

    python -m native_bench.steady_saves ROOT SAVES SNAPSHOT CODEC

One JSON object a line: first with `state` (its bytes) and no save made, then after each save. Memory is in
bytes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptengine as ck

# 21 MiB, with the optimizer's state 64.
SIZES = [(1024, 1024)] * 5 + [(512, 512), (64, 64)]


def held_by(pid: int) -> dict[str, int]:
    """anonymous, shared: resident memory that is its own, and files' and the arenas'. fds, threads, shm: how
    many, of the last those that are named in /dev/shm."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    return {
        "anonymous": kib["Anonymous"] << 10,
        "shared": (kib["Rss"] - kib["Anonymous"]) << 10,
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "shm": Path(f"/proc/{pid}/maps").read_text().count("/dev/shm/"),
    }


def tell(ckpt: ck.Checkpointer, **more: int) -> None:
    gc.collect()
    writer = ckpt.writer_pid
    assert writer is not None
    held = {"trainer": held_by(os.getpid()), "writer": held_by(writer), "arenas": ckpt._saver._pool.nbytes}
    print(json.dumps(held | more), flush=True)


def main(root: str, saves: int, snapshot: Any, codec: Any) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in SIZES)
    # Steps that allocate nothing: what is measured is what the saves do.
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"train": ck.training_state(model, optimizer), "step": 0}
    nbytes = 3 * sum(parameter.nbytes for parameter in model)
    with ck.Checkpointer(root, config=ck.Config(snapshot=snapshot, codec=codec, keep_last=1)) as ckpt:
        # The writer process with what it imports, and nothing that depends on the state's size.
        ckpt.save(0, {"nothing": None})
        tell(ckpt, state=nbytes)
        for number in range(1, saves + 1):
            handle = ckpt.async_save(number, state)
            optimizer.step()
            handle.result()
            tell(ckpt)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
