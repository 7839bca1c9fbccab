"""Which patterns of a restore has no name, on any rank?

Such a pattern is a slip as a rule: what was to be spared is overwritten, what was to come is not asked for.
But ranks that share their patterns have different names, and scripts that share them different models. So all
ranks together are looked at, and it is an error only where something was asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import msgspec

from ckptengine.comm.group import Group
from ckptengine.read.patterns import matches

logger = logging.getLogger(__name__)

Given = tuple[str, str]
"""An option of `Checkpointer.restore`, and a pattern that it has."""

ASKS = "include"
"""The option with which something is asked for."""


class _Told(msgspec.Struct, frozen=True, array_like=True):
    given: list[Given]
    unmatched: list[Given]


def without(patterns: Iterable[Given], names: Sequence[str]) -> list[Given]:
    """The patterns that none of the names has."""
    return [one for one in patterns if not any(matches(one[1], name) for name in names)]


def on_no_rank(group: Group, given: Iterable[Given], unmatched: Iterable[Given]) -> list[Given]:
    """The patterns that no rank has a name for which was given them. The same on all ranks, which all call
    it."""
    told = msgspec.msgpack.encode(_Told(list(given), list(unmatched)))
    ranks = group.gather_all(told, what="comparing the patterns with all names")
    all_told = [msgspec.msgpack.decode(one, type=_Told) for one in ranks]
    matched = {one for told in all_told for one in told.given if one not in told.unmatched}
    return list(dict.fromkeys(one for told in all_told for one in told.unmatched if one not in matched))


def as_errors(unmatched: Iterable[Given]) -> list[str]:
    """For an error's list: those with which something was asked for."""
    return [
        f"{option}={pattern!r}: nothing is called that, on any rank"
        for option, pattern in unmatched
        if option == ASKS
    ]


def warn(step: int, unmatched: Sequence[Given]) -> None:
    if unmatched:
        said = ", ".join(f"{option}={pattern!r}" for option, pattern in unmatched)
        logger.warning("restoring step %d: nothing is called that, on any rank: %s", step, said)
