"""What ties a writer process to its trainer: when the trainer ends, however it ends, so does the writer.

`multiprocessing` runs this file as `__mp_main__` before anything else in the process: the tie holds from the
first milliseconds on, while the writer's imports take seconds. A half-written attempt is never listed, so
there is nothing to clean up.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
import warnings
from collections.abc import Callable

PARENT_POLL_S = 0.2
LAST_WORD_S = 5.0
OOM_SCORE_ADJ = 1000
"""Where memory runs out, the kernel ends the writer before any other process of the job: a save fails, and
the training, which would be ended for its size, goes on."""

last_word: Callable[[], None] | None = None
"""Called once when the trainer is gone, with `LAST_WORD_S` to say so to the other ranks."""


def bind(trainer: int) -> None:
    """End this process when its parent, process `trainer`, has ended, and before it when memory runs out."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(str(OOM_SCORE_ADJ))
    threading.Thread(target=_watch, args=(trainer,), name="ckpt-lifeline", daemon=True).start()


def _watch(trainer: int) -> None:
    try:
        _wait_for_end(trainer)
        if last_word is not None:
            speaker = threading.Thread(target=last_word, name="ckpt-last-word", daemon=True)
            speaker.start()
            speaker.join(LAST_WORD_S)
    finally:
        os._exit(1)


def _wait_for_end(trainer: int) -> None:
    # Not PR_SET_PDEATHSIG: it fires when the *thread* that started us ends; a pidfd speaks of the process.
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.pidfd_open(trainer)
        # If the trainer had ended before, the number could be another process's by now.
        if os.getppid() == trainer:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            while not poll.poll():
                pass
            return
    while os.getppid() == trainer:
        time.sleep(PARENT_POLL_S)


if __name__ == "__mp_main__":
    # The trainer has shown it already, when it imported torch.
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)

    # The importable module, not this copy of it, is the one that others set `last_word` in.
    from ckptengine.adapters import lifeline

    lifeline.bind(int(sys.argv[1]))
