"""Which tensors may be copied after a save has returned, and did anything change one before its copy was
done?

Only what nothing but an optimizer's step changes may wait: parameters that a torch optimizer holds, and its
state. A hook that torch calls before every optimizer's step lets it wait for the copies under way. Whatever
else might change such a tensor is found out by its version counter, which every in-place operation raises,
and by samples of its bytes, as fused kernels and writes through `.data` leave the counter alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from msgspec import structs
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ckptengine.adapters import fsdp1
from ckptengine.adapters.items import StateItem, dense_stride
from ckptengine.adapters.pinning import Queued
from ckptengine.adapters.stage import address_of, copy_items
from ckptengine.adapters.tensors import extract, plain
from ckptengine.errors import SaveFailedError

LATE_NBYTES = 64 << 10
"""Smaller ones are copied at once: that costs no more than to watch them."""
SETTLE_TIMEOUT_S = 10.0
SETTLE_POLL_S = 0.001
_SAMPLE_NBYTES = 64
Sample = tuple[bytes, ...]
"""Bytes of a tensor's memory from its beginning, middle and end."""
_HINT = "change tensors of the state in place only after handle.wait_staged(), or use Config(snapshot='copy')"

_lock = threading.Lock()
_active: list[Guard] = []
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that have made a step under the hook, so that the hook is known to reach them."""
_watchers = 0
_hook: Any = None


def watch_steps() -> Callable[[], None]:
    """From now on, torch tells of every optimizer's step in this process; until the returned call, made
    once."""
    global _hook, _watchers
    with _lock:
        _watchers += 1
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_step)
    return _unwatch


def _unwatch() -> None:
    global _hook, _watchers
    with _lock:
        _watchers -= 1
        if not _watchers and _hook is not None:
            _hook.remove()
            _hook = None


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _stepped.add(optimizer)
    # Any optimizer may hold a tensor that is being copied, also one that is in no state.
    for guard in tuple(_active):
        guard.before_step()


def wait_for_copies() -> None:
    """Wait until no tensor of this process is being copied behind its training."""
    for guard in tuple(_active):
        guard.passable.wait()
        guard.check()


def _forget() -> None:
    """In a fork nobody copies, and nobody would end the wait."""
    global _lock
    _active.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


class _Owned(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Memory that an optimizer changes in its step. tensors: whose version counters tell of it."""

    start: int
    stop: int
    tensors: tuple[torch.Tensor, ...]

    def changed(self, tensor: torch.Tensor, version: int) -> str:
        """What has become of the tensor, whose counter was `version`."""
        count = tensor._version - version
        # The address of a sharded tensor's wrapper says nothing, and a counter only ever grows.
        if count < 0 or (len(self.tensors) == 1 and tensor.data_ptr() != self.start):
            return (
                "the optimizer's tensor was exchanged for another one, or given other memory "
                "(torch.utils.swap_tensors, module.to, an assignment to .data)"
            )
        return _operations(count)


class _Late(msgspec.Struct, frozen=True, eq=False, gc=False):
    name: str
    source: torch.Tensor
    start: int
    nbytes: int
    storage_nbytes: int
    version: int
    sample: Sample | None

    def moved(self) -> bool:
        """Its memory has been given away: there is nothing to copy any more."""
        return (
            self.source.data_ptr() != self.start
            or self.source.untyped_storage().nbytes() != self.storage_nbytes
        )


class Guard:
    """The tensors of one save that are copied after its call, from the call until the copies are checked.

    Made in the training thread, in the call. `late` are the items to copy afterwards, in the memory they had
    in the call whatever becomes of their owners; `early` those to copy before the call returns. Then, in the
    copying thread, `copy`, and in any case `release`.
    """

    def __init__(
        self,
        items: Sequence[StateItem],
        optimizers: Iterable[Optimizer],
        on_wait: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.early: list[StateItem] = []
        self.late: list[StateItem] = []
        self.passable = threading.Event()
        self._thread = threading.get_ident()
        self._on_wait = on_wait
        self._checking = threading.Lock()
        self._checked = False
        self._error: SaveFailedError | None = None
        self._fences: Sequence[torch.cuda.Event] = ()
        self._staged: dict[str, int] = {}
        owned = sorted(_owned_by({*optimizers, *_stepped}), key=lambda memory: memory.start)
        starts, stops = _merged(owned)
        self._tensors: list[_Late] = []
        for item in items:
            late = _late(item, starts, stops)
            if late is None:
                self.early.append(item)
            else:
                self._tensors.append(late)
                self.late.append(structs.replace(item, source=late.source))
        # Of all that optimizers hold: an FSDP parameter, whose memory is exchanged, and a DTensor have
        # counters of their own.
        self._owned = [(memory, tensor, tensor._version) for memory in owned for tensor in memory.tensors]
        if self._tensors:
            with _lock:
                _active.append(self)

    # -- the training thread --

    def before_step(self) -> None:
        """Called before any optimizer's step: wait until it can no longer change what is copied."""
        if not self.passable.is_set():
            started = time.monotonic()
            self.passable.wait()
            self._on_wait(time.monotonic() - started)
        # Here, between two operations of the training thread, the counters tell everything that it did.
        self.check()
        for event in self._fences:
            torch.cuda.current_stream(event.device).wait_event(event)

    # -- the copying thread --

    def copy(
        self,
        items: Sequence[StateItem],
        offsets: Sequence[int],
        payload: memoryview,
        after: Queued | None,
        go_on: Callable[[], None],
        on_staged: Callable[[int], None],
    ) -> None:
        """Copy `late`, and what else is among the items, and let steps pass as soon as it is done. Arguments
        as of `copy_items`.

        `SaveFailedError` if a late tensor was changed meanwhile.
        """
        for late in self._tensors:
            if late.moved():
                raise self._changed(late.name, "its storage was freed or resized")
        base = address_of(payload)
        self._staged = {item.name: base + offset for item, offset in zip(items, offsets, strict=True)}

        def pass_on(events: Sequence[torch.cuda.Event]) -> None:
            self._fences = events
            self.passable.set()

        copy_items(items, offsets, payload, after=after, go_on=go_on, on_staged=on_staged, on_queued=pass_on)
        go_on()
        self._settle()
        self.check()
        if self._error is not None:
            raise self._error

    def _settle(self) -> None:
        """Wait until an operation that the training thread may be in the middle of has raised its counters.

        A kernel raises them when it is done. One that began before the last byte was copied may still be
        running; when the thread is seen elsewhere, it is not. Not longer than a bounded time: the thread may
        be asleep.
        """
        before = _position(self._thread)
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while before is not None and not self._checked and time.monotonic() < deadline:
            time.sleep(SETTLE_POLL_S)
            now = _position(self._thread)
            if now is None or now[0] is not before[0] or now[1] != before[1]:
                break

    def check(self) -> None:
        """Decide, once, whether what was copied is the state at the call."""
        with self._checking:
            if not self._checked:
                self._error = self._find_change()
                self._checked = True

    def release(self) -> None:
        """Let go of the tensors, and of whoever waits for them."""
        with _lock:
            if self in _active:
                _active.remove(self)
        with self._checking:
            self._checked = True
        self.passable.set()
        self._fences = ()
        self._tensors, self._owned, self.late, self.early = [], [], [], []

    def _find_change(self) -> SaveFailedError | None:
        for late in self._tensors:
            if late.moved():
                return self._changed(late.name, "its storage was freed or resized")
        for late in self._tensors:
            if late.source._version != late.version:
                return self._changed(late.name, _operations(late.source._version - late.version))
        for memory, tensor, version in self._owned:
            if tensor._version != version:
                for late in self._tensors:
                    if late.start < memory.stop and memory.start < late.start + late.nbytes:
                        return self._changed(late.name, memory.changed(tensor, version))
        for late in self._tensors:
            if late.sample is not None and not (
                _sample(late.start, late.nbytes)
                == late.sample
                == _sample(self._staged[late.name], late.nbytes)
            ):
                return self._changed(late.name, "its bytes are others, though no operation was counted")
        return None

    def _changed(self, name: str, how: str) -> SaveFailedError:
        return SaveFailedError(
            f"{name!r} was changed while it was being copied, and not by an optimizer's step: {how}",
            fqn=name,
            hint=_HINT,
        )


def _operations(count: int) -> str:
    return "an in-place operation" if count == 1 else f"{count} in-place operations"


def captured(items: Sequence[StateItem]) -> list[StateItem]:
    """The items with their bytes as they are now; on a device, as of the work on its current stream."""
    taken: list[StateItem] = []
    with torch.no_grad():
        for item in items:
            source = item.source
            if isinstance(source, bytes):
                taken.append(item)
            elif source.is_cpu and source.is_contiguous():
                taken.append(structs.replace(item, source=ctypes.string_at(source.data_ptr(), item.nbytes)))
            else:
                taken.append(structs.replace(item, source=plain(source.detach()).clone()))
    return taken


def _late(item: StateItem, starts: list[int], stops: list[int]) -> _Late | None:
    source = item.source
    if item.nbytes < LATE_NBYTES or isinstance(source, bytes) or not (source.is_cpu or source.is_cuda):
        return None
    if source.is_inference() or not _is_dense(source):
        return None
    start = source.data_ptr()
    at = bisect_right(starts, start) - 1
    if at < 0 or start + item.nbytes > stops[at]:
        return None
    return _Late(
        item.name,
        source.detach(),
        start,
        item.nbytes,
        source.untyped_storage().nbytes(),
        source._version,
        _sample(start, item.nbytes) if source.is_cpu and source.is_contiguous() else None,
    )


def _owned_by(optimizers: Iterable[Optimizer]) -> Iterator[_Owned]:
    for optimizer in optimizers:
        # Set by torch where it calls the hooks; not if the class was made to be something else.
        if not getattr(type(optimizer).step, "hooked", False):
            continue
        for group in optimizer.param_groups:
            for param in group["params"]:
                yield from _memory_of(param)
                state = optimizer.state.get(param)
                if isinstance(state, dict):
                    for value in state.values():
                        if isinstance(value, torch.Tensor):
                            yield from _memory_of(value)


def _memory_of(value: torch.Tensor) -> Iterator[_Owned]:
    local = value
    if hasattr(value, "_local_shard"):
        local = fsdp1.local_flat(value)
    elif type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        try:
            (part,) = extract(value, in_place=True)
        except ValueError:
            return
        local = part.tensor
    nbytes = local.nbytes
    # Of a smaller one's memory nothing is copied late.
    if nbytes >= LATE_NBYTES and not local.is_inference() and _is_dense(local):
        start = local.data_ptr()
        yield _Owned(start, start + nbytes, (value,) if local is value else (value, local))


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or dense_stride(tensor) is not None


def _merged(owned: list[_Owned]) -> tuple[list[int], list[int]]:
    """The memory as ranges that neither overlap nor touch, in order."""
    starts: list[int] = []
    stops: list[int] = []
    for memory in owned:
        if stops and memory.start <= stops[-1]:
            stops[-1] = max(stops[-1], memory.stop)
        else:
            starts.append(memory.start)
            stops.append(memory.stop)
    return starts, stops


# `ctypes.string_at` without its wrapper, at half the price: in the call, three are taken of each tensor.
_bytes_at = ctypes.PyDLL(None).PyBytes_FromStringAndSize
_bytes_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
_bytes_at.restype = ctypes.py_object


def _sample(start: int, nbytes: int) -> Sample:
    if nbytes <= 3 * _SAMPLE_NBYTES:
        return (_bytes_at(start, nbytes),)
    middle, last = start + nbytes // 2, start + nbytes - _SAMPLE_NBYTES
    return (
        _bytes_at(start, _SAMPLE_NBYTES),
        _bytes_at(middle, _SAMPLE_NBYTES),
        _bytes_at(last, _SAMPLE_NBYTES),
    )


_TORCH = os.path.dirname(torch.__file__) + os.sep
# A thread that waits for another, or for a backward pass, is not in an operation that changes a parameter.
_IDLE = (threading.__file__, os.path.join(_TORCH, "autograd", "graph.py"))


def _position(thread: int) -> tuple[Any, int] | None:
    """Where the thread's own code, outside of torch, is; None if it has ended, or waits."""
    frame: Any = sys._current_frames().get(thread)
    if frame is None or frame.f_code.co_filename in _IDLE:
        return None
    # An operation may run Python of torch's, and is done only when it returns to whoever called torch.
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame, frame.f_lasti
