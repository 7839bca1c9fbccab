"""How does a checkpoint not fit a target, and how is all of it told at once?"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptengine.errors import StateMismatchError

_SHOWN = 20


@dataclass(slots=True)
class Differences:
    """All that does not fit, by name."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Values that each rank had its own of, each with the reason."""
    rename: dict[str, str] = field(default_factory=dict)
    """What would have others fit: the beginnings of names here, and those they were stored under."""
    needless: bool = False
    """Are names mapped that should not be?"""


def mismatch(
    found: Differences, strict: bool, path: str | None, rank: int | None, *, touched: bool
) -> StateMismatchError:
    """The error that lists all differences."""
    lines = [
        *found.refused,
        *found.mismatched,
        *(f"{name}: not in the checkpoint" for name in found.missing if strict),
        *(f"{name}: only in the checkpoint" for name in found.unexpected if strict),
    ]
    shown = lines[:_SHOWN]
    if len(lines) > _SHOWN:
        shown.append(f"and {len(lines) - _SHOWN} more")
    hint = None
    if found.refused:
        hint = (
            "of values that each rank had its own of, another number of ranks can take rank 0's or keep its "
            'own: restore(per_rank="rank0"), "drop", or by name, as {"rng": "drop", "*": "error"}'
        )
    elif found.needless:
        hint = "they were stored under the names that they have here: leave them out of `rename`"
    elif found.rename:
        hint = f"the names differ by a prefix only: pass rename={found.rename!r}"
    elif not found.mismatched:
        hint = "pass strict=False to leave keys that only one side has alone"
    condition = "may hold parts of a newer step, which is damaged" if touched else "is unchanged"
    places = "1 place" if len(lines) == 1 else f"{len(lines)} places"
    return StateMismatchError(
        f"the checkpoint does not fit the restore target, which {condition}, in {places}:\n  "
        + "\n  ".join(shown),
        missing=tuple(found.missing),
        unexpected=tuple(found.unexpected),
        mismatched=(*found.refused, *found.mismatched),
        path=path,
        rank=rank,
        hint=hint,
    )
