"""torch.save and torch.load: one file per rank."""

from __future__ import annotations

import time
from collections.abc import Mapping

from native_bench.peers.base import Sync, Tensors, Traits, copy_all


class TorchSave(Sync):
    traits = Traits(
        name="torch",
        title="torch.save / torch.load",
        how="`torch.save`; `torch.load(weights_only=True)`, then copied",
    )
    mmap = False

    def write(self, directory: str, step: int, state: Tensors) -> None:
        import torch

        torch.save(state, self.own_file(directory, ".pt"))

    def restore(self, directory: str, target: Tensors) -> Mapping[str, float] | None:
        import torch

        start = time.perf_counter()
        loaded = torch.load(self.own_file(directory, ".pt"), mmap=self.mmap, weights_only=True)
        seconds = time.perf_counter() - start
        copy_all(loaded, target)
        # With mmap the bytes come only when they are copied.
        return None if self.mmap else {"load_s": seconds}


class TorchMmap(TorchSave):
    traits = Traits(
        name="torch-mmap",
        title="torch.load, mmap",
        how="`torch.save`; `torch.load(mmap=True, weights_only=True)`, then copied",
        saves_like="torch",
    )
    mmap = True
