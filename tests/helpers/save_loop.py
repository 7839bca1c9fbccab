"""A training loop that does nothing but save, to be killed at any moment.

    python -m tests.helpers.save_loop ROOT LOG CODEC RANK WORLD_SIZE RENDEZVOUS

What it saves at a step is known from the step alone (`state_at`), so that whoever restores it can tell
whether it is what was captured. It first restores what there is, and checks that, then saves the steps after
it, up to the one that is in the file ROOT.stop once there is such a file. It tells what it has seen, one line
each: `restored STEP`, `writer PID`, `committed STEP FINGERPRINT`, `failed STEP RANK MESSAGE`, `closed`.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptengine as ck
from tests.adapters.fake import same

GROUP_TIMEOUT_S = 60
PAUSE_S = 0.003
KEEP_LAST = 4


def state_at(step: int, rank: int) -> dict[str, Any]:
    """Tens of kilobytes, at every third step a megabyte more, so that a save is short or long."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weight = noise(50, 60)
    state: dict[str, Any] = {
        "model": {"weight": weight, "tied": weight, "bias": noise(17).to(torch.bfloat16)},
        "optimizer": [{"exp_avg": noise(50, 60).t(), "step": torch.tensor(float(step))}],
        "rng": generator.get_state(),
        "step": step,
        "rank": rank,
        "text": f"step {step}, " * (step % 200),
    }
    if step % 3 == 0:
        state["large"] = noise(256, 1024)
    return state


def target_at(step: int, rank: int) -> dict[str, Any]:
    """What is restored into: the shapes of `state_at`, none of its content."""
    state = state_at(step, rank)
    scramble(state)
    return state | {"step": -1, "rank": -1, "text": ""}


def scramble(state: dict[str, Any]) -> None:
    """What training does to a state once it is captured."""
    for tensor in (state["model"]["weight"], state["model"]["bias"], state["optimizer"][0]["exp_avg"]):
        tensor.fill_(-1)
    state["rng"].zero_()
    state["step"] = -1
    if "large" in state:
        state["large"].fill_(-1)


def main(root: str, log_path: str, codec: Any, rank: int, world_size: int, rendezvous: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(*words: object) -> None:
        # One write: a line is there as a whole or not at all, whenever this process is killed.
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    if world_size > 1:
        timeout = timedelta(seconds=GROUP_TIMEOUT_S)
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timeout
        )
    config = ck.Config(
        block_nbytes=65536,
        codec=codec,
        io_threads=2,
        keep_last=KEEP_LAST,
        on_error="warn",  # the loop looks at every handle itself
        commit_timeout_s=GROUP_TIMEOUT_S,
        agree_timeout_s=GROUP_TIMEOUT_S,
    )
    with ck.Checkpointer(root, config=config) as ckpt:
        step = _restored(ckpt, rank)
        tell("restored", step)
        pending: list[ck.SaveHandle] = []
        writer = None
        while step < _last_step(root):
            step += 1
            state = state_at(step, rank)
            pending.append(ckpt.async_save(step, state))
            scramble(state)
            if ckpt.writer_pid not in (writer, None):
                writer = ckpt.writer_pid
                tell("writer", writer)
            pending = _tell_ended(pending, tell)
            time.sleep(PAUSE_S)
        ckpt.wait(GROUP_TIMEOUT_S)
        _tell_ended(pending, tell)
    tell("closed")
    if world_size > 1:
        dist.destroy_process_group()


def _last_step(root: str) -> float:
    # A step, not a moment: all ranks have to end with the same save.
    with contextlib.suppress(FileNotFoundError):
        return int(Path(f"{root}.stop").read_text())
    return math.inf


def _restored(ckpt: ck.Checkpointer, rank: int) -> int:
    """The step the loop goes on from: the newest commit, restored and compared; 0 at the first start."""
    latest = ckpt.latest
    if latest is None:
        return 0
    target = target_at(latest, rank)
    info = ckpt.restore(target)
    if info.step != latest or info.fell_back_from:
        raise AssertionError(f"restored {info.step}, not {latest}: {info.fell_back_from}")
    if not same(target, state_at(latest, rank)):
        raise AssertionError(f"what was restored is not what was captured at step {latest}")
    return latest


def _tell_ended(pending: list[ck.SaveHandle], tell: Any) -> list[ck.SaveHandle]:
    """Announce what has become of the saves that ended, in order; return the others."""
    while pending and pending[0].done():
        handle = pending.pop(0)
        error = handle.exception()
        if error is None:
            tell("committed", handle.step, handle.result().fingerprint)
        elif isinstance(error, ck.SaveFailedError):
            tell("failed", handle.step, error.rank, str(error).replace("\n", " "))
        else:
            raise error
    return pending


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
