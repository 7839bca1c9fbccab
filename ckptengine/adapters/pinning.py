"""How do tensors leave the GPU? Into the arena, registered as pinned memory, on their own stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckptengine.adapters.tensors import plain
from ckptengine.staging.arena import Arena

logger = logging.getLogger(__name__)

_ALREADY_REGISTERED = 712
_NOT_REGISTERED = 713

_streams: dict[torch.device, torch.cuda.Stream] = {}


def copy_from_device(
    tensors: Sequence[tuple[torch.Tensor, int]], payload: memoryview, address: int
) -> Callable[[], None]:
    """Start copying `(tensor, offset into payload)` in C order; the returned call waits until the bytes are
    there.

    The copies wait for the work queued on each device's current stream, so they see what the caller sees;
    work queued there later does not wait for them, so the caller must not change the tensors before the
    returned call has returned.
    """
    # A mutable buffer for torch; its memory is the payload's.
    memory = torch.frombuffer(payload, dtype=torch.uint8)
    used = set()
    with torch.no_grad():
        for tensor, offset in tensors:
            device = tensor.device
            stream = _stream(device)
            if device not in used:
                stream.wait_stream(torch.cuda.current_stream(device))
                used.add(device)
            with torch.cuda.stream(stream):
                elements = plain(tensor.detach())
                # A strided copy from the device would go element by element: gather there, then move bytes.
                source = elements.contiguous()
                target = memory[offset : offset + source.nbytes].view(source.dtype).view(source.shape)
                target.copy_(source, non_blocking=True)
                # Its memory must not be given to another tensor before this stream is done with it.
                source.record_stream(stream)

    def wait() -> None:
        for device in used:
            _streams[device].synchronize()

    return wait


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
