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
    """The functions of `streaming.c`. Other Python threads go on meanwhile, and all processes see what was
    copied before they see what the caller stores next."""

    copy: Copy
    copy_all: Callable[[int, int], object]
    """Many copies: the address of rows of three unsigned 64-bit integers, to, source and bytes, and how many
    rows there are."""


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
        functions = ctypes.CDLL(str(library))
        made_of = functions.ckptengine_streaming_source
        made_of.argtypes, made_of.restype = (), ctypes.c_uint32
        if made_of() != zlib.crc32(source.read_bytes()):
            return None, f"stale: {library.name} was built from another {source.name}; install again"
        copy, copy_all = functions.ckptengine_stream, functions.ckptengine_stream_all
    except (OSError, AttributeError) as error:
        return None, f"it cannot be loaded: {error}"
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    copy_all.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    copy.restype = copy_all.restype = None
    return Helper(copy, copy_all), LOADED


helper, status = load()
"""The process's own, and what `load` said of it."""
