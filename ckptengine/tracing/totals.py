"""Who spent how long at what?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ckptengine.tracing.files import TraceFile

CATEGORIES = ("io", "cpu", "wait", "whole")
"""In the order of a table. What is `whole` contains other events, so it must not be added to them."""


@dataclass(frozen=True, slots=True)
class Total:
    """All events of one name, of all trainers or of all writers.

    seconds: of all threads of all ranks. longest_rank, longest_seconds: the rank that was longest at it, and
    how long its threads were. nbytes: 0 where the events have none.
    """

    role: str
    category: str
    name: str
    count: int
    ranks: int
    seconds: float
    longest_rank: int
    longest_seconds: float
    nbytes: int

    @property
    def gbps(self) -> float:
        """GB (1e9 bytes) for each second of a thread."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gbps": self.gbps}


def totals(files: Iterable[TraceFile]) -> list[Total]:
    """Trainers first, then by category; what took longest first."""
    count: dict[tuple[str, str, str], int] = {}
    nbytes: dict[tuple[str, str, str], int] = {}
    micros: dict[tuple[str, str, str], dict[int, int]] = {}
    for file in files:
        for span in file.spans:
            key = file.role, span.category, span.name
            count[key] = count.get(key, 0) + 1
            nbytes[key] = nbytes.get(key, 0) + span.nbytes
            ranks = micros.setdefault(key, {})
            ranks[file.rank] = ranks.get(file.rank, 0) + span.ended - span.began
    found = []
    for key, ranks in micros.items():
        longest = max(ranks, key=lambda rank: (ranks[rank], -rank))
        found.append(
            Total(
                *key,
                count[key],
                len(ranks),
                sum(ranks.values()) / 1e6,
                longest,
                ranks[longest] / 1e6,
                nbytes[key],
            )
        )
    return sorted(
        found, key=lambda one: (one.role, _order(one.category), one.category, -one.seconds, one.name)
    )


def _order(category: str) -> int:
    return CATEGORIES.index(category) if category in CATEGORIES else len(CATEGORIES)
