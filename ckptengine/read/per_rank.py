"""What becomes of the values that each rank had of its own, if another number of ranks restores them?

Nothing is assumed: a policy says it, for all of them or by name. Which values these are is written in INDEX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, get_args

from ckptengine.format.per_rank import PerRank
from ckptengine.read.patterns import matches

Choice = Literal["error", "rank0", "drop"]
CHOICES: tuple[Choice, ...] = get_args(Choice)

PerRankSpec = Choice | Mapping[str, Choice]
"""A choice for all values, or by patterns of names (see `patterns.matches`), of which the first that matches
counts; `"error"` where none does."""

ALL = "*"


@dataclass(frozen=True, slots=True)
class PerRankPolicy:
    """rules: pattern and choice, in the order in which they are tried."""

    rules: tuple[tuple[str, Choice], ...] = ((ALL, "error"),)

    @classmethod
    def of(cls, spec: object) -> PerRankPolicy:
        """Raises `ValueError` for what is no choice, `TypeError` for what is neither text nor a mapping of
        it."""
        if isinstance(spec, str):
            spec = {ALL: spec}
        if not isinstance(spec, Mapping) or not all(isinstance(pattern, str) for pattern in spec):
            raise TypeError(
                f"per_rank is one of {', '.join(map(repr, CHOICES))}, or a dict from patterns of names to "
                f"these, not {spec!r:.200}"
            )
        unknown = [choice for choice in spec.values() if choice not in CHOICES]
        if unknown:
            raise ValueError(f"per_rank is one of {', '.join(map(repr, CHOICES))}, not {unknown[0]!r:.200}")
        return cls(tuple(spec.items()))

    @property
    def spec(self) -> PerRankSpec:
        """What it was made of, as one word where that says all."""
        (pattern, choice), *others = self.rules or ((ALL, "error"),)
        return choice if pattern == ALL and not others else dict(self.rules)

    @property
    def patterns(self) -> list[str]:
        """Those that mean something by its name."""
        return [pattern for pattern, _ in self.rules if pattern != ALL]

    def choice(self, name: str) -> Choice:
        """For a value that ranks do not hold alike."""
        return next((choice for pattern, choice in self.rules if matches(pattern, name)), "error")

    def drops(self, name: str) -> bool:
        """Is a value dropped that is not known to differ? Only if a pattern means it, and not just all.

        One rank alone holds everything alike, also what is each rank's own as soon as there are two.
        """
        for pattern, choice in self.rules:
            if matches(pattern, name):
                return choice == "drop" and pattern != ALL
        return False


class PerRankChoices:
    """Is asked for each value that is about to be restored, and keeps what it has answered.

    known: which values ranks do not hold alike.
    """

    def __init__(self, policy: PerRankPolicy, known: PerRank) -> None:
        self._policy = policy
        self._known = known
        self._names = known.names
        self._asked: set[str] = set()
        self.refused: list[str] = []
        self.from_rank0: list[str] = []
        self.dropped: list[str] = []

    def drop(self, name: str) -> bool:
        """Is the value to stay as the target has it? If not, rank 0's is taken, or all that is refused is
        raised together, before anything is changed."""
        if name in self._names:
            self._asked.add(name)
            choice = self._policy.choice(name)
            kept = {"error": self.refused, "rank0": self.from_rank0, "drop": self.dropped}[choice]
            kept.append(name)
            return choice != "rank0"
        if self._policy.drops(name):
            self.dropped.append(name)
            return True
        return False

    def drop_together(self, path: str, names: list[str]) -> bool:
        """The same for values that belong together, as those of an object do: none is taken, or all are.

        names: of all values below `path`.
        """
        own = [name for name in names if name in self._names]
        self._asked.update(own)
        choices = {self._policy.choice(name) for name in own}
        choices.update("drop" for name in names if name not in self._names and self._policy.drops(name))
        if self._kept(path, own, choices):
            return True
        self.from_rank0 += own
        return False

    def absent(self, path: str) -> bool:
        """Has the policy a say in it that rank 0 has nothing at `path`, as other ranks do?

        If so, the target's stays, or it is refused. Rank 0's is not to be had.
        """
        names = self._some_ranks(path)
        choices = {self._policy.choice(name) for name in names}
        self._asked.update(names)
        return self._kept(path, names, choices)

    def _kept(self, path: str, names: Sequence[str], choices: Set[str]) -> bool:
        """Whether the target's stays, by the policy's choices for what differs at `path`; notes what of it is
        refused, or else that it is dropped."""
        if "error" in choices:
            self.refused += [name for name in names if self._policy.choice(name) == "error"]
            return True
        if "drop" in choices:
            self.dropped.append(path)
            return True
        return False

    def superfluous(self, path: str) -> bool:
        """The same where rank 0 has something at `path` that the target has no place for."""
        names = self._some_ranks(path)
        self._leave(names)
        return bool(names)

    def finish(self, selects: Callable[[str], bool] = lambda name: True) -> None:
        """After all questions: of what some other ranks hold, rank 0 does not and the target neither, nobody
        has asked. selects: is the name one of those that are to be restored?"""
        self._leave(sorted(filter(selects, self._known.some_ranks - self._asked)))

    def _leave(self, names: list[str]) -> None:
        """Values for which there is no place."""
        self._asked.update(names)
        for name in names:
            (self.refused if self._policy.choice(name) == "error" else self.dropped).append(name)

    def _some_ranks(self, path: str) -> list[str]:
        names = self._known.some_ranks
        return sorted(name for name in names if name == path or name.startswith(f"{path}."))

    def reason(self, name: str) -> str:
        """Why a value is refused, for an error that lists it."""
        if name in self._known.some_ranks:
            return f"{name}: only some of the ranks that saved it have it"
        return f"{name}: each rank that saved it had its own"
