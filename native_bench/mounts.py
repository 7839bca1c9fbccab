"""Which file system, with which options, on which device, does a path lie on?"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo, as far as it matters, and the block device's own settings."""

    point: str
    file_system: str
    source: str
    options: str
    """Those of the mount, then those of the file system."""
    device: str | None
    """Block device with scheduler, kind and readahead; None for network and memory file systems."""


def mount_of(path: str | os.PathLike[str], mountinfo: Path = MOUNTINFO) -> Mount:
    """The mount that holds an absolute, resolved `path`. Unknown fields are "?" where /proc tells nothing."""
    best: Mount | None = None
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 6 or len(tail) < 3:
            continue
        point = _unescape(fields[4])
        # The longest mount point wins, and the last of the equals: it lies over the earlier ones.
        if Path(path).is_relative_to(point) and (best is None or len(point) >= len(best.point)):
            best = Mount(
                point=point,
                file_system=tail[0],
                source=_unescape(tail[1]),
                options=f"{fields[5]}; {tail[2]}",
                device=_device(fields[2]),
            )
    return best or Mount("?", "?", "?", "?", None)


def _unescape(text: str) -> str:
    """mountinfo writes spaces, tabs, line ends and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _device(numbers: str) -> str | None:
    node = Path("/sys/dev/block", numbers)
    if not node.exists():
        return None
    real = node.resolve()
    # A partition has its disk's queue.
    queue = real / "queue" if (real / "queue").is_dir() else real.parent / "queue"

    def setting(name: str) -> str:
        try:
            return (queue / name).read_text().strip()
        except OSError:
            return "?"

    scheduler = setting("scheduler").partition("[")[2].partition("]")[0] or "none"
    kind = {"0": "not rotational", "1": "rotational"}.get(setting("rotational"), "?")
    return f"{real.name} ({kind}, scheduler {scheduler}, readahead {setting('read_ahead_kb')} KiB)"
