"""When must Python's collector not run? While many objects are made that are all kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """A few objects for each tensor, all of them kept, make the collector walk the whole heap again and
    again: half of the time for 20,000 tensors.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
