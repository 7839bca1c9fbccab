"""What happened when, as JSON lines that the demo and the tests read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Appends one JSON object a line: `event`, `time` (Unix seconds), `rank`, `life`, and the event's own.

    All ranks append to one file: each line is one write to a descriptor opened with O_APPEND, so lines do not
    mix, and what was written survives a SIGKILL of its writer. With no path, nothing is written.
    """

    def __init__(self, path: str | None, *, rank: int, life: int) -> None:
        self.rank, self.life = rank, life
        self._fd = -1
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        if self._fd >= 0:
            line = {"event": event, "time": time.time(), "rank": self.rank, "life": self.life, **fields}
            os.write(self._fd, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """All complete lines of an event file, in the order written; none if the file is not there yet."""
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
