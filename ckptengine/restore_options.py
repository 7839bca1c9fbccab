"""How is a restore to be done, and what of it must all ranks say alike?"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptengine.comm.same_options import SameOptions
from ckptengine.read.partial import ALL, Partial
from ckptengine.read.per_rank import PerRankPolicy


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """See `Checkpointer.restore`."""

    strict: bool = True
    verify: bool = True
    per_rank: PerRankPolicy = field(default_factory=PerRankPolicy)
    partial: Partial = ALL

    def to_compare(self, step: int | None, *, streaming: bool) -> dict[str, object]:
        """What must be the same on all ranks, by its name in `Checkpointer.restore`.

        Not what speaks of the names in a rank's own target: the stages of a pipeline have their own.
        """
        return {
            "step": step,
            "strict": bool(self.strict),
            "verify": bool(self.verify),
            "per_rank": self.per_rank.spec,
            "parameters_only": bool(self.partial.parameters_only),
            "cast": bool(self.partial.cast),
            "streaming": streaming,
        }


def same_restore_options() -> SameOptions:
    """For the word that the target has been read; its `options` come from `to_compare`."""
    return SameOptions(
        "the ranks call restore with different options",
        "give all ranks the same; include, exclude, rename and priority alone may be each rank's own",
    )
