"""torchsnapshot: all ranks save into one directory, in place on restore."""

from __future__ import annotations

import time

from native_bench.peers.base import SaveSeconds, Sync, Tensors, Traits, not_importable


class TorchSnapshot(Sync):
    traits = Traits(
        name="torchsnapshot",
        title="torchsnapshot",
        how="`Snapshot.async_take` (stall) and `wait()`; `Snapshot.restore`",
    )

    def missing(self) -> str | None:
        return not_importable("torchsnapshot")

    def save(self, directory: str, step: int, state: Tensors) -> SaveSeconds:
        from torchsnapshot import Snapshot, StateDict

        start = time.perf_counter()
        pending = Snapshot.async_take(directory, {"state": StateDict(**state)})
        stall_s = time.perf_counter() - start
        pending.wait()
        return SaveSeconds(stall_s, time.perf_counter() - start)

    def restore(self, directory: str, target: Tensors) -> None:
        from torchsnapshot import Snapshot, StateDict

        into = StateDict(**target)
        Snapshot(directory).restore({"state": into})
        for name, tensor in target.items():
            if into[name] is not tensor:  # it keeps a tensor only if it can read in place
                tensor.copy_(into[name])
