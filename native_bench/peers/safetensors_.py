"""safetensors: one file per rank."""

from __future__ import annotations

from native_bench.peers.base import Sync, Tensors, Traits, copy_all, not_importable


class SafeOpen(Sync):
    traits = Traits(
        name="safetensors",
        title="safetensors `safe_open`",
        how="`save_file`; `safe_open`, each tensor copied into its target",
    )

    def missing(self) -> str | None:
        return not_importable("safetensors.torch")

    def write(self, directory: str, step: int, state: Tensors) -> None:
        from safetensors.torch import save_file

        save_file(state, self.own_file(directory, ".safetensors"))

    def restore(self, directory: str, target: Tensors) -> None:
        from safetensors import safe_open

        with safe_open(self.own_file(directory, ".safetensors"), "pt") as file:
            for name, tensor in target.items():
                tensor.copy_(file.get_tensor(name))


class LoadFile(SafeOpen):
    traits = Traits(
        name="safetensors-load-file",
        title="safetensors `load_file`",
        how="`save_file`; `load_file`, then copied",
        saves_like="safetensors",
    )

    def restore(self, directory: str, target: Tensors) -> None:
        from safetensors.torch import load_file

        copy_all(load_file(self.own_file(directory, ".safetensors")), target)
