"""Is this text JSON that every reader understands alike? Parsing that refuses what JSON leaves open."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def loads(text: bytes | str) -> Any:
    """Decoded JSON. `ValueError` for anything malformed: also duplicate keys, NaN, numbers out of range, depth."""
    try:
        value = msgspec.json.decode(text)
        # A dict cannot hold a key twice, so text that equals its re-encoding has none: true of all we wrote, and fast.
        raw = text.encode() if isinstance(text, str) else text.rstrip(b" ")
        if msgspec.json.encode(value) != raw:
            json.loads(text, object_pairs_hook=_refuse_duplicates)
    except RecursionError:
        raise ValueError("JSON nested too deep") from None
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    keys = {key for key, _ in pairs}
    if len(keys) != len(pairs):
        raise ValueError("JSON object with a duplicate key")
