"""Which fault is put in, where, and that it strikes once."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass


def current_life() -> int:
    """How often the launcher has restarted this job: 0 the first time."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@dataclass(frozen=True, slots=True)
class KillPlan:
    """SIGKILL the process of `rank` after `step`, once.

    Once means: in the launcher's first life. With `once_file` it means: while that file does not exist; the
    file is made just before the kill, so the fault does not come back when the whole job is launched again.
    """

    rank: int
    step: int
    once_file: str | None = None

    def is_due(self, *, rank: int, step: int, life: int) -> bool:
        if (rank, step) != (self.rank, self.step):
            return False
        return not os.path.exists(self.once_file) if self.once_file is not None else life == 0

    def strike(self) -> None:
        """End this process as a machine failure would: no handler runs, no buffer is flushed."""
        if self.once_file is not None:
            os.close(os.open(self.once_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        os.kill(os.getpid(), signal.SIGKILL)
