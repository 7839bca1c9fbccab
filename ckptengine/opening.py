"""How do the ranks of a run come to its root together, and how do they leave it?

The coordinator makes the root and the id of the run, and tells the others. Where there is no torch store,
ranks talk through files in the root: the exchange directory of the run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time

import msgspec

from ckptengine.adapters import c10d
from ckptengine.catalog.catalog import next_life
from ckptengine.comm.failure import Failure
from ckptengine.comm.group import Group
from ckptengine.comm.same_options import SameOptions
from ckptengine.comm.transport import FileTransport, Transport
from ckptengine.config import EACH_RANKS_OWN, Config
from ckptengine.errors import StorageError
from ckptengine.format.names import RunId
from ckptengine.run import Run
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import Store
from ckptengine.write.messages import TransportSpec

EXCHANGE_PREFIX = ".exchange-"
EXCHANGE_CLOSE_TIMEOUT_S = 5.0
EXCHANGE_AGE_S = 7 * 86400.0
"""After which an exchange directory that nobody has touched is a killed run's."""


class _Hello(msgspec.Struct, frozen=True):
    """The coordinator's first word to all ranks: who this run is, or why it cannot start."""

    run: str = ""
    failure: Failure | None = None


def open_root(store: PosixStore, root: str, member: c10d.Membership, config: Config) -> str:
    """The id of the run that begins, the same on all ranks. What the coordinator meets is raised on all."""
    message = None
    if member.rank == 0:
        try:
            store.make_dirs(root)
            _remove_old_exchanges(store, root)
            hello = _Hello(str(RunId(next_life(store, root), int(time.time() * 1000), secrets.token_hex(4))))
        except Exception as error:
            if member.world_size == 1:
                raise
            hello = _Hello(failure=Failure.of(error, member.rank))
        message = msgspec.msgpack.encode(hello)
    hello = msgspec.msgpack.decode(member.say_hello(message, config.agree_timeout_s), type=_Hello)
    if hello.failure is not None:
        raise hello.failure.to_error()
    return hello.run


def exchange_directory(root: str, run: str) -> str:
    """Through whose files ranks talk that have no torch store. It is made when the first one does."""
    return os.path.join(root, f"{EXCHANGE_PREFIX}{run}")


def connect(spec: TransportSpec, rank: int) -> Transport:
    """This rank's way to the others; `StorageError` if there is none."""
    try:
        return c10d.connect(spec)
    except ConnectionError as error:
        raise StorageError(str(error), path=spec.directory or None, rank=rank) from error


def agree_on_setup(root: str, config: Config, group: Group) -> None:
    """What would make every later save fail on all ranks is an error on all of them now: `StorageError`,
    `CheckpointError`; `CommitTimeoutError` if a rank does not come."""
    failure = None
    if not os.path.isdir(root):
        error = StorageError(
            "this rank does not see the checkpoint root that the coordinator made",
            path=root,
            hint="all ranks need the same shared file system at the same path",
        )
        failure = Failure.of(error, group.rank)
    settings = {**msgspec.structs.asdict(config), "block_nbytes": config.shard_block_nbytes}
    same = SameOptions(
        "the ranks' Configs differ",
        f"give all ranks the same; they may differ in {', '.join(EACH_RANKS_OWN)}",
        {name: value for name, value in settings.items() if name not in EACH_RANKS_OWN},
    )
    group.summarise(same.own(), same.summary, failure, what="opening the checkpoint root")


def leave_exchange(run: Run, transport: Transport) -> None:
    """Remove the exchange directory once every rank has said that it is done; else the next run does."""
    if not isinstance(transport, FileTransport):
        return
    with contextlib.suppress(TimeoutError, ConnectionError):
        transport.set(f"closed/{run.rank}", b"")
        if run.is_coordinator:
            deadline = time.monotonic() + EXCHANGE_CLOSE_TIMEOUT_S
            for rank in range(run.world_size):
                transport.get(f"closed/{rank}", max(deadline - time.monotonic(), 0.001))
            transport.remove()


def _remove_old_exchanges(store: Store, root: str) -> None:
    """Runs that were killed could not remove theirs. A living one touches its own at every save; it may
    belong to another job, to which this one is only a reader."""
    for entry in store.list(root):
        path = os.path.join(root, entry.name)
        with contextlib.suppress(OSError):
            if (
                entry.name.startswith(EXCHANGE_PREFIX)
                and time.time() - os.stat(path).st_mtime > EXCHANGE_AGE_S
            ):
                FileTransport(path).remove()
