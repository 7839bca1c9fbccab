"""Writes the golden checkpoints of the current format: `python -m tests.golden.make DIRECTORY`.

They are committed as they were written and never written again (README.md): use it for a new directory only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ckptengine as ck
from tests.golden import expected

CODECS = ("raw", "zstd")


def write(directory: Path, rank: int, rendezvous: str) -> None:
    """As one rank of those that save together."""
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=expected.WORLD_SIZE
    )
    mesh = init_device_mesh("cpu", (expected.WORLD_SIZE,))
    for codec in CODECS:
        config = ck.Config(block_nbytes=4096, codec=codec)  # type: ignore[arg-type]
        with ck.Checkpointer(directory / codec, config=config) as ckpt:
            state = expected.saved_state(rank, mesh)
            ckpt.save(expected.STEP, state, metadata=expected.METADATA)
    dist.destroy_process_group()


def main(directory: Path) -> None:
    if directory.exists():
        sys.exit(f"{directory} is there already, and what is golden is not written again")
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "tests.golden.make", str(directory)]
        ranks = [
            subprocess.Popen([*command, str(rank), f"{scratch}/group"]) for rank in range(expected.WORLD_SIZE)
        ]
        if [rank for rank in ranks if rank.wait() != 0]:
            sys.exit("a rank failed")
    with ck.Checkpointer(directory / "dtypes", config=ck.Config(block_nbytes=4096)) as ckpt:
        ckpt.save(expected.STEP, expected.exotic_state(), metadata=expected.METADATA)
    with ck.Checkpointer(directory / "planes", config=ck.Config(block_nbytes=4096, codec="zstd")) as ckpt:
        ckpt.save(expected.STEP, expected.compressible_state(), metadata=expected.METADATA)
    for path in sorted(directory.rglob("MANIFEST.json")):
        print(path.parent.relative_to(directory), ck.verify(path.parent).fingerprint)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        write(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
