"""What a checkpoint system has to offer so that it can be measured beside others."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]

DESCRIPTORS_A_TENSOR = 4
"""In memory shared by descriptor: of this save and the one before, and once more each while on the way."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What is true of a system whatever it is measured on.

    name: for `--systems`. title, how: for the report; `how` says which calls are made.
    fsyncs: its save is durable when it says it is done. Else the harness fsyncs the files afterwards, and
    that counts.
    copies: when the call that stalls training returns, the snapshot is its own. Else the state is aliased:
        what training changes afterwards can get into the file.
    group: needs torch.distributed even on one rank.
    restores_like: reads with the same calls as that system; then restored and checked once, but not timed.
    saves_like: saves with the same calls as that system. If both are measured, this one only restores, from
        the files of that one.
    fresh: whether a worker serves one turn only, after an untimed save, since memory of the last state cannot
        be had back from it or its helpers.
    descriptors: how many a process of it needs per tensor, at most.
    holds: memory it keeps between two saves, as a multiple of the state.
    max_ranks: None: any.
    limit: no checkpoint system, but a limit of the machine reached without one.
    """

    name: str
    title: str
    how: str
    fsyncs: bool = False
    copies: bool = True
    group: bool = False
    restores_like: str | None = None
    saves_like: str | None = None
    fresh: bool = False
    descriptors: int = 0
    holds: int = 0
    max_ranks: int | None = None
    limit: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands: its rank, and memory of its state's size to use if it likes."""

    rank: int
    world_size: int
    fresh_state: Callable[[], Tensors]
    """The state as new tensor objects over the same memory."""


@dataclass(frozen=True, slots=True)
class SaveSeconds:
    """From the call: until training may go on, and until the system says that it is done."""

    stall_s: float
    done_s: float
    extra: Mapping[str, float] | None = None


class Peer(Protocol):
    """One system in one worker process.

    The worker calls `missing`; if it is None, `open` once, then `save` and `restore` in turn, each in a
    directory that did not exist before, and `close`. All ranks make the same calls; they meet right before
    each timed one.
    """

    traits: Traits

    def missing(self) -> str | None:
        """Why it cannot be measured here (not installed, too few ranks), or None."""

    def open(self, place: Place) -> None:
        """Make what a training job makes once."""

    def save(self, directory: str, step: int, state: Tensors) -> SaveSeconds:
        """Save, and wait until it is done. `directory` exists and is empty."""

    def restore(self, directory: str, target: Tensors) -> Mapping[str, float] | None:
        """Fill the target tensors in place. May return further figures, seconds by name."""

    def close(self) -> None:
        """End helper processes and free memory."""


class Sync:
    """A system whose save is one blocking call, and that has nothing to open or close."""

    traits: Traits
    place: Place

    def missing(self) -> str | None:
        return None

    def open(self, place: Place) -> None:
        self.place = place

    def close(self) -> None:
        pass

    def write(self, directory: str, step: int, state: Tensors) -> None:
        raise NotImplementedError

    def save(self, directory: str, step: int, state: Tensors) -> SaveSeconds:
        start = time.perf_counter()
        self.write(directory, step, state)
        seconds = time.perf_counter() - start
        return SaveSeconds(seconds, seconds)

    def own_file(self, directory: str, suffix: str) -> str:
        """This rank's file."""
        return os.path.join(directory, f"rank{self.place.rank}{suffix}")


def not_importable(*modules: str) -> str | None:
    """Why these modules cannot be imported, or None."""
    from importlib import import_module

    for module in modules:
        try:
            import_module(module)
        except ModuleNotFoundError as exc:
            return f"not installed ({exc.name})"
        except Exception as exc:  # a package too old for this torch fails in many ways
            return f"cannot be imported here: {type(exc).__name__}: {exc}"[:300]
    return None


def copy_all(loaded: Mapping[str, torch.Tensor], target: Tensors) -> None:
    """Copy what a loader returned to where the training process needs it."""
    if len(loaded) != len(target):
        raise ValueError(f"{len(loaded)} tensors were loaded, {len(target)} are wanted")
    for name, tensor in target.items():
        tensor.copy_(loaded[name])


def share_by_name(tensors: int) -> None:
    """Have torch share memory between processes by name if a descriptor for each tensor, which is its
    default, comes near to what a process may have."""
    import torch.multiprocessing

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and DESCRIPTORS_A_TENSOR * tensors > soft:
        torch.multiprocessing.set_sharing_strategy("file_system")


def files_below(directory: str) -> Iterator[str]:
    for at, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(at, name)
            if os.path.isfile(path) and not os.path.islink(path):
                yield path
