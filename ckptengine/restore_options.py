"""How is a restore to be done, and what of it must all ranks say alike?"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptengine.comm.same_options import SameOptions
from ckptengine.read.partial import ALL, Partial
from ckptengine.read.per_rank import PerRankPolicy

_SOME, _NONE = b"+", b"-"


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


class SameRestoreOptions(SameOptions):
    """For the word that the target has been read; its `options` come from `to_compare`.

    patterns: has this rank any? and then: has any rank?
    """

    def __init__(self) -> None:
        super().__init__(
            "the ranks call restore with different options",
            "give all ranks the same; include, exclude, rename and priority alone may be each rank's own",
        )
        self.patterns = False

    def own(self) -> bytes:
        return (_SOME if self.patterns else _NONE) + super().own()

    def summary(self, values: list[bytes]) -> bytes:
        super().summary([value[len(_SOME) :] for value in values])
        return _SOME if any(value.startswith(_SOME) for value in values) else _NONE

    def learn(self, answer: bytes) -> None:
        self.patterns = answer == _SOME
