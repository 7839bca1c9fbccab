"""What is given to objects after a read, and what of it need not wait for the end of a long one?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ckptengine.adapters import objects
from ckptengine.adapters.origin import Origin
from ckptengine.adapters.placing import Placement
from ckptengine.errors import CheckpointError


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """An object takes its state, once the tensors and the large values that it is made of have been read.

    name: of the object in the state. large: leaves of large values. of_module: it is a module's, for which
    its own parameters and buffers have been filled in place. origin: for an error.
    """

    adapter: objects.Adapter
    get: Callable[[], Any]
    name: str
    placements: tuple[Placement, ...]
    large: tuple[int, ...]
    origin: Origin
    of_module: bool = False

    def __call__(self) -> None:
        """Raises `CheckpointError` for whatever the object raises; so do the others that load."""
        with self.origin.loading(self.name):
            self.adapter.load(self.get())

    @property
    def nbytes(self) -> int:
        """Of the tensors it needs."""
        return sum(placement.tensor.nbytes for placement in self.placements)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that it is the state of."""
        adapter = self.adapter
        if isinstance(adapter, objects.OptimizerAdapter):
            return [adapter.optimizer]
        return adapter.optimizers() if isinstance(adapter, objects.StatefulAdapter) else []

    @property
    def for_options(self) -> list[Placement]:
        """The tensors among an optimizer's options, such as a learning rate. Not with large values."""
        values = [value for group in self.get()["param_groups"] for value in group.values()]
        found = {value.data_ptr() for value in values if isinstance(value, torch.Tensor)}
        return [one for one in self.placements if one.start in found]

    def takes_options_early(self) -> bool:
        """Can the optimizer have its options (learning rate and the like) before the rest of its state? Not
        if it, or somebody's hook, may make something else of what is loaded."""
        optimizers = self.optimizers
        return len(optimizers) == 1 and all(
            type(one).load_state_dict is torch.optim.Optimizer.load_state_dict
            and not one._optimizer_load_state_dict_pre_hooks
            and not one._optimizer_load_state_dict_post_hooks
            for one in optimizers
        )

    def load_options(self) -> None:
        """What `__call__` does to the parameter groups; `load_state` does the rest."""
        (optimizer,) = self.optimizers
        with self.origin.loading(self.name):
            for own, stored in zip(optimizer.param_groups, self.get()["param_groups"], strict=True):
                kept: dict[str, Any] = {key: own[key] for key in ("params", "param_names") if key in own}
                own.clear()
                own.update(copy.deepcopy({key: value for key, value in stored.items() if key != "params"}))
                own.update(kept)

    def held_to_groups(self, load: Callable[[], object]) -> Callable[[], None]:
        """`load`, for later; it raises if the optimizers' groups hold other parameters by then."""
        then = [(optimizer, _groups(optimizer)) for optimizer in self.optimizers]

        def checked() -> None:
            for optimizer, groups in then:
                now = _groups(optimizer)
                if _ids(now) != _ids(groups):
                    sizes = [list(map(len, each)) for each in (groups, now)]
                    raise CheckpointError(
                        f"the parameter groups of {self.name!r} ({type(optimizer).__name__}) were changed "
                        f"while it was being restored: parameters per group: {sizes[1]}, in the call "
                        f"{sizes[0]}; its state is not loaded",
                        hint="add and change parameter groups (add_param_group) before the restore, as they "
                        "were when it was saved, or after result()",
                    )
            load()

        return checked

    def load_state(self) -> None:
        """All but the options, which stay as they are: a schedule may have moved on."""
        (optimizer,) = self.optimizers
        with self.origin.loading(self.name):
            loaded = self.get()
            groups = [
                {**{key: value for key, value in own.items() if key != "params"}, "params": stored["params"]}
                for own, stored in zip(optimizer.param_groups, loaded["param_groups"], strict=True)
            ]
            self.adapter.load({**loaded, "param_groups": groups})


def _groups(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


def _ids(groups: list[list[torch.Tensor]]) -> list[list[int]]:
    return [list(map(id, group)) for group in groups]
