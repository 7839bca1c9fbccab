"""A process that saves, and tells by how much its and its writer's memory grew beside the arena at the peak.

    python -m native_bench.save_peak ROOT CODEC PAGES NBYTES SAVES

One JSON object: `trainer` and `writer`, bytes each; `arena`, its bytes; `huge`, whether it came in huge
pages. PAGES: `huge`, as the engine asks for them; `small`, as where the machine has none to give.

The peaks are those that the kernel keeps (`VmHWM`), set back just before a save: none is too short for it. It
counts the arena, too, of which all pages are mapped in both processes from the first save on; so that one is
not measured, and what is shared is taken off. The two processes need not be at their peaks at once: the sum
is what they have at most. What a process had before its first save is not counted: the interpreter, torch and
the state.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ckptengine as ck
from ckptengine.staging import pool

PAGES = {"huge": "as the machine gives them", "small": "of 4 KiB"}


class Peak:
    """Of a process's memory that is not shared with another one, from here on: bytes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._shared = memory_of(pid)["RssShmem"]
        Path(f"/proc/{pid}/clear_refs").write_text("5")

    def nbytes(self) -> int:
        """At least as much as there was at the peak, if what is shared has only grown, or only shrunk."""
        now = memory_of(self._pid)
        return now["VmHWM"] - min(self._shared, now["RssShmem"])


def memory_of(pid: int) -> dict[str, int]:
    """VmHWM: the peak of what is resident; RssAnon, RssFile, RssShmem: what is, by kind. Bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = (line.split() for line in lines if line.startswith(("VmHWM:", "Rss")))
    return {name[:-1]: int(kib) << 10 for name, kib, _ in values}


def state_of(nbytes: int) -> dict[str, torch.Tensor]:
    """Eight tensors that compress as weights do, so that frames are about as long as what they hold."""
    values = torch.randn(nbytes // 8 // 4) * 0.02
    return {f"t{i}": values.clone() for i in range(8)}


def peaks(
    root: str, codec: Any, pages: str, nbytes: int, saves: int, during: Callable[[int], None] | None = None
) -> dict[str, int]:
    """The largest of `saves` saves. during: called with the writer's process ID while each of them runs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if pages == "small":
        pool.Arena = functools.partial(pool.Arena, try_huge=False)  # type: ignore[misc,assignment]
    state = state_of(nbytes)
    with ck.Checkpointer(root, config=ck.Config(codec=codec, keep_last=1)) as ckpt:
        # The writer process with what it imports, and nothing that depends on the state's size.
        ckpt.save(0, {"nothing": None})
        writer = ckpt.writer_pid
        assert writer is not None
        pids = {"trainer": os.getpid(), "writer": writer}
        before = {}
        for process, pid in pids.items():
            memory = memory_of(pid)
            before[process] = memory["RssAnon"] + memory["RssFile"]
        most = dict.fromkeys(pids, 0)
        for step in range(1, 2 + saves):
            watched = {process: Peak(pid) for process, pid in pids.items()}
            handle = ckpt.async_save(step, state)
            if during is not None:
                during(writer)
            handle.result()
            if step > 1:
                for process, peak in watched.items():
                    most[process] = max(most[process], peak.nbytes() - before[process])
        arenas = ckpt._saver._pool
        largest = max(arenas._free, key=lambda arena: arena.capacity)
        return {**most, "arena": arenas.nbytes, "huge": largest.huge}


if __name__ == "__main__":
    root, codec, pages, nbytes, saves = sys.argv[1:]
    print(json.dumps(peaks(root, codec, pages, int(nbytes), int(saves))))
