"""How does a process tell another how far it is, and be believed even if it is killed while writing?

The page holds two slots. A message goes into the slot of the older one, with a sequence number and a digest
over number, length and message; a reader takes the valid slot with the higher number. A writer killed half
way leaves one slot whose digest does not match, and the other with the message before. No lock is shared, so
none can be left behind.

Slot, little-endian: u64 sequence (from 1), u64 length, 16-byte xxh3-128 of those 16 bytes and the message,
the message.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

STATUS_NBYTES = 65536

_HEAD = struct.Struct("<QQ16s")
# A reader overtaken by a writer finds both slots half written; each message takes microseconds, so it looks
# again.
_READ_TRIES = 200
_READ_PAUSE_S = 0.0005


def _digest(sequence: int, message: bytes) -> bytes:
    hasher = xxhash.xxh3_128(struct.pack("<QQ", sequence, len(message)))
    hasher.update(message)
    return hasher.digest()


class StatusPage:
    """One message in shared memory, replaced atomically. One process writes at a time; any number read."""

    __slots__ = ("_lock", "_page", "_slot_nbytes")

    def __init__(self, page: memoryview) -> None:
        if page.nbytes < 4 * _HEAD.size:
            raise ValueError(f"a status page needs at least {4 * _HEAD.size} bytes, not {page.nbytes}")
        self._page = page.cast("B")
        self._slot_nbytes = page.nbytes // 2
        self._lock = threading.Lock()

    @property
    def max_nbytes(self) -> int:
        """Longest message that fits."""
        return self._slot_nbytes - _HEAD.size

    def write(self, message: bytes | Mapping[str, Any]) -> None:
        """Replace the message; a mapping is written as JSON. `ValueError` if it does not fit."""
        data = message if isinstance(message, bytes) else msgspec.json.encode(message)
        if len(data) > self.max_nbytes:
            raise ValueError(f"a status message may have {self.max_nbytes} bytes, not {len(data)}")
        with self._lock:
            # The page is asked, not memory: the last writer may have been another process.
            sequence = max((found[0] for found in map(self._slot, (0, 1)) if found), default=0) + 1
            start = (sequence % 2) * self._slot_nbytes
            body = start + _HEAD.size
            self._page[body : body + len(data)] = data
            self._page[start:body] = _HEAD.pack(sequence, len(data), _digest(sequence, data))

    def read(self) -> bytes | None:
        """The newest whole message, or None if there is none (yet, or since `clear`)."""
        best: tuple[int, bytes] | None = None
        for _ in range(_READ_TRIES):
            slots = self._slot(0), self._slot(1)
            found = max((slot for slot in slots if slot), default=None)
            if found is not None:
                best = max(best, found) if best else found
                # With the other slot half written, this one is the newest only if it was not replaced
                # meanwhile: else both were, one after the other, and a reader would see an older message than
                # it has seen before.
                if all(slots) or self._sequence(slots.index(found)) == found[0]:
                    return best[1]
            elif self._is_blank():
                return None
            time.sleep(_READ_PAUSE_S)
        return best[1] if best else None

    def read_json(self) -> Any:
        """The newest message, decoded; None if there is none."""
        message = self.read()
        return None if message is None else msgspec.json.decode(message)

    def clear(self) -> None:
        """Forget all messages. Called by the owner between two writers, when nobody writes."""
        with self._lock:
            for start in (0, self._slot_nbytes):
                self._page[start : start + _HEAD.size] = bytes(_HEAD.size)

    def _slot(self, index: int) -> tuple[int, bytes] | None:
        start = index * self._slot_nbytes
        sequence, nbytes, digest = _HEAD.unpack_from(self._page, start)
        if sequence == 0 or nbytes > self.max_nbytes:
            return None
        body = start + _HEAD.size
        message = bytes(self._page[body : body + nbytes])
        return (sequence, message) if _digest(sequence, message) == digest else None

    def _sequence(self, index: int) -> int:
        return int(_HEAD.unpack_from(self._page, index * self._slot_nbytes)[0])

    def _is_blank(self) -> bool:
        heads = (bytes(self._page[start : start + _HEAD.size]) for start in (0, self._slot_nbytes))
        return not any(any(head) for head in heads)
