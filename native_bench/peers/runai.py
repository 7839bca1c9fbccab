"""Run:ai model streamer: reads safetensors files, one per rank."""

from __future__ import annotations

from native_bench.peers.base import Sync, Tensors, Traits, not_importable


class RunaiStreamer(Sync):
    traits = Traits(
        name="runai",
        title="Run:ai model streamer",
        how="`save_file` of safetensors; `SafetensorsStreamer.stream_file(owned=False)`, "
        "each tensor copied into its target as it comes",
        saves_like="safetensors",
    )

    def missing(self) -> str | None:
        return not_importable("safetensors.torch", "runai_model_streamer")

    def write(self, directory: str, step: int, state: Tensors) -> None:
        from safetensors.torch import save_file

        save_file(state, self.own_file(directory, ".safetensors"))

    def restore(self, directory: str, target: Tensors) -> None:
        import logging

        from runai_model_streamer import SafetensorsStreamer

        logging.getLogger("runai_model_streamer").setLevel(logging.WARNING)
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(self.own_file(directory, ".safetensors"), owned=False)
            left = dict(target)
            for name, tensor in streamer.get_tensors():
                left.pop(name).copy_(tensor)
        if left:
            raise ValueError(f"{len(left)} tensors did not come, among them {next(iter(left))}")
