"""One system on one rank, in a process of its own: takes orders as JSON lines, answers with seconds.

State and target are memory that the runner made and all workers of a rank map, so that many systems need no
more of it than one. `native_bench.nursery` starts them.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import signal
import sys
import time
import traceback
from typing import Any

import msgspec

from native_bench import cases
from native_bench.peers import make
from native_bench.peers.base import Peer, Place, files_below

POISON = 0xA5
SPARE_DESCRIPTORS = 1000
"""For libraries, pipes and files."""
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told when it is started. `port` is for the ranks to meet."""

    system: str
    case: cases.Case
    rank: int
    port: int
    state_fd: int
    target_fd: int
    threads: int


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """do: `"save"`, `"restore"` or `"end"`."""

    do: str
    directory: str = ""
    step: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """figures: seconds by name. error: why there are none. missing: why the system cannot be measured at
    all."""

    figures: dict[str, float] = {}
    traits: dict[str, Any] = {}
    error: str | None = None
    missing: str | None = None


class Worker:
    def __init__(self, setup: Setup, peer: Peer) -> None:
        import torch

        self.setup, self.peer = setup, peer
        self.layout = cases.layout(setup.case, setup.rank)
        torch.set_num_threads(setup.threads)
        self._state_memory = mmap.mmap(setup.state_fd, self.layout.extent)
        self._target_memory = mmap.mmap(setup.target_fd, self.layout.extent)
        # In the page tables before anything is timed: a training process has long touched its own tensors.
        for memory in (self._state_memory, self._target_memory):
            _libc.madvise(
                ctypes.c_void_p(_address(memory)), ctypes.c_size_t(len(memory)), 23
            )  # POPULATE_WRITE
        self.state = self._tensors(self._state_memory)
        self.target = self._tensors(self._target_memory)
        if setup.case.world_size > 1 or peer.traits.group:
            _join(setup)
        self._meet()
        peer.open(Place(setup.rank, setup.case.world_size, lambda: self._tensors(self._state_memory)))

    def _tensors(self, memory: mmap.mmap) -> dict[str, Any]:
        """Each with a storage of its own, as a model's parameters have."""
        import torch

        dtypes = {name: getattr(torch, name) for name in cases.DTYPES}
        return {
            tensor.name: torch.frombuffer(
                memory,
                dtype=dtypes[tensor.dtype],
                offset=tensor.offset,
                count=tensor.nbytes // cases.DTYPES[tensor.dtype],
            ).view(tensor.shape)
            for tensor in self.layout.tensors
        }

    def obey(self, order: Order) -> Answer:
        if order.do == "save":
            return Answer(figures=self.save(order.directory, order.step))
        if order.do == "restore":
            return Answer(figures=self.restore(order.directory))
        raise ValueError(f"unknown order {order.do!r}")

    def save(self, directory: str, step: int) -> dict[str, float]:
        gc.collect()
        self._use_state()
        self._meet()
        cpu = _cpu_seconds()
        seconds = self.peer.save(directory, step, self.state)
        start = time.perf_counter()
        if not self.peer.traits.fsyncs:
            self._sync(directory)
        return {
            "stall_s": seconds.stall_s,
            "save_s": seconds.done_s + time.perf_counter() - start,
            "save_cpu_s": _cpu_seconds() - cpu,
            **{f"save_{name}": value for name, value in (seconds.extra or {}).items()},
        }

    def _use_state(self) -> None:
        """Look at each page, as the training step before a save would have. While other systems have their
        turns, a kernel that is short of memory marks pages as not in use, and the first look at them then
        takes as long as a copy."""
        pages = memoryview(self._state_memory)[:: mmap.PAGESIZE]
        bytes(pages)

    def _sync(self, directory: str) -> None:
        """Make durable what this rank wrote: all that is there, unless files are named after ranks."""
        paths = list(files_below(directory))
        own = [path for path in paths if os.path.basename(path).startswith(f"rank{self.setup.rank}.")]
        for path in own or paths:
            _fsync(path)
        for at, _, _ in os.walk(directory):
            _fsync(at)

    def restore(self, directory: str) -> dict[str, float]:
        gc.collect()
        _libc.memset(
            ctypes.c_void_p(_address(self._target_memory)), POISON, ctypes.c_size_t(self.layout.extent)
        )
        self._meet()
        cpu = _cpu_seconds()
        start = time.perf_counter()
        extra = self.peer.restore(directory, self.target)
        seconds = time.perf_counter() - start
        cpu = _cpu_seconds() - cpu
        self._compare()
        # What a loader keeps mapped stays in the page cache, and the next restore would not be cold.
        gc.collect()
        return {"s": seconds, "cpu_s": cpu, **(extra or {})}

    def _compare(self) -> None:
        state, target = _address(self._state_memory), _address(self._target_memory)
        wrong = [
            tensor.name
            for tensor in self.layout.tensors
            if _libc.memcmp(state + tensor.offset, target + tensor.offset, tensor.nbytes)
        ]
        if wrong:
            raise ValueError(
                f"{len(wrong)} of {len(self.layout.tensors)} tensors came back with other bytes "
                f"than were saved, "
                f"first {wrong[0]}"
            )

    def _meet(self) -> None:
        if self.setup.case.world_size > 1:
            import torch.distributed as dist

            dist.barrier()


def _join(setup: Setup) -> None:
    import torch.distributed as dist

    # Some systems ask the environment, not the group.
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(setup.port),
        RANK=str(setup.rank),
        LOCAL_RANK=str(setup.rank),
        WORLD_SIZE=str(setup.case.world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    dist.init_process_group("gloo", rank=setup.rank, world_size=setup.case.world_size)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _fsync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _room_for_descriptors(count: int) -> str | None:
    """Let this process and its helpers have so many, beside what they have anyway. Why they cannot, or
    None."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE_DESCRIPTORS
    if not count or needed <= soft:
        return None
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, max(needed, hard)))
    except (OSError, ValueError):  # not allowed; or more than any process may have (fs.nr_open)
        return (
            f"needs {needed:,} file descriptors; a process may have {hard:,} here (`ulimit -Hn`), and "
            "raising that takes CAP_SYS_RESOURCE"
        )
    return None


def _describe(error: BaseException) -> str:
    traceback.print_exception(error)  # whole, into the worker's log
    return f"{type(error).__name__}: {error}"[:1000]


def main(setup: Setup) -> None:
    """Serve orders from descriptor 0 until the last one; answers go to descriptor 1."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no worker outlives its nursery, nor that its runner
    # Where memory runs out after all, it shall be one of these that is ended, and nobody else's process.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
    # Libraries print; the answers go over a descriptor that they do not know.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    encode = msgspec.json.encode
    worker = None
    try:
        peer = make(setup.system)
        missing = peer.missing()
        limit = peer.traits.max_ranks
        if missing is None and limit is not None and setup.case.world_size > limit:
            missing = f"measured on at most {limit} rank{'s' if limit > 1 else ''}"
        missing = missing or _room_for_descriptors(peer.traits.descriptors * setup.case.count)
        traits = msgspec.to_builtins(peer.traits)
        if missing is None:
            worker = Worker(setup, peer)
        first = Answer(traits=traits, missing=missing)
    except BaseException as exc:
        first = Answer(error=_describe(exc))
    answers.write(encode(first) + b"\n")
    if worker is None:
        return
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        if order.do == "end":
            break
        try:
            answer = worker.obey(order)
            # What a loader freed, malloc may keep; the other systems need it.
            _libc.malloc_trim(0)
        except Exception as exc:
            answer = Answer(error=_describe(exc))
        answers.write(encode(answer) + b"\n")
    worker.peer.close()
    answers.write(encode(Answer()) + b"\n")
    # Some libraries leave threads that would keep the process from ending.
    sys.stderr.flush()
    os._exit(0)
