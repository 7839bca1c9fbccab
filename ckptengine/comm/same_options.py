"""Do all ranks make this call with the same options?

Who does not would otherwise restore something else than the others, without a word, or wait for them in vain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ckptengine.comm.group import ranks_named
from ckptengine.errors import CheckpointError

_SHOWN = 200


class SameOptions:
    """Options that travel with a word that all ranks give anyway: `own`, then the coordinator's `summary`.

    problem: what is wrong if they differ. hint: for that error.
    """

    def __init__(self, problem: str, hint: str, options: Mapping[str, Any] | None = None) -> None:
        self._problem = problem
        self._hint = hint
        self.options = dict(options or {})

    def own(self) -> bytes:
        return msgspec.msgpack.encode({name: repr(value) for name, value in self.options.items()})

    def summary(self, values: list[bytes]) -> bytes:
        """The coordinator's. Raises `CheckpointError` with every option that differs, and on which ranks."""
        first = values[0]
        odd = next((rank for rank, value in enumerate(values) if value != first), None)
        if odd is None:
            return b""
        told = [msgspec.msgpack.decode(value, type=dict[str, str]) for value in values]
        problems = []
        for name in told[0]:
            ranks: dict[str, list[int]] = {}
            for rank, options in enumerate(told):
                ranks.setdefault(options[name], []).append(rank)
            if len(ranks) > 1:
                said = (f"{name}={value:.{_SHOWN}} on {ranks_named(those)}" for value, those in ranks.items())
                problems.append(", ".join(said))
        raise CheckpointError(f"{self._problem}: {'; '.join(problems)}", rank=odd, hint=self._hint)

    def learn(self, answer: bytes) -> None:
        """There is nothing to learn: all ranks raise, or all go on."""
