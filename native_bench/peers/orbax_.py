"""Orbax on jax's CPU backend: the tensors are handed over as numpy arrays over the same memory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from native_bench.peers.base import Place, SaveSeconds, Sync, Tensors, Traits, not_importable


class Orbax(Sync):
    traits = Traits(
        name="orbax",
        title="Orbax",
        how="`AsyncCheckpointer(PyTreeCheckpointHandler).save` of numpy arrays, `wait_until_finished`; "
        "`restore`, then copied",
        max_ranks=1,
    )

    def missing(self) -> str | None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return not_importable("jax", "ml_dtypes", "orbax.checkpoint")

    def open(self, place: Place) -> None:
        import orbax.checkpoint as ocp

        super().open(place)
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def save(self, directory: str, step: int, state: Tensors) -> SaveSeconds:
        arrays = {name: _array(tensor) for name, tensor in state.items()}
        start = time.perf_counter()
        self._checkpointer.save(os.path.join(directory, "state"), arrays)
        stall_s = time.perf_counter() - start
        self._checkpointer.wait_until_finished()
        return SaveSeconds(stall_s, time.perf_counter() - start)

    def restore(self, directory: str, target: Tensors) -> Mapping[str, float]:
        import numpy as np
        import orbax.checkpoint as ocp

        kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in target}
        start = time.perf_counter()
        loaded = self._checkpointer.restore(os.path.join(directory, "state"), restore_args=kinds)
        seconds = time.perf_counter() - start
        for name, tensor in target.items():
            np.copyto(_array(tensor), loaded[name])
        return {"load_s": seconds}

    def close(self) -> None:
        self._checkpointer.close()


def _array(tensor: Any) -> Any:
    """A numpy array over the tensor's memory; bf16 by way of the integers torch and numpy both have."""
    import torch

    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
