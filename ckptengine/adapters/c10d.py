"""Finds the ranks of a `torch.distributed` job, and carries their messages over its store.

The store is used through connections of our own, and never in a blocking wait: that holds the client's lock,
cannot be interrupted, and writes a warning to stderr each time it ends in vain. No collective is ever issued.
"""

from __future__ import annotations

import datetime
import secrets
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in its __all__

from ckptengine.adapters.gloo_channel import GlooNetwork
from ckptengine.comm.group import GRACE_S
from ckptengine.comm.transport import FileTransport, MemoryTransport, Transport, wait_for
from ckptengine.errors import CheckpointError, CommitTimeoutError
from ckptengine.write.messages import TransportSpec

ProcessGroup: TypeAlias = dist.ProcessGroup

CONNECT_TIMEOUT_S = 30.0
"""torch looks up the name of each address that connects, on both sides: that alone can take seconds."""

HELLO = "ckptengine/hello"
NONCE_NBYTES = 16
NOBODY = b"-"


class StoreTransport:
    """Ranks with one `torch.distributed.TCPStore`."""

    def __init__(self, host: str, port: int, prefix: str) -> None:
        self._prefix = prefix
        try:
            self._store = TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=CONNECT_TIMEOUT_S),
            )
        except dist.DistError as error:
            raise ConnectionError(f"cannot reach the job's store at {host}:{port}: {error}") from error

    def set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(self._prefix + key, value)  # type: ignore[arg-type]  # bytes are taken as they are
        except (dist.DistError, RuntimeError) as error:
            raise _unreachable(error) from error

    def get(self, key: str, timeout_s: float) -> bytes:
        value = wait_for(lambda: self.peek(key), timeout_s)
        if value is None:
            raise TimeoutError(f"no value for {key!r} within {timeout_s:g} s")
        return value

    def peek(self, key: str) -> bytes | None:
        try:
            return _peek(self._store, self._prefix + key)
        except (dist.DistError, RuntimeError) as error:
            raise _unreachable(error) from error

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        try:
            return bytes(self._store.compare_set(self._prefix + key, "", value))  # type: ignore[arg-type]
        except (dist.DistError, RuntimeError) as error:
            raise _unreachable(error) from error

    def delete(self, key: str) -> None:
        try:
            self._store.delete_key(self._prefix + key)
        except (dist.DistError, RuntimeError) as error:
            raise _unreachable(error) from error

    @property
    def store(self) -> Any:
        """The connection, for those to find each other who open more."""
        return self._store

    def close(self) -> None:
        del self._store


def _peek(store: Any, key: str) -> bytes | None:
    return bytes(store.get(key)) if store.check([key]) else None


def _unreachable(error: Exception) -> ConnectionError:
    return ConnectionError(f"the job's store does not answer: {error}")


@dataclass(frozen=True)
class Membership:
    """This process among the ranks that checkpoint together; without a process group, the only one."""

    rank: int
    world_size: int
    hello: Any = None
    """The process group's own store, for the one exchange that has to precede any other; None for a single
    rank."""

    def spec(self, directory: str, prefix: str) -> TransportSpec:
        """How this rank reaches all others: over the TCP store under the group's store if there is one, else
        over `directory`. The store's address is this rank's own: on its node, the host may be called
        "localhost"."""
        if self.world_size == 1:
            return TransportSpec(kind="none")
        base = self.hello
        while isinstance(base, PrefixStore):
            base = base.underlying_store
        if isinstance(base, TCPStore):
            return TransportSpec(kind="tcp", host=base.host, port=base.port, prefix=prefix)
        return TransportSpec(kind="file", directory=directory)

    def say_hello(self, message: bytes | None, timeout_s: float) -> bytes:
        """The coordinator's `message` for all ranks.

        A store may outlive the processes that use it (torchrun's does, through its restarts), so whatever is
        found in it may be an earlier life's. Each rank asks with a nonce and takes only the answer to that;
        the coordinator answers whatever is asked until every rank has confirmed this very greeting.
        """
        if self.world_size == 1:
            assert message is not None
            return message
        try:
            return self._ask(timeout_s) if message is None else self._answer(message, timeout_s)
        except (dist.DistError, RuntimeError) as error:
            raise CheckpointError(f"the process group's store does not answer: {error}") from error

    def _ask(self, timeout_s: float) -> bytes:
        nonce = secrets.token_hex(8)
        self.hello.set(f"{HELLO}/ask/{self.rank}", nonce)
        answer = wait_for(lambda: _peek(self.hello, f"{HELLO}/answer/{nonce}"), timeout_s)
        if answer is None:
            raise CommitTimeoutError(
                f"the coordinator did not open the checkpoint root within {timeout_s:g} s",
                rank=0,
                hint="every rank must make the Checkpointer",
            )
        greeting, message = answer[:NONCE_NBYTES], answer[NONCE_NBYTES:]
        self.hello.set(f"{HELLO}/heard/{self.rank}", greeting)
        # The coordinator may need the whole deadline itself before it can say who is missing.
        missing = wait_for(
            lambda: _peek(self.hello, f"{HELLO}/missing/{greeting.decode()}"), timeout_s + GRACE_S
        )
        if missing is None:
            raise CommitTimeoutError(f"the coordinator went silent for {timeout_s:g} s", rank=0)
        if missing != NOBODY:
            raise _missing([int(rank) for rank in missing.split(b",")], timeout_s)
        return message

    def _answer(self, message: bytes, timeout_s: float) -> bytes:
        greeting = secrets.token_hex(NONCE_NBYTES // 2).encode()
        waiting = set(range(1, self.world_size))
        answered: dict[int, bytes] = {}

        def all_have_heard() -> bytes | None:
            for rank in sorted(waiting):
                if _peek(self.hello, f"{HELLO}/heard/{rank}") == greeting:
                    waiting.discard(rank)
                    continue
                nonce = _peek(self.hello, f"{HELLO}/ask/{rank}")
                if nonce is not None and nonce != answered.get(rank):
                    self.hello.set(f"{HELLO}/answer/{nonce.decode()}", greeting + message)
                    answered[rank] = nonce
            return None if waiting else message

        wait_for(all_have_heard, timeout_s)
        missing = sorted(waiting)
        self.hello.set(f"{HELLO}/missing/{greeting.decode()}", ",".join(map(str, missing)).encode() or NOBODY)
        if missing:
            raise _missing(missing, timeout_s)
        return message


def _missing(ranks: list[int], timeout_s: float) -> CommitTimeoutError:
    return CommitTimeoutError(
        f"ranks {ranks[:8]} did not come to open the checkpoint root within {timeout_s:g} s",
        rank=ranks[0],
        hint="every rank must make the Checkpointer",
    )


def membership(process_group: ProcessGroup | None) -> Membership:
    """This process's place in `process_group`; None means the default group if there is one, else a single
    rank."""
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return Membership(0, 1)
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this process is not a member of the given process_group")
    if world_size == 1:
        return Membership(0, 1)
    store = dist.distributed_c10d._get_process_group_store(group)
    return Membership(rank, world_size, store)


def network(member: Membership, transport: Transport, prefix: str, timeout_s: float) -> GlooNetwork | None:
    """How ranks of several hosts exchange blocks; None for a single rank, or where torch has no gloo."""
    if member.world_size == 1 or not dist.is_gloo_available():
        return None
    # A file's store has no connections, and so none of our own.
    store = transport.store if isinstance(transport, StoreTransport) else member.hello
    return GlooNetwork(store, transport, prefix, timeout_s)


def connect(spec: TransportSpec) -> Transport:
    """A connection of the caller's own to the run's transport; `ConnectionError` if there is none."""
    if spec.kind == "tcp":
        return StoreTransport(spec.host, spec.port, spec.prefix)
    if spec.kind == "file":
        return FileTransport(spec.directory)
    return MemoryTransport()
