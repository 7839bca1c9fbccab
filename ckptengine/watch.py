"""Is an attempt that the writer works on still worth waiting for? Its word on the status page, and whatever
says that no good word will come: its death, its silence, the deadline.

One rule for silence: a writer that has said nothing for the stall timeout is given up, in whatever state it
is. It speaks after each step of its work, and all the while it waits for somebody else
(`ckptengine.write.reporting`); how long it may wait for others, the deadline says.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

import msgspec

from ckptengine.comm.group import COORDINATOR
from ckptengine.config import Config
from ckptengine.errors import CheckpointError, CommitTimeoutError, SaveFailedError
from ckptengine.handle import SaveHandle
from ckptengine.staging.status import StatusPage
from ckptengine.write.messages import Outcome, SaveStatus, WriteTask
from ckptengine.write.waiting import OUTCOME_GRACE_S, WRITER_GRACE_S

POLL_FIRST_S = 0.002
POLL_LAST_S = 0.01
"""A look costs 5 µs, and the wait for a commit is half of this too long on average."""
START_TIMEOUT_S = 300.0
"""For a new writer's imports, which thousands of ranks may read from one file system at the same time."""
WATCHED_S = 1.0
"""What the time from one look to the next may add to a writer's silence. If it was longer, the trainer was
stopped, and maybe the writer with it: a job may be suspended as a whole, and resumed."""


@dataclass(frozen=True, slots=True)
class Around:
    """What the trainer sees of an attempt beside its status page, taken before that is read: a writer that
    ended after its last word is not a failure.

    exitcode: of the writer, None while it runs. warm: it has done its imports. copying: the snapshot is not
    whole yet. abort: why the trainer wants no save any more.
    """

    exitcode: int | None
    warm: bool
    copying: bool
    abort: str | None


class Watch:
    """One attempt, from its hand-over to the writer on. deadline: by `time.monotonic`. The handle is told of
    the moments that the writer reports."""

    def __init__(
        self, task: WriteTask, page: StatusPage, config: Config, deadline: float, handle: SaveHandle
    ) -> None:
        self._task = task
        self._page = page
        self._config = config
        self._deadline = deadline + WRITER_GRACE_S + (0.0 if task.rank == COORDINATOR else OUTCOME_GRACE_S)
        self._handle = handle
        self._seen: SaveStatus | None = None
        self._looked_at = time.monotonic()
        self._silence_s = 0.0
        self._warm = False
        self._pause_s = POLL_FIRST_S

    def look(self, around: Around) -> Outcome | CheckpointError | None:
        """The writer's outcome, or why it is not waited for any longer, or None: look again after a pause."""
        now = time.monotonic()
        self._silence_s += min(now - self._looked_at, WATCHED_S)
        self._looked_at = now
        status = self._read()
        if status is not None and status.outcome is not None:
            return status.outcome
        if not self._warm and (around.warm or status is not None):
            self._warm, self._silence_s = True, 0.0
        return self._hopeless(status.state if status is not None else "starting", around)

    def pause(self) -> None:
        """Sleep for some milliseconds, the longer the less changes."""
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, POLL_LAST_S)

    def _read(self) -> SaveStatus | None:
        data = self._page.read()
        status = None if data is None else msgspec.msgpack.decode(data, type=SaveStatus)
        if status is None or status.attempt != self._task.attempt:
            return None
        if status != self._seen:
            if self._seen is None or status.state != self._seen.state:
                self._pause_s = POLL_FIRST_S  # once durable, a single rank's commit is milliseconds away
            self._seen, self._silence_s = status, 0.0
            self._handle._note(
                written=status.written_at or self._handle.times.written,
                durable=status.durable_at or self._handle.times.durable,
            )
        return status

    def _hopeless(self, state: str, around: Around) -> CheckpointError | None:
        task, config = self._task, self._config
        stall_s = config.stall_timeout_s if self._warm else max(config.stall_timeout_s, START_TIMEOUT_S)
        doing = "beginning with it" if state == "starting" and self._warm else _doing(state, task.rank)
        if around.abort is not None:
            return SaveFailedError(f"step {task.step}: {around.abort}", rank=task.rank)
        if around.exitcode is not None:
            return SaveFailedError(
                f"step {task.step}: the writer process ended ({_how(around.exitcode)}) while {doing}",
                rank=task.rank,
                hint="the previous checkpoint stands; the next save starts a new writer",
            )
        if time.monotonic() > self._deadline:
            where = "state was still being copied" if around.copying else f"writer was {doing}"
            return CommitTimeoutError(
                f"step {task.step}: not committed within {config.commit_timeout_s:g} s, this rank's {where}",
                rank=task.rank,
            )
        if self._silence_s > stall_s:
            return CommitTimeoutError(
                f"step {task.step}: the writer made no progress for {stall_s:g} s while {doing}",
                path=task.root,
                rank=task.rank,
                hint="the storage hangs, or Config.stall_timeout_s is too short for it",
            )
        return None


def _how(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"killed by signal {-exitcode}"


def _doing(state: str, rank: int) -> str:
    coordinates = rank == COORDINATOR
    return {
        "starting": "starting",
        "waiting": "making the attempt's directory"
        if coordinates
        else "waiting for the coordinator to make the attempt's directory",
        "writing": "writing the shard",
        "durable": "waiting for the other ranks' shards" if coordinates else "waiting for the commit",
        "committing": "making the commit",
    }.get(state, state)
