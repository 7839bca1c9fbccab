"""How far has a snapshot been taken? A number in shared memory, for which the writer process waits.

The trainer raises it as it copies, so that the first blocks are on their way to the disk while the last are
still being copied. Nothing counts before it is complete: a snapshot that was not taken to its end, or turned
out not to be one, is refused here, with the reason.
"""

from __future__ import annotations

import ctypes

MARK_NBYTES = 4096

_COMPLETE = (1 << 64) - 1
_REFUSED = (1 << 64) - 2
_MESSAGE_AT = 16
REASON_NBYTES = MARK_NBYTES - _MESSAGE_AT
"""Room for the reason of a refusal."""


class StagedMark:
    """One process raises it, one waits for it. The number is stored and loaded as one machine word."""

    __slots__ = ("_length", "_memory", "_number")

    def __init__(self, memory: memoryview) -> None:
        if memory.nbytes < MARK_NBYTES:
            raise ValueError(f"a mark needs {MARK_NBYTES} bytes, not {memory.nbytes}")
        self._memory = memory
        self._number = ctypes.c_uint64.from_buffer(memory)
        self._length = ctypes.c_uint64.from_buffer(memory, 8)

    def reset(self) -> None:
        """Nothing is there yet. Called before the writer hears of the snapshot."""
        self._number.value = 0

    def reach(self, nbytes: int) -> None:
        """The first `nbytes` bytes of the data are there, and stay as they are."""
        self._number.value = nbytes

    def complete(self) -> None:
        """All of it is there, and it is the state that was to be captured."""
        self._number.value = _COMPLETE

    def refuse(self, reason: bytes) -> None:
        """It will never be complete. `ValueError` if there is no room for the reason."""
        if len(reason) > REASON_NBYTES:
            raise ValueError(f"a reason may have {REASON_NBYTES} bytes, not {len(reason)}")
        self._memory[_MESSAGE_AT : _MESSAGE_AT + len(reason)] = reason
        self._length.value = len(reason)
        self._number.value = _REFUSED

    def has(self, nbytes: int | None) -> bool:
        """Whether the first `nbytes` bytes of the data are there; None: whether it is complete."""
        number: int = self._number.value
        return number == _COMPLETE or (number != _REFUSED and nbytes is not None and number >= nbytes)

    @property
    def refusal(self) -> bytes | None:
        """Why it will never be complete; None if it may be."""
        if self._number.value != _REFUSED:
            return None
        return bytes(self._memory[_MESSAGE_AT : _MESSAGE_AT + self._length.value])
