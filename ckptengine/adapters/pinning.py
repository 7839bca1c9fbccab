"""How do tensors leave the GPU? Into the arena, registered as pinned memory, on their own stream."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ckptengine.adapters.tensors import plain
from ckptengine.staging.arena import Arena

logger = logging.getLogger(__name__)

_ALREADY_REGISTERED = 712
_NOT_REGISTERED = 713

_streams: dict[torch.device, torch.cuda.Stream] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """Where a thread stood with its devices: an event of each behind the work it had queued, and its current
    device."""

    events: dict[torch.device, torch.cuda.Event]
    current: int

    def as_there(self) -> AbstractContextManager[None]:
        """Else another thread's calls would go to device 0, and every rank make a context on it."""
        return torch.cuda.device(self.current)


def queued_now(sources: Iterable[torch.Tensor | bytes]) -> Queued | None:
    """For the devices that hold the tensors; None if there are none."""
    devices = {source.device for source in sources if not isinstance(source, bytes) and source.is_cuda}
    if not devices:
        return None
    events = {device: torch.cuda.current_stream(device).record_event() for device in devices}
    return Queued(events, torch.cuda.current_device())


def copy_from_device(
    tensors: Sequence[tuple[torch.Tensor, int]], payload: memoryview, after: Queued | None = None
) -> list[torch.cuda.Event]:
    """Start copying `(tensor, offset into payload)` in C order; the bytes are there when the returned events
    are reached.

    The copies wait for `after` (default: the work queued on each device's current stream), so they see what
    the caller sees; work queued there later does not wait for them, so the caller must not change the tensors
    before the events, unless on a stream that waits for them.
    """
    after = after or queued_now(tensor for tensor, _ in tensors)
    assert after is not None
    # A mutable buffer for torch; its memory is the payload's.
    memory = torch.frombuffer(payload, dtype=torch.uint8)
    used: dict[torch.device, torch.cuda.Stream] = {}
    with torch.no_grad():
        for tensor, offset in tensors:
            device = tensor.device
            stream = _stream(device)
            if device not in used:
                stream.wait_event(after.events[device])
                used[device] = stream
            with torch.cuda.stream(stream):
                elements = plain(tensor.detach())
                # A strided copy from the device would go element by element: gather there, then move bytes.
                source = elements.contiguous()
                target = memory[offset : offset + source.nbytes].view(source.dtype).view(source.shape)
                target.copy_(source, non_blocking=True)
                # Its memory must not be given to another tensor before this stream is done with it.
                source.record_stream(stream)

    return [stream.record_event() for stream in used.values()]


def pin_arena(arena: Arena) -> None:
    """Pin an arena for as long as it is mapped. It is reused, so this is paid once; again does nothing."""
    if arena.before_close is None and pin(arena.address, arena.view.nbytes):
        address = arena.address
        arena.before_close = lambda: unpin(address)


def pin(address: int, nbytes: int) -> bool:
    """Register memory with CUDA, so that copies from the device are direct and asynchronous; False if CUDA
    refuses.

    Also true if it is registered already. `unpin` it before it is unmapped.

    """
    if not torch.cuda.is_available():
        return False
    code = _code(_cudart().cudaHostRegister(address, nbytes, 0))
    if code in (0, _ALREADY_REGISTERED):
        return True
    logger.warning(
        "CUDA error %d: the arena is not pinned, so copies into it go through a bounce buffer", code
    )
    return False


def unpin(address: int) -> None:
    """Take back `pin`; nothing if the memory is not registered."""
    if torch.cuda.is_available():
        code = _code(_cudart().cudaHostUnregister(address))
        if code not in (0, _NOT_REGISTERED):
            logger.warning("CUDA error %d while unpinning the arena", code)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _code(result: Any) -> int:
    return int(getattr(result, "value", result))


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
    return stream
