"""Another optimizer than the one that was saved is a mismatch, found before anything is written; the same one
is not, whatever schedulers and users have added to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from ckptengine.adapters.fsdp import training_state
from ckptengine.errors import StateMismatchError
from tests.adapters.fake import Saved, bits, same

Make = Callable[[Any], optim.Optimizer]

MAKE: dict[str, Make] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "SGD momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": optim.Adam,
    "AdamW": optim.AdamW,
    "NAdam": optim.NAdam,
    "Adagrad": optim.Adagrad,
    "RMSprop": optim.RMSprop,
}
ALIKE = ({"SGD", "SGD momentum"}, {"Adam", "AdamW"})
"""Continue each other's state: the options that tell them apart are restored, too."""


def step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.zero_grad()
    size = next(model.parameters()).shape[1]
    model(torch.linspace(-1, 1, 2 * size).reshape(2, size)).square().sum().backward()
    optimizer.step()


def trained(
    make: Make, steps: int = 2, model: Callable[[], nn.Module] = lambda: nn.Linear(3, 4)
) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(steps)
    net = model()
    optimizer = make(net.parameters())
    for _ in range(steps):
        step(net, optimizer)
    return net, optimizer


def state_of(model: nn.Module, optimizer: optim.Optimizer, paired: bool) -> dict[str, Any]:
    return {"t": training_state(model, optimizer)} if paired else {"m": model, "o": optimizer}


def refused(saved: Any, target: tuple[nn.Module, optim.Optimizer], paired: bool) -> StateMismatchError:
    """The error of a restore; the target is checked to be as it was, byte by byte."""
    model, optimizer = target
    weights = {name: bits(value) for name, value in model.state_dict().items()}
    before = Saved({"o": optimizer}).load()
    with pytest.raises(StateMismatchError) as caught:
        Saved(state_of(saved[0], saved[1], paired)).restore(state_of(model, optimizer, paired), strict=False)
    assert {name: bits(value) for name, value in model.state_dict().items()} == weights
    assert same(Saved({"o": optimizer}).load(), before)
    return caught.value


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("name", MAKE)
def test_the_same_optimizer_is_restored(name: str, steps: int, paired: bool) -> None:
    model, optimizer = trained(MAKE[name])
    again, other = trained(MAKE[name], steps)
    Saved(state_of(model, optimizer, paired)).restore(state_of(again, other, paired))
    assert same(other.state_dict(), optimizer.state_dict())
    for one in ((model, optimizer), (again, other)):
        step(*one)
    assert same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("stored", "name"), list(itertools.permutations(MAKE, 2)))
def test_another_optimizer_is_a_mismatch(stored: str, name: str, steps: int, paired: bool) -> None:
    saved, target = trained(MAKE[stored]), trained(MAKE[name], steps)
    if {stored, name} in ALIKE:
        Saved(state_of(*saved, paired)).restore(state_of(*target, paired))
        step(*target)
        return
    error = refused(saved, target, paired)
    path = "t.optimizer" if paired else "o"
    (line,) = error.mismatched
    assert line.startswith(f"{path}: options of parameter group 0: only ")


def test_the_differing_options_are_named() -> None:
    error = refused(trained(optim.NAdam), trained(optim.Adamax, 0), paired=False)
    assert error.mismatched == ("o: options of parameter group 0: only in the checkpoint ['momentum_decay']",)
    error = refused(trained(optim.Adagrad), trained(MAKE["SGD"]), paired=True)
    assert error.mismatched == (
        "t.optimizer: options of parameter group 0: only here ['dampening', 'momentum', 'nesterov'], "
        "only in the checkpoint ['eps', 'initial_accumulator_value', 'lr_decay']",
    )


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_another_optimizer_with_the_same_options_is_known_by_its_state(steps: int, paired: bool) -> None:
    error = refused(trained(optim.RAdam), trained(optim.Adamax, steps), paired)
    assert len(error.mismatched) == 2
    assert all("state of parameter" in line and "['exp_inf']" in line for line in error.mismatched)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("name", sorted(MAKE.keys() - {"SGD"}))
def test_a_state_of_another_shape_than_the_parameters_is_a_mismatch(name: str, steps: int) -> None:
    def small() -> nn.Module:
        return nn.Linear(1, 4)

    def large() -> nn.Module:
        return nn.Linear(4, 4)

    saved, (model, optimizer) = trained(MAKE[name], model=small), trained(MAKE[name], steps, large)
    with pytest.raises(StateMismatchError) as caught:
        Saved({"o": saved[1]}).restore({"o": optimizer})
    assert caught.value.mismatched
    for line in caught.value.mismatched:
        assert line.startswith("o: state of parameter 0: ")
        assert line.endswith("shape [4, 1] in the checkpoint, the parameter's is [4, 4]")
    step(model, optimizer)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("stored", "options"),
    [
        ({"amsgrad": True}, {}),
        ({}, {"amsgrad": True}),
        ({"foreach": True}, {"foreach": False, "capturable": False}),
    ],
)
def test_options_may_have_other_values(stored: Any, options: Any, steps: int) -> None:
    _, optimizer = trained(lambda params: optim.AdamW(params, **stored))
    again, other = trained(lambda params: optim.AdamW(params, **options), steps)
    Saved({"o": optimizer}).restore({"o": other})
    assert same(other.state_dict(), optimizer.state_dict())
    step(again, other)


@pytest.mark.parametrize("paired", [False, True])
def test_what_schedulers_users_and_other_versions_of_torch_have_in_a_group_is_no_mismatch(
    paired: bool,
) -> None:
    model, optimizer = trained(optim.AdamW)
    optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
    optimizer.param_groups[0]["label"] = "decayed"
    plain = trained(optim.AdamW, 1)
    for key in ("fused", "capturable", "decoupled_weight_decay"):
        del plain[1].param_groups[0][key]
    for saved, target in (((model, optimizer), plain), (plain, (model, optimizer))):
        Saved(state_of(*saved, paired)).restore(state_of(*target, paired))
        step(*target)


def test_an_optimizer_that_adapts_what_it_loads_is_left_to_it() -> None:
    _, optimizer = trained(optim.Adam)
    again, other = trained(MAKE["SGD"], 0)
    own = other.state_dict()
    other.register_load_state_dict_pre_hook(lambda _, state: own)
    Saved({"o": optimizer}).restore({"o": other})
    step(again, other)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", [optim.Adafactor, optim.LBFGS])
def test_states_of_their_own_shape_are_restored(kind: Any, steps: int) -> None:
    def train(steps: int) -> Any:
        model = nn.Linear(3, 4)
        optimizer = kind(model.parameters(), lr=1e-2)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
        return optimizer

    optimizer, other = train(2), train(steps)
    Saved({"o": optimizer}).restore({"o": other})
    assert same(other.state_dict(), optimizer.state_dict())


class Projected(optim.Optimizer):
    """Keeps a state under a name of torch's, in a shape of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["exp_avg"] = param.grad.sum(-1)
            if "seen" in state:
                state["late"] = param.grad.clone()
            state["seen"] = True


@pytest.mark.parametrize(("stored", "steps"), [(1, 0), (2, 0), (1, 2), (2, 1)])
def test_other_peoples_optimizers_are_not_judged_by_torchs(stored: int, steps: int) -> None:
    _, optimizer = trained(Projected, stored)
    _, other = trained(Projected, steps)
    Saved({"o": optimizer}).restore({"o": other})
    assert same(other.state_dict(), optimizer.state_dict())


class Renewed(Projected):
    """Has an option that its older version did not have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["caution"] = self.defaults["caution"] = True

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.param_groups[0].setdefault("caution", False)


def test_other_peoples_optimizers_may_have_got_an_option() -> None:
    _, optimizer = trained(Projected)
    _, other = trained(Renewed)
    Saved({"o": optimizer}).restore({"o": other})
    assert other.param_groups[0]["caution"] is False
    assert refused(trained(Renewed), trained(MAKE["SGD"]), paired=False).mismatched


def test_what_is_no_optimizers_state_is_a_mismatch() -> None:
    _, optimizer = trained(optim.AdamW)
    groups = [{**group, "params": [0, 1]} for group in optimizer.state_dict()["param_groups"]]
    not_a_state: list[Any] = [
        {"k": 1},
        [],
        {"param_groups": groups},
        {"param_groups": groups, "state": 1},
    ]
    for stored in not_a_state:
        with pytest.raises(StateMismatchError, match="no optimizer's state"):
            Saved({"o": stored}).match({"o": optimizer})
