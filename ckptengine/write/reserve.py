"""How much memory must a save leave free beside its arena, so that its writer process finds what it needs?

The writer starts beside the first save: whoever asks whether an arena fits before that sees memory as free
that the writer is about to take, and then the kernel ends a process for it, likely the training.
"""

from __future__ import annotations

import mmap
import os

from ckptengine.codecs.zstd import context_nbytes
from ckptengine.config import Config
from ckptengine.errors import SaveFailedError
from ckptengine.format.limits import PAGE, round_up
from ckptengine.staging.arena import HINT
from ckptengine.storage.headroom import available_memory
from ckptengine.write.raw_block import buffer_nbytes

WRITER_NBYTES = 256 << 20
"""What a writer process takes for itself by its first task: the interpreter, torch and NVRx. With torch for
CPUs these are 150 MiB, for which its cgroup is charged 165; libraries for devices take more."""

AROUND_NBYTES = 16 << 20
"""What trainer and writer take for a save beside the writer's buffers: threads, the header, the commit. By
default these are 48 MiB, so that both stay within 64 MiB beside the arena."""


def working_nbytes(config: Config) -> int:
    """What trainer and writer take, at most, while a shard is written, given back with its end."""
    block = round_up(config.shard_block_nbytes, PAGE)
    if config.codec == "raw":
        threads = config.io_threads + config.io_threads // 2
        return threads * buffer_nbytes(block) + AROUND_NBYTES
    return config.io_threads * (block + context_nbytes(config.zstd_level, block)) + AROUND_NBYTES


def needed_nbytes(config: Config, pid: int | None, *, warm: bool = False) -> int:
    """What the next save's writer, and its trainer, will yet take beside the arena. Ask this before what is
    available: what a writer takes in between is then counted twice, and not left out.

    pid: of the writer process, None if there is none. warm: it has done its imports, so that it has what it
    takes for itself.
    """
    of_its_own = WRITER_NBYTES if pid is None else 0 if warm else max(WRITER_NBYTES - _own_nbytes(pid), 0)
    return of_its_own + working_nbytes(config)


def ranks_here() -> int:
    """The ranks of the job on this host, which save at once; 1 where the launcher does not tell."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(told), 1) if told.isdecimal() else 1


def check_room(needed: int, rank: int) -> None:
    """`SaveFailedError` if less than `needed` bytes are available to the writer process of `rank`."""
    available = available_memory()
    if available is not None and available < needed:
        raise SaveFailedError(
            f"no memory for the writer process: {available} bytes are available, and it needs {needed}",
            rank=rank,
            hint=HINT,
        )


def _own_nbytes(pid: int) -> int:
    """Resident memory that a process shares with no file and no other process; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            _, resident, shared, *_ = map(int, statm.read().split())
    except OSError:
        return 0
    return (resident - shared) * mmap.PAGESIZE
