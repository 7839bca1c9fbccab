"""Is a name, as tensors and values have it, meant by a pattern?"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate
from functools import cache


def matches(pattern: str, name: str) -> bool:
    """`*`, `?` and `[…]` as in file names, `*` across dots too; whatever is below what matches does as well.

    So `model.layers.3` means all of that layer, and `*.bias` every bias.
    """
    return _compiled((pattern,)).fullmatch(name) is not None


def matches_any(patterns: Iterable[str], name: str) -> bool:
    return _compiled(tuple(patterns)).fullmatch(name) is not None


def patterns_of(given: object, what: str) -> tuple[str, ...]:
    """One pattern, or several; `TypeError` for anything else. what: how an error calls them."""
    if isinstance(given, str):
        return (given,)
    patterns = tuple(given) if isinstance(given, Iterable) else None
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{what} is a pattern of names, or several, not {patterns or given!r:.200}")
    return patterns


@cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    # Nothing matches no patterns. translate() ends each with \Z, where here more may follow.
    each = [translate(pattern).removesuffix(r"\Z").removesuffix(r"\z") for pattern in patterns]
    return re.compile(rf"(?:{'|'.join(each)})(?:\..*)?" if each else "(?!)", re.DOTALL)
