"""A job for torchrun that saves at every step and has two of its ranks killed in the middle of a save: first
rank 1, and in a later life the coordinator. Run with a directory and the number of steps."""

from __future__ import annotations

import glob
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import rendezvous

import ckptengine as ck
from ckptengine.format.names import shard_filename, step_dirname
from tests.adapters.fake import same
from tests.dist.cases import checkpointer, state_of, target_of
from tests.dist.trap_cases import SLOW
from tests.helpers.ranks import wait_until

VICTIMS = {2: 1, 3: 0}
"""Step → the rank that does not survive its first save."""
VALUES = 200_000


def main(directory: Path, steps: int) -> None:
    # torchrun's store remembers where gloo listened before a restart, and a rank that is quick tries there.
    store, rank, size = next(rendezvous("env://"))
    life = PrefixStore(f"life-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=life, rank=rank, world_size=size)
    with checkpointer(directory / "root", keep_last=2, **SLOW) as ckpt:
        state = target_of(rank, values=VALUES)
        try:
            begun = ckpt.restore(state).step
            assert same(state, state_of(begun, rank, values=VALUES))
        except ck.CheckpointNotFoundError:
            begun = 0
        print(f"rank {rank} goes on from step {begun}", flush=True)
        for step in range(begun + 1, steps + 1):
            killed = directory / f"killed-in-{step}"
            doomed = VICTIMS.get(step) == rank and not killed.exists()
            handle = ckpt.async_save(step, state_of(step, rank, values=VALUES))
            if doomed:
                killed.touch()
                shard = f"{directory}/root/{step_dirname(step)}/*/{shard_filename(rank, compressed=True)}"
                # Not Path.glob, which fails if an earlier attempt is removed while it looks.
                wait_until(lambda: glob.glob(shard))  # noqa: B023
                os.kill(os.getpid(), signal.SIGKILL)
            handle.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
