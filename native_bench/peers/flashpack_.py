"""flashpack: one file per rank, read in both of the ways that it has on a CPU."""

from __future__ import annotations

import os

from native_bench.peers.base import Place, Sync, Tensors, Traits, not_importable


class FlashPack(Sync):
    traits = Traits(
        name="flashpack",
        title="flashpack",
        how=(
            "`pack_to_file`; `read_flashpack_file` (memory-mapped on CPU), each tensor copied into its target"
        ),
        fsyncs=True,
    )

    def missing(self) -> str | None:
        return not_importable("flashpack.deserialization")

    def write(self, directory: str, step: int, state: Tensors) -> None:
        from flashpack import pack_to_file

        pack_to_file(state, self.own_file(directory, ".flashpack"), target_dtype=None)

    def restore(self, directory: str, target: Tensors) -> None:
        from flashpack.deserialization import iterate_from_flash_tensor, read_flashpack_file

        storage, metadata = read_flashpack_file(self.own_file(directory, ".flashpack"))
        left = dict(target)
        for name, tensor in iterate_from_flash_tensor(storage, metadata):
            wanted = left.pop(name)
            wanted.copy_(tensor.view(wanted.shape))
        if left:
            raise ValueError(f"{len(left)} tensors did not come, among them {next(iter(left))}")


class FlashPackParallel(FlashPack):
    traits = Traits(
        name="flashpack-parallel",
        title="flashpack, parallel reads",
        how=(
            "the same with `FLASHPACK_CPU_PARALLEL_READ=1`: its threads read into memory of its own, past "
            "the page cache where that has nothing"
        ),
        fsyncs=True,
        saves_like="flashpack",
    )

    def open(self, place: Place) -> None:
        super().open(place)
        os.environ["FLASHPACK_CPU_PARALLEL_READ"] = "1"
