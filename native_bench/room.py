"""Has the machine room for a case? Memory for all systems that wait beside each other, and disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckptengine.storage.headroom import available_memory
from native_bench.cases import GIB, Case
from native_bench.peers import make

EXPENDABLE = ("engine-sync", "engine-overlap")
"""Systems that keep memory between two saves, in the order in which they are left out where it is short."""

WORKER_NBYTES = 144 << 20
"""What a worker's libraries and helper processes keep for themselves: 125 MiB on average of all systems, as
they share what the nursery has imported."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a case takes. least: what nothing can be measured without; typical: with what the hungriest
    system takes in its turn and, where it reads from the page cache, that. available: now; None: the kernel
    does not tell."""

    least: int
    typical: int
    available: int | None

    @property
    def told(self) -> str:
        left = "unknown" if self.available is None else f"{self.available / GIB:.1f} GiB"
        return (
            f"about {self.typical / GIB:.1f} GiB of memory, and not with less than {self.least / GIB:.1f}; "
            f"available when it began, to this machine or its cgroup: {left}"
        )


def memory_of(case: Case, nbytes: int, systems: Iterable[str]) -> Memory:
    """What measuring these systems takes. nbytes: of all ranks' states."""
    holds = [make(name).traits.holds for name in systems]
    workers = len(holds) * case.world_size * WORKER_NBYTES
    # State and target, what one system allocates in its turn (measured with all systems: 1.6 times the state
    # at most), and the page cache of a file read hot.
    on_tmpfs = nbytes if case.place == "tmpfs" else 0
    return Memory(
        least=3 * nbytes + on_tmpfs + workers,
        typical=(5 + sum(holds)) * nbytes + on_tmpfs + workers + GIB,
        available=available_memory(),
    )


def that_fit(case: Case, nbytes: int, wanted: list[str]) -> tuple[list[str], dict[str, str]]:
    """The systems that memory suffices for, and why others are left out: those that keep a copy of the state
    go first.

    Raises OSError if nothing can be measured: the kernel would end a worker in the middle.
    """
    wanted = list(wanted)
    left_out: dict[str, str] = {}
    for name in EXPENDABLE:
        memory = memory_of(case, nbytes, wanted)
        if memory.available is None or memory.typical <= memory.available:
            return wanted, left_out
        if name in wanted:
            wanted.remove(name)
            left_out[name] = f"not enough memory ({memory.available / GIB:.0f} GiB available)"
    memory = memory_of(case, nbytes, wanted)
    if memory.available is not None and memory.available < memory.least:
        raise OSError(
            f"{case.name} takes {memory.told}; free some, raise the cgroup's limit, or measure less "
            "(--systems, --cases, --quick)"
        )
    return wanted, left_out


def check_space(directory: Path, nbytes: int, case: Case) -> None:
    """Only one checkpoint exists at a time, but some write their files twice, and the native write has its
    own."""
    needed = int(2.5 * nbytes) + (64 << 20)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            f"{case.name} needs {needed / GIB:.1f} GiB in {directory.parent}, "
            f"where {free / GIB:.1f} GiB are free"
        )
