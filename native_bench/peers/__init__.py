"""Which systems are measured? Each in a module of its own, imported only in the worker that measures it."""

from __future__ import annotations

from importlib import import_module

from native_bench.peers.base import Peer, Traits

SYSTEMS: dict[str, str] = {
    "engine": "engine:Engine",
    "engine-sync": "engine:EngineSync",
    "engine-overlap": "engine:EngineOverlap",
    "engine-zstd": "engine:EngineZstd",
    "engine-auto": "engine:EngineAuto",
    "engine-unverified": "engine:EngineUnverified",
    "raw": "raw:Raw",
    "safetensors": "safetensors_:SafeOpen",
    "safetensors-load-file": "safetensors_:LoadFile",
    "torch": "torch_save:TorchSave",
    "torch-mmap": "torch_save:TorchMmap",
    "dcp-1": "dcp:Dcp1",
    "dcp-2": "dcp:Dcp2",
    "dcp-async-thread": "dcp:AsyncThread",
    "dcp-async-process": "dcp:AsyncProcess",
    "dcp-async-stager": "dcp:AsyncStager",
    "nvrx": "nvrx:TorchAsync",
    "nvrx-writer": "nvrx:WriterAsync",
    "torchsnapshot": "torchsnapshot_:TorchSnapshot",
    "fastsafetensors": "fastsafetensors_:FastSafetensors",
    "runai": "runai:RunaiStreamer",
    "flashpack": "flashpack_:FlashPack",
    "flashpack-parallel": "flashpack_:FlashPackParallel",
    "orbax": "orbax_:Orbax",
}
"""By name: module below this package, and class. The order is that of the first round."""

BASE = (
    "engine",
    "engine-sync",
    "engine-overlap",
    "engine-zstd",
    "engine-unverified",
    "raw",
    "safetensors",
    "torch",
    "torch-mmap",
    "dcp-1",
    "dcp-2",
    "dcp-async-thread",
    "nvrx",
    "nvrx-writer",
)
"""Those that need nothing beside the package and its test extra."""


def make(name: str) -> Peer:
    """An instance of the system called `name`, or at `module:Class` (absolute): a way in for tests. Raises
    ValueError if there is none."""
    module, _, attribute = SYSTEMS.get(name, name).partition(":")
    try:
        found = import_module(f"{__name__}.{module}" if name in SYSTEMS else module)
        peer: Peer = getattr(found, attribute)()
    except Exception as exc:  # whatever the module there does
        raise ValueError(f"no system at {name!r}: {type(exc).__name__}: {exc}") from exc
    if not isinstance(getattr(peer, "traits", None), Traits):
        raise ValueError(f"no system at {name!r}: it has no traits, see native_bench/peers/base.py")
    return peer
