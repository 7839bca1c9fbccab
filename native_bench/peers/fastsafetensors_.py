"""fastsafetensors, without GPU Direct Storage: one file per rank."""

from __future__ import annotations

from native_bench.peers.base import Sync, Tensors, Traits, not_importable


class FastSafetensors(Sync):
    traits = Traits(
        name="fastsafetensors",
        title="fastsafetensors",
        how=(
            '`save_file` of safetensors; `fastsafe_open(device="cpu", nogds=True)`, each tensor '
            "copied into its target"
        ),
        saves_like="safetensors",
    )

    def missing(self) -> str | None:
        return not_importable("safetensors.torch", "fastsafetensors")

    def write(self, directory: str, step: int, state: Tensors) -> None:
        from safetensors.torch import save_file

        save_file(state, self.own_file(directory, ".safetensors"))

    def restore(self, directory: str, target: Tensors) -> None:
        from fastsafetensors import fastsafe_open

        with fastsafe_open(self.own_file(directory, ".safetensors"), device="cpu", nogds=True) as file:
            for name, tensor in target.items():
                tensor.copy_(file.get_tensor(name))
