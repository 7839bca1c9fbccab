"""Whether two runs ended the same: digests of everything one rank holds, taken without the engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.parallel import local_part
from trainer.rng import RngState


def _update(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        local = local_part(value.detach())
        digest.update(f"{name} {local.dtype} {tuple(local.shape)}\n".encode())
        digest.update(local.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray):
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            _update(digest, f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _update(digest, f"{name}.{index}", item)
    else:
        digest.update(f"{name} {value!r}\n".encode())


def digest_of(value: Any) -> str:
    """SHA-256 over names, dtypes, shapes, bytes of a nested value; of a sharded tensor, this rank's part."""
    digest = hashlib.sha256()
    _update(digest, "", value)
    return digest.hexdigest()


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            yield name, optimizer.state[parameter]


def final_digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of this rank's parameters, optimizer state and random generators."""
    return {
        "parameters": digest_of(dict(model.named_parameters())),
        "optimizer": digest_of(dict(_optimizer_state(model, optimizer))),
        "rng": digest_of(RngState().state_dict()),
    }


def write_final(folder: str, rank: int, fields: dict[str, Any]) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"final-rank{rank}.json").write_text(
        json.dumps({"rank": rank, **fields}, indent=2) + "\n"
    )
