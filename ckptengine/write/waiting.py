"""How does a writer wait for another rank? Until its deadline, or until it hears that waiting is in vain.

All that wait for a save have the same deadline, and who gives up first says why the save failed. The one who
knows most must be first: the coordinator's writer, which knows whose shard is missing; then its trainer; then
the other ranks' writers, and their trainers last.
"""

from __future__ import annotations

import time

import msgspec

from ckptengine.comm.failure import Failure
from ckptengine.comm.transport import Transport, wait_for
from ckptengine.errors import SaveFailedError
from ckptengine.tracing.recorder import flush_if_due, span
from ckptengine.write.messages import WriteTask, gone_key
from ckptengine.write.reporting import Beat

FAILURE_POLL_S = 0.5
BEAT_S = 0.1
OUTCOME_GRACE_S = 5.0
"""How much longer than to the deadline the other ranks' writers wait for the coordinator's word."""
WRITER_GRACE_S = 2.0
"""How much longer than its writer a trainer waits, for the writer to say what it waited for in vain."""


def wait_for_key(
    transport: Transport, task: WriteTask, beat: Beat, key: str, *failed_keys: str, grace_s: float = 0.0
) -> bytes:
    """The value of `key`, once there is one; there are beats for as long as the transport answers.

    Raises the failure that one of `failed_keys`, or the run's `gone_key`, comes to hold first, and
    `TimeoutError` `grace_s` after the task's deadline.
    """
    looked = time.monotonic()

    def peek() -> bytes | None:
        nonlocal looked
        value = transport.peek(key)
        beat()
        if value is None and time.monotonic() - looked >= FAILURE_POLL_S:
            looked = time.monotonic()
            flush_if_due()
            for failed in (*failed_keys, gone_key(task.attempt)):
                failure = transport.peek(failed)
                if failure is not None:
                    raise msgspec.msgpack.decode(failure, type=Failure).to_error(SaveFailedError)
        return value

    def sleep(seconds: float) -> None:
        """The other ranks' store is asked seldom, the trainer listens all the time."""
        while seconds > BEAT_S:
            time.sleep(BEAT_S)
            seconds -= BEAT_S
            beat()
        time.sleep(seconds)

    with span("wait for ranks", "wait", {"for": key.removeprefix(f"{task.attempt}/")}):
        value = wait_for(peek, max(task.deadline + grace_s - time.monotonic(), 0.001), sleep)
    if value is None:
        raise TimeoutError(f"no value for {key!r} before the deadline")
    return value
