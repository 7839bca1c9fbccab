"""Which parcels are meant by what somebody waits for, a module or the names of tensors?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptengine.adapters.gates import memory_of_module
from ckptengine.adapters.holders import Holder
from ckptengine.adapters.parcels import Parcels
from ckptengine.read.patterns import matches, patterns_of


def parcels_meant(what: Any, parcels: Parcels, holders: Iterable[Holder]) -> list[int]:
    """what: a module, for all that is in it, or one or several patterns of FQNs. holders: all modules of the
    state.

    Raises `ValueError` for a pattern that nothing has, and for a module that is not of the state; `TypeError`
    for what is neither.
    """
    memory = memory_of_module(what)
    if memory is not None:
        held = parcels.holding(memory)
        if not held and not any(one.module is what for one in holders):
            raise ValueError(
                f"nothing is restored to this {type(what).__name__}, which is no module of the state"
            )
        return held
    wanted: list[int] = []
    for pattern in patterns_of(what, "what to wait for"):
        found = [parcel for name, parcel in parcels.of_name.items() if matches(pattern, name)]
        if not found:
            raise ValueError(f"nothing that is restored is called {pattern!r}")
        wanted += [parcel for parcel in found if parcel is not None]
    return wanted
