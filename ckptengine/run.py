"""Which facts of a Checkpointer stay the same for its whole life?"""

from __future__ import annotations

from dataclasses import dataclass

from ckptengine.comm.group import COORDINATOR
from ckptengine.config import Config
from ckptengine.format.names import RunId
from ckptengine.write.messages import TransportSpec


@dataclass(frozen=True)
class Run:
    """The facts of one Checkpointer that do not change. `root` is absolute."""

    root: str
    rank: int
    world_size: int
    config: Config
    run: RunId
    spec: TransportSpec
    trace: str | None = None
    """Where this process is traced to, and its writer is to be."""

    @property
    def is_coordinator(self) -> bool:
        return self.rank == COORDINATOR
