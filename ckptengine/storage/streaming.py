"""Is there a compiled way to copy memory past the caches? `streaming.c`, where it was built.

It is a help, not a need: whatever is wrong with it, `helper` is None, `status` says why, and libc copies.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

VARIABLE = "CKPTENGINE_STREAMING"
"""Of the environment: "off" does without the helper."""

LOADED = "loaded"

LIBRARY = Path(__file__).with_name(
    "libstreaming.so"
)  # not `streaming.so`, which Python would import for this
SOURCE = Path(__file__).with_name("streaming.c")

Copy: TypeAlias = Callable[[int, int, int], object]
"""To the second address from the first come so many bytes: `copy(to, source, nbytes)`, as libc's memmove."""


@dataclass(frozen=True, slots=True)
class Helper:
    """The function of `streaming.c`, called in two ways. All processes see what it has copied before they see
    what the caller stores next."""

    copy: Copy
    """Other Python threads go on meanwhile."""
    copy_held: Copy
    """Python's lock is kept: for copies that take less time than giving it away."""


def load(
    library: Path = LIBRARY, source: Path = SOURCE, environ: Mapping[str, str] = os.environ
) -> tuple[Helper | None, str]:
    """The helper, or None, and in a few words what there is or why there is nothing. Raises nothing."""
    if environ.get(VARIABLE, "").lower() in ("off", "0", "no", "false"):
        return None, f"switched off by {VARIABLE}"
    if not library.exists():
        return (
            None,
            "not built (no C compiler when it was installed, no x86-64, or a checkout without a build)",
        )
    try:
        # One handle gives the lock away in each call, the other keeps it.
        giving, keeping = ctypes.CDLL(str(library)), ctypes.PyDLL(str(library))
        made_of = giving.ckptengine_streaming_source
        made_of.argtypes, made_of.restype = (), ctypes.c_uint32
        if made_of() != zlib.crc32(source.read_bytes()):
            return None, f"stale: {library.name} was built from another {source.name}; install again"
        copies = [handle.ckptengine_stream for handle in (giving, keeping)]
    except (OSError, AttributeError) as error:
        return None, f"it cannot be loaded: {error}"
    for copy in copies:
        copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        copy.restype = None
    return Helper(*copies), LOADED


helper, status = load()
"""The process's own, and what `load` said of it."""
