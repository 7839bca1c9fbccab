"""How does a writer wait for another rank? Until its deadline, or until it hears that waiting is in vain."""

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


def wait_for_key(transport: Transport, task: WriteTask, beat: Beat, key: str, *failed_keys: str) -> bytes:
    """The value of `key`, once there is one; there are beats for as long as the transport answers.

    Raises the failure that one of `failed_keys`, or the run's `gone_key`, comes to hold first, and
    `TimeoutError` at the task's deadline.
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
        value = wait_for(peek, max(task.deadline_unix - time.time(), 0.001), sleep)
    if value is None:
        raise TimeoutError(f"no value for {key!r} before the deadline")
    return value
