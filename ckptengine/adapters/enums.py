"""Where is an enum member found again, without importing what a checkpoint names?"""

from __future__ import annotations

import importlib
import sys
from enum import Enum, EnumMeta, Flag
from functools import reduce
from operator import or_
from typing import Any

# Standard modules that do something when imported.
_NEVER_IMPORTED = frozenset({"antigravity", "this", "idlelib", "turtledemo", "test"})


def locate(member: Enum) -> tuple[str, str, str]:
    """`(module, qualname, name)`. ValueError if `look_up` would not find the member under them."""
    cls = type(member)
    name: str | None = member.name
    if isinstance(member, Flag) and (name is None or "|" in name or name not in cls.__members__):
        # A combination has no name of its own before Python 3.11.
        parts = [
            part.name for part in cls.__members__.values() if part.value and part.value & ~member.value == 0
        ]
        name = "|".join(str(part) for part in parts)
    if not name:
        raise ValueError(f"{member!r} has no name")
    try:
        found = look_up(cls.__module__, cls.__qualname__, name)
    except ValueError as error:
        raise ValueError(f"it would not be found again: {error}") from None
    if found is not member and not (type(found) is cls and found == member):
        raise ValueError(f"another member is found under {cls.__module__}.{cls.__qualname__}.{name}")
    return cls.__module__, cls.__qualname__, name


def look_up(module: str, qualname: str, name: str) -> Enum:
    """The member; ValueError if there is none, or its module is neither loaded nor torch's or the standard
    library's.
    """
    found = sys.modules.get(module)
    if found is None:
        top = module.partition(".")[0]
        if (top != "torch" and top not in sys.stdlib_module_names) or top in _NEVER_IMPORTED:
            raise ValueError(f"the enum's module {module!r} is not imported; import it first")
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"the enum's module {module!r} cannot be imported: {error}") from None
    # Through __dict__, as a module's __getattr__ may import more.
    value: Any = found
    for part in qualname.split("."):
        value = vars(value).get(part) if isinstance(value, type) or value is found else None
    if not isinstance(value, EnumMeta) or not issubclass(value, Enum):
        raise ValueError(f"{module}.{qualname} is no enum")
    members = value.__members__
    if name in members:
        return members[name]
    parts = name.split("|")
    if issubclass(value, Flag) and all(part in members for part in parts):
        combined: Enum = reduce(or_, (members[part] for part in parts))
        return combined
    raise ValueError(f"{module}.{qualname} has no member {name!r}")
