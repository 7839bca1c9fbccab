"""How do a state's bytes get into the arena? One copy, in C order, as fast as memory goes."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ckptengine.adapters.items import StateItem
from ckptengine.adapters.pinning import Queued, copy_from_device
from ckptengine.adapters.tensors import plain
from ckptengine.storage import memcopy
from ckptengine.storage.threads import in_threads
from ckptengine.tracing import recorder

# Enough for a thread's turn not to show, small enough to spread one large tensor over all threads.
PIECE_NBYTES = 16 << 20
# Copied many in one call, as a call of its own, or handing it over, costs as much as the copy.
SMALL_NBYTES = 256 << 10
# Two threads saturate the memory of a socket's share of a rank; ranks on a node stage at the same time.
MAX_THREADS = 4


def copy_items(
    items: Sequence[StateItem],
    offsets: Sequence[int],
    payload: memoryview,
    *,
    threads: int | None = None,
    after: Queued | None = None,
    go_on: Callable[[], None] = lambda: None,
    on_staged: Callable[[int], None] = lambda nbytes: None,
    on_queued: Callable[[Sequence[torch.cuda.Event]], None] = lambda events: None,
) -> None:
    """Copy each item to its offset in `payload`, a writable memory of bytes; return when all bytes are there.

    CPU tensors are copied by `threads` threads (default: up to four, as the CPUs allow); CUDA tensors on a
    side stream that waits for `after` (default: the work queued on the current one). `go_on` is called
    between two pieces, from any thread, and ends the copy by raising. `on_staged` gets, from any thread, up
    to where the payload holds all that the items put there. `on_queued` is called when CPU tensors are copied
    and those of devices have events that come after their copies.
    """
    base = address_of(payload)
    room = payload.nbytes
    for item, offset in zip(items, offsets, strict=True):
        if offset < 0 or offset + item.nbytes > room:
            raise ValueError(f"{item.name!r} at {offset} does not fit into {room} bytes")
    if threads is None:
        threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    on_device: list[tuple[torch.Tensor, int]] = []
    # To, from, bytes, as `memcopy.copy_all` takes them.
    small: list[int] = []
    # (offset, bytes, work)
    work: list[tuple[int, int, Callable[[], object]]] = []
    began = recorder.clock()
    for item, offset in zip(items, offsets, strict=True):
        nbytes = item.nbytes
        if not nbytes:
            continue
        source = item.source
        if isinstance(source, bytes):
            ctypes.memmove(base + offset, source, nbytes)
        elif source.is_cpu and source.is_contiguous():
            if nbytes <= SMALL_NBYTES:
                small += (base + offset, source.data_ptr(), nbytes)
                continue
            address = source.data_ptr()
            for start in range(0, nbytes, PIECE_NBYTES):
                length = min(PIECE_NBYTES, nbytes - start)
                move = partial(memcopy.copy, base + offset + start, address + start, length)
                work.append((offset + start, length, move))
        elif source.is_cuda:
            on_device.append((source, offset))
        else:
            work.append((offset, nbytes, partial(_copy_strided, source, payload, offset, nbytes)))
    memcopy.copy_all(small, threads, go_on)
    if (trace := recorder.current) is not None:
        trace.add("copy small tensors", "cpu", began, recorder.clock(), {"tensors": len(items)})
    go_on()
    events = copy_from_device(on_device, payload, after) if on_device else []
    # What comes from a device is there when its events are; until then nothing is said.
    _do(work, threads, go_on, (lambda nbytes: None) if on_device else on_staged)
    on_queued(events)
    for event in events:
        event.synchronize()


def address_of(payload: memoryview) -> int:
    """Where a writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(payload)) if payload.nbytes else 0


def bytes_tensor(payload: memoryview, offset: int, nbytes: int) -> torch.Tensor:
    """Bytes of a writable memory as a tensor, without a copy."""
    return torch.frombuffer(payload, dtype=torch.uint8, count=nbytes, offset=offset)


def _copy_strided(source: torch.Tensor, payload: memoryview, offset: int, nbytes: int) -> None:
    with torch.no_grad():
        elements = plain(source.detach())
        bytes_tensor(payload, offset, nbytes).view(elements.dtype).view(elements.shape).copy_(elements)


def _do(
    work: list[tuple[int, int, Callable[[], object]]],
    threads: int,
    go_on: Callable[[], None],
    on_staged: Callable[[int], None],
) -> None:
    # In the order of the payload, so that its beginning is there early. Long copies release the GIL.
    work.sort(key=lambda entry: entry[0])
    lock = threading.Lock()
    done = [False] * len(work)
    first = 0  # of those that are not done

    def step(index: int, go_on: Callable[[], None]) -> None:
        nonlocal first
        go_on()
        began = recorder.clock()
        offset, nbytes, copy = work[index]
        copy()
        if (trace := recorder.current) is not None:
            trace.add("copy", "cpu", began, recorder.clock(), {"offset": offset, "bytes": nbytes})
        with lock:
            done[index] = True
            if index == first:
                while first < len(work) and done[first]:
                    first += 1
                if first < len(work):
                    on_staged(work[first][0])

    in_threads(range(len(work)), threads, lambda: go_on, step)
