"""Which part of a state is restored, and under which names was it stored?

Names are the target's: the keys joined with dots, as in errors and in `RestoreInfo`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ckptengine.read.patterns import matches, matches_any, patterns_of

Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Partial:
    """include: patterns (see `patterns.matches`) of what is restored; None: everything. exclude: of what is
    not, though it is included. parameters_only: just the parameters of modules, and tensors that are
    parameters.

    rename: from a name here to the name it was stored under. A mapping is of whole names, or of the first
    part of names up to a dot, of which the longest counts: `{"model": "model.module"}`. cast: floating-point
    tensors may have been stored in another floating-point dtype.
    """

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    parameters_only: bool = False
    rename: Callable[[str], str] | None = None
    cast: bool = False
    _known: dict[str, bool] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        *,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = (),
        parameters_only: bool = False,
        rename: Rename | None = None,
        cast: bool = False,
    ) -> Partial:
        """Raises `TypeError` for what is none of these."""
        if rename is not None and not callable(rename):
            rename = _ByPrefix(rename)
        return cls(
            None if include is None else patterns_of(include, "include"),
            patterns_of(exclude, "exclude"),
            parameters_only,
            rename,
            cast,
        )

    @property
    def is_all(self) -> bool:
        """Is everything restored?"""
        return self.include is None and not self.exclude and not self.parameters_only

    def selects(self, name: str) -> bool:
        """By its name."""
        if self.include is None and not self.exclude:
            return True
        known = self._known.get(name)
        if known is None:
            known = (self.include is None or matches_any(self.include, name)) and not matches_any(
                self.exclude, name
            )
            self._known[name] = known
        return known

    def patterns(self) -> list[tuple[str, str]]:
        """What was given, each as the option and the pattern; of `rename`, the names of a mapping."""
        mapped = self.rename.names if isinstance(self.rename, _ByPrefix) else ()
        given = {"include": self.include or (), "exclude": self.exclude, "rename": mapped}
        return [(option, pattern) for option, patterns in given.items() for pattern in patterns]

    def unmatched(self) -> list[tuple[str, str]]:
        """Those of `patterns` that none of the names had that were asked for so far."""
        used = self.rename.used if isinstance(self.rename, _ByPrefix) else set()
        return [
            (option, pattern)
            for option, pattern in self.patterns()
            if (
                pattern not in used
                if option == "rename"
                else not any(matches(pattern, name) for name in self._known)
            )
        ]

    def stored_name(self, name: str) -> str:
        """Raises `TypeError` if `rename` does not give text."""
        if self.rename is None:
            return name
        stored = self.rename(name)
        if not isinstance(stored, str):
            raise TypeError(f"rename gave {stored!r:.80} for {name!r}, not a name")
        return stored

    def __str__(self) -> str:
        said = {"include": self.include, "exclude": self.exclude or None}
        texts = [f"{what}={list(patterns)}" for what, patterns in said.items() if patterns is not None]
        return ", ".join([*texts, *(["parameters_only=True"] if self.parameters_only else [])])


ALL = Partial()


def other_prefix(here: Collection[str], stored: Collection[str]) -> tuple[str, str] | None:
    """If all of `here` was stored, but with another beginning: that beginning here, and as stored. Either may
    be empty."""
    first = next(iter(here), None)
    if first is None or first in stored:
        return None
    parts = first.split(".")
    known = set(stored)
    for name in stored:
        others = name.split(".")
        alike = 0
        while alike < min(len(parts), len(others)) and parts[-1 - alike] == others[-1 - alike]:
            alike += 1
        if not alike:
            continue
        begin, there = (_beginning(one[: len(one) - alike]) for one in (parts, others))
        if all(one.startswith(begin) and there + one[len(begin) :] in known for one in here):
            return begin.removesuffix("."), there.removesuffix(".")
    return None


def _beginning(parts: list[str]) -> str:
    return "".join(f"{part}." for part in parts)


class _ByPrefix:
    """From a name to that with another beginning; the longest of those that are mapped counts.

    used: which of them were the beginning of a name that was asked for.
    """

    def __init__(self, rename: object) -> None:
        if not isinstance(rename, Mapping) or not all(
            isinstance(text, str) for pair in rename.items() for text in pair
        ):
            raise TypeError(
                "rename is a function from a name here to the stored one, or a mapping of names or their "
                f"first parts, not {rename!r:.200}"
            )
        self._pairs: list[tuple[str, str]] = sorted(rename.items(), key=lambda pair: -len(pair[0]))
        self.names = tuple(rename)
        self.used: set[str] = set()

    def __call__(self, name: str) -> str:
        having = [pair for pair in self._pairs if not pair[0] or f"{name}.".startswith(f"{pair[0]}.")]
        self.used.update(here for here, _ in having)
        if not having:
            return name
        here, there = having[0]
        rest = name[len(here) + 1 :] if here else name
        return ".".join(filter(None, (there, rest))) if rest else there
