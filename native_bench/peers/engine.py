"""The engine, as a training job uses it: one Checkpointer for the job, saves in the background, restores in
place."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from native_bench.peers.base import Place, SaveSeconds, Tensors, Traits, not_importable

TIMEOUT_S = 600.0


def cpu_seconds_of(pid: int | None) -> float:
    """CPU time of a process and its threads so far, those that have ended included; 0 where there is none."""
    # The clock that clock_getcpuclockid(3) gives; /proc/PID/stat counts hundredths of a second.
    return 0.0 if pid is None else time.clock_gettime((~pid << 3) | 2)


class Engine:
    traits = Traits(
        name="engine",
        title="**ckptengine**",
        how=(
            "`Checkpointer.async_save`, then `result()`: durable and committed; `restore` with "
            "every digest checked"
        ),
        fsyncs=True,
        holds=1,
    )
    settings: Mapping[str, Any] = {}
    restoring: Mapping[str, Any] = {}

    def missing(self) -> str | None:
        if reason := not_importable("ckptengine.checkpointer"):
            return reason
        import ckptengine as ck

        try:
            ck.Config(**self.settings)
        except (TypeError, ValueError) as exc:
            return f"not in this version: {exc}"
        return None

    def open(self, place: Place) -> None:
        import ckptengine as ck

        self._config = ck.Config(**self.settings)
        self._checkpointer: ck.Checkpointer | None = None

    def _at(self, directory: str) -> Any:
        """One Checkpointer for the life of the worker, whose root is the directory that holds all saves."""
        import ckptengine as ck

        if self._checkpointer is None:
            self._checkpointer = ck.Checkpointer(os.path.dirname(directory), config=self._config)
        return self._checkpointer

    def save(self, directory: str, step: int, state: Tensors) -> SaveSeconds:
        checkpointer = self._at(directory)
        writer_cpu_s = cpu_seconds_of(checkpointer.writer_pid)
        start = time.perf_counter()
        handle = checkpointer.async_save(step, state)
        stall_s = time.perf_counter() - start
        handle.result(TIMEOUT_S)
        done_s = time.perf_counter() - start
        writer_cpu_s = cpu_seconds_of(checkpointer.writer_pid) - writer_cpu_s
        return SaveSeconds(stall_s, done_s, {**self._moments(handle), "writer_cpu_s": writer_cpu_s})

    def _moments(self, handle: Any) -> dict[str, float]:
        times = handle.times
        return {
            "written_s": times.written - times.requested,
            "durable_s": times.durable - times.requested,
        }

    def restore(self, directory: str, target: Tensors) -> Mapping[str, float]:
        info = self._at(directory).restore(target, **self.restoring)
        return {"read_s": info.read_seconds}

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()


class EngineSync(Engine):
    traits = Traits(
        name="engine-sync",
        title="**ckptengine**, `save`",
        how="`Checkpointer.save`: returns when it is committed, and writes while it still copies",
        fsyncs=True,
        restores_like="engine",
        holds=1,
    )

    def save(self, directory: str, step: int, state: Tensors) -> SaveSeconds:
        checkpointer = self._at(directory)
        start = time.perf_counter()
        checkpointer.save(step, state)
        seconds = time.perf_counter() - start
        return SaveSeconds(seconds, seconds)


class EngineOverlap(Engine):
    """Saves a model and its optimizer made of the same tensors, as only those are known to change in steps
    alone."""

    traits = Traits(
        name="engine-overlap",
        title="**ckptengine**, overlap",
        how='`Config(snapshot="overlap")` with model and AdamW: the copy goes on while training does, and '
        "the next optimizer step waits for it",
        fsyncs=True,
        restores_like="engine",
        holds=1,
    )
    settings: Mapping[str, Any] = {"snapshot": "overlap"}

    def open(self, place: Place) -> None:
        super().open(place)
        self._training: dict[str, Any] | None = None

    def save(self, directory: str, step: int, state: Tensors) -> SaveSeconds:
        if self._training is None:
            self._training = _training(state)
        return super().save(directory, step, self._training)

    def _moments(self, handle: Any) -> dict[str, float]:
        """With the time at which the copy was done: a step before that would have waited for it."""
        return {**super()._moments(handle), "staged_s": handle.times.staged - handle.times.requested}

    def restore(self, directory: str, target: Tensors) -> Mapping[str, float]:
        info = self._at(directory).restore(_training(target))
        return {"read_s": info.read_seconds}


def _training(tensors: Tensors) -> dict[str, Any]:
    """A model whose parameters are the weights, and an AdamW whose moments are the others, over the same
    memory."""
    import torch

    import ckptengine as ck

    model = torch.nn.Module()
    state: dict[torch.Tensor, Any] = {}
    for name, tensor in tensors.items():
        rank, _, rest = name.partition(".")
        if rest.startswith("optim."):
            continue
        parameter = torch.nn.Parameter(tensor)
        model.register_parameter(rest.replace(".", "_"), parameter)
        moments = {part: tensors.get(f"{rank}.optim.{rest}.{part}") for part in ("exp_avg", "exp_avg_sq")}
        known = {key: moment for key, moment in moments.items() if moment is not None}
        state[parameter] = {"step": torch.tensor(1.0), **known}
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state.update(state)
    return {"training": ck.training_state(model, optimizer)}


class EngineZstd(Engine):
    traits = Traits(
        name="engine-zstd",
        title="**ckptengine**, zstd",
        how='`Config(codec="zstd")`',
        fsyncs=True,
        fresh=True,  # an arena of its own is one too many to keep beside the others
    )
    settings: Mapping[str, Any] = {"codec": "zstd"}


class EngineAuto(Engine):
    traits = Traits(
        name="engine-auto",
        title='**ckptengine**, `codec="auto"`',
        how='`Config(codec="auto")`: compresses what is durable sooner for it',
        fsyncs=True,
        fresh=True,  # an arena of its own is one too many to keep beside the others
    )
    settings: Mapping[str, Any] = {"codec": "auto"}


class EngineUnverified(Engine):
    traits = Traits(
        name="engine-unverified",
        title="**ckptengine**, digests not checked",
        how="`restore(..., verify=False)`",
        fsyncs=True,
        saves_like="engine",
    )
    restoring: Mapping[str, Any] = {"verify": False}
