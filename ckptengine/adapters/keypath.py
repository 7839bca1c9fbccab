"""How is a place in a state written down?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
            text += f"[{_printed(key, repr):.80}]"
    return text


def joined(path: Sequence[Any]) -> str:
    """A key path as in a tensor's name: `a.3`."""
    if len(path) == 1 and type(path[0]) is str:
        return path[0]
    try:
        return ".".join([str(key) for key in path if key is not STATE_DICT])
    except ValueError:
        return ".".join([_printed(key, str) for key in path if key is not STATE_DICT])


def _printed(key: Any, to_text: Callable[[Any], str]) -> str:
    try:
        return to_text(key)
    except ValueError:  # Python does not print integers of thousands of digits
        return f"<{type(key).__name__}>"
