"""ckptengine: a checkpoint storage engine for sharded PyTorch training.

The public names, each imported when first used: `import ckptengine` alone is cheap and imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from ckptengine.adapters.fsdp import training_state
    from ckptengine.adapters.tensors import LocalChunk
    from ckptengine.checkpointer import Checkpointer
    from ckptengine.config import Config
    from ckptengine.errors import (
        CheckpointError,
        CheckpointNotFoundError,
        CommitTimeoutError,
        CorruptCheckpointError,
        NotCommittedError,
        SaveFailedError,
        StateMismatchError,
        StorageError,
        UnsupportedFormatError,
        UnsupportedStateError,
    )
    from ckptengine.handle import SaveHandle
    from ckptengine.info import CommitInfo, RestoreInfo
    from ckptengine.reader_api import CheckpointReader, open_checkpoint
    from ckptengine.restore_handle import RestoreHandle
    from ckptengine.verification import VerifyReport, verify

__all__ = [
    "Checkpointer",
    "Config",
    "SaveHandle",
    "CommitInfo",
    "RestoreInfo",
    "RestoreHandle",
    "open_checkpoint",
    "CheckpointReader",
    "verify",
    "VerifyReport",
    "training_state",
    "LocalChunk",
    "CheckpointError",
    "CheckpointNotFoundError",
    "NotCommittedError",
    "CorruptCheckpointError",
    "UnsupportedFormatError",
    "StateMismatchError",
    "UnsupportedStateError",
    "StorageError",
    "SaveFailedError",
    "CommitTimeoutError",
    "__version__",
]

# No module has the name of a public function: importing such a module would put it in the function's place.
_HOME = {
    "Checkpointer": "checkpointer",
    "Config": "config",
    "SaveHandle": "handle",
    "CommitInfo": "info",
    "RestoreInfo": "info",
    "RestoreHandle": "restore_handle",
    "open_checkpoint": "reader_api",
    "CheckpointReader": "reader_api",
    "verify": "verification",
    "VerifyReport": "verification",
    "training_state": "adapters.fsdp",
    "LocalChunk": "adapters.tensors",
    "CheckpointError": "errors",
    "CheckpointNotFoundError": "errors",
    "NotCommittedError": "errors",
    "CorruptCheckpointError": "errors",
    "UnsupportedFormatError": "errors",
    "StateMismatchError": "errors",
    "UnsupportedStateError": "errors",
    "StorageError": "errors",
    "SaveFailedError": "errors",
    "CommitTimeoutError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
