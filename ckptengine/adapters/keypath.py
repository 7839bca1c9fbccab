"""How is a place in a state written down?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

STATE_DICT = object()
"""Path mark: the step from an object to its `state_dict()`; it adds nothing to a name."""


def path_text(root: str, path: Sequence[Any]) -> str:
    """A key path as Python would index it: `state["a"][3]`."""
    text = root
    for key in path:
        if key is STATE_DICT:
            text += ".state_dict()"
        elif type(key) is str:
            text += f"[{msgspec.json.encode(key).decode() if key.isprintable() else ascii(key)}]"
        else:
            text += f"[{key!r:.80}]"
    return text
