"""Is an attempt committed or given up, where one's patience ends while another is about to commit it?

Each rank's deadline runs from its own request, and a coordinator may be slow for longer than the others wait.
So whoever would commit, or stop waiting for a commit that could still come, says so first, all in one place,
and the first word stands. No rank reports a step as failed that is committed after.
"""

from __future__ import annotations

import msgspec

from ckptengine.comm.failure import Failure
from ckptengine.comm.transport import Transport
from ckptengine.errors import SaveFailedError
from ckptengine.write.messages import Fate, fate_key

COMMIT_GRACE_S = 30.0
"""How much longer to wait for a commit that is being made. If it hangs, the coordinator's trainer needs as
much to end its writer and to look for the manifest."""


def claim_commit(transport: Transport, attempt: str) -> None:
    """For the coordinator, before the manifest is published: raises why the attempt was given up, if it
    was."""
    fate = _first_word(transport, attempt, Fate())
    if fate.failure is not None:
        raise fate.failure.to_error(SaveFailedError)


def give_up(transport: Transport, attempt: str, failure: Failure) -> bool:
    """Whether the attempt can no longer be committed; if not, it is being committed, or is already."""
    return _first_word(transport, attempt, Fate(failure=failure)).failure is not None


def _first_word(transport: Transport, attempt: str, fate: Fate) -> Fate:
    stands = transport.set_if_absent(fate_key(attempt), msgspec.msgpack.encode(fate))
    return msgspec.msgpack.decode(stands, type=Fate)
