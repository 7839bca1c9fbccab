"""Do modules, optimizers and other objects get what was stored for them?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, ones, zeros

from ckptengine.adapters.tensors import LocalChunk
from ckptengine.errors import StateMismatchError
from tests.adapters.fake import Saved, bits, destinations, same
from tests.adapters.mismatches import mismatch

# Modules


class WithExtra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_module_is_filled_in_place() -> None:
    source, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    source(torch.randn(4, 3))
    held = dict(target.state_dict(keep_vars=True))
    Saved({"m": source}).restore({"m": target})
    assert same(target.state_dict(), source.state_dict())
    assert all(value is held[key] for key, value in target.state_dict(keep_vars=True).items())


def test_extra_state_is_given_to_its_module() -> None:
    extra = {"seen": [1, 2], "t": ones(3), "big": b"x" * 5000}
    source = nn.Sequential(WithExtra(extra), WithExtra({"k": 1}))
    target = nn.Sequential(WithExtra(None), WithExtra({"other": 2}))
    Saved(source).restore(target)
    assert same(target[0].extra, extra)
    assert same(target[1].extra, {"k": 1})
    assert same(target[0].linear.state_dict(), source[0].linear.state_dict())


def test_extra_state_may_be_a_tensor_of_any_size() -> None:
    target = WithExtra(torch.zeros(2, dtype=torch.uint8))
    Saved(WithExtra(torch.arange(5))).restore(target)
    assert same(target.extra, torch.arange(5))


def test_a_state_dict_that_is_computed_is_loaded() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.zeros(3)

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[prefix + "double"] = self.inner * 2

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            self.inner = state_dict[prefix + "double"] / 2

    source, target = Scaled(), Scaled()
    source.inner = torch.tensor([1.0, 2.0, 3.0])
    Saved({"m": source}).restore({"m": target})
    assert same(target.inner, source.inner)


def test_a_module_of_another_shape_is_a_mismatch() -> None:
    error = mismatch({"m": nn.Linear(2, 3)}, {"m": nn.Linear(2, 4, bias=False)})
    assert error.mismatched == ("m.weight: shape (4, 2), in the checkpoint (3, 2)",)
    assert error.unexpected == ("m.bias",)


def test_modules_and_their_state_dicts_fit_each_other() -> None:
    source = nn.Linear(2, 2)
    for saved in ({"m": source}, {"m": source.state_dict()}, {"m": dict(source.state_dict())}):
        for wrap in (lambda m: m, lambda m: m.state_dict(), lambda m: dict(m.state_dict())):
            target = nn.Linear(2, 2)
            Saved(saved).restore({"m": wrap(target)})
            assert same(target.state_dict(), source.state_dict())


def test_tied_weights_of_a_module_are_read_once() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    source, target = tied(), tied()
    match = Saved(source).restore(target)
    assert len(destinations(match)) == 1
    assert bits(target[1].weight) == bits(source[0].weight)


def test_a_value_where_a_module_is_expected_is_a_mismatch() -> None:
    assert "m: a Linear, in the checkpoint an int" in mismatch({"m": 3}, {"m": nn.Linear(1, 1)}).mismatched


# Optimizers and other objects


def trained(optimizer_class: Any, steps: int = 2, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = optimizer_class(model.parameters(), lr=1e-2, **options)
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(5, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return model, optimizer


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.LBFGS, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Rprop, {}),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_optimizers_continue_bit_for_bit(
    optimizer_class: Any, options: dict[str, Any], steps_before: int
) -> None:
    model, optimizer = trained(optimizer_class, 3, **options)
    saved = Saved({"m": model, "o": optimizer})
    again, other = trained(optimizer_class, steps_before, **options)
    other.param_groups[0]["lr"] = 5.0
    saved.restore({"m": again, "o": other})
    assert same(other.state_dict(), optimizer.state_dict())
    for m, o in ((model, optimizer), (again, other)):
        torch.manual_seed(9)

        def closure(m: Any = m, o: Any = o) -> torch.Tensor:
            o.zero_grad()
            loss = m(torch.randn(5, 3)).square().sum()
            loss.backward()
            return loss

        o.step(closure)
    assert same(model.state_dict(), again.state_dict())


def test_an_optimizer_state_is_reused_in_place() -> None:
    model, optimizer = trained(torch.optim.AdamW)
    again, other = trained(torch.optim.AdamW, 1)
    held = {id(t) for state in other.state.values() for t in state.values()}
    Saved({"o": optimizer}).restore({"o": other})
    assert held == {id(t) for state in other.state.values() for t in state.values()}
    assert same(other.state_dict(), optimizer.state_dict())
    assert model is not again


def test_optimizer_states_keep_their_own_dtype() -> None:
    """torch would round float32 moments of a bfloat16 parameter."""
    weights = [nn.Parameter(torch.randn(4, dtype=torch.bfloat16)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([weight], foreach=False) for weight in weights]
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.randn(4), "exp_avg_sq": torch.rand(4)}
    optimizers[0].state[weights[0]] = dict(moments)
    saved = Saved(optimizers[0])
    saved.restore(optimizers[1])
    assert same(dict(optimizers[1].state[weights[1]]), moments)


def test_an_optimizer_of_other_parameters_is_a_mismatch() -> None:
    _, optimizer = trained(torch.optim.AdamW)
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    error = mismatch({"o": optimizer}, {"o": other})
    assert error.mismatched == ("o: parameters per group: [2], in the checkpoint [4]",)
    assert mismatch({"o": {"k": 1}}, {"o": other}).mismatched == (
        "o: what was stored is no optimizer's state",
    )


def test_schedulers_and_scalers_are_restored() -> None:
    _, optimizer = trained(torch.optim.SGD)
    objects: list[Any] = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        torch.optim.lr_scheduler.StepLR(optimizer, 3),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
        torch.amp.GradScaler("cpu"),
    ]
    saved = Saved({"all": objects})
    _, optimizer = trained(torch.optim.SGD, 1)
    others: list[Any] = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        torch.optim.lr_scheduler.StepLR(optimizer, 1),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 2.0, total_steps=5),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5),
        torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
        torch.amp.GradScaler("cpu", init_scale=3.0),
    ]
    saved.restore({"all": others})
    for a, b in zip(objects, others, strict=True):
        assert same(_plain(a.state_dict()), _plain(b.state_dict()))


def _plain(state: Any) -> Any:
    return dict(state)


class Loader:
    """Takes whatever it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_an_object_takes_what_was_stored_whatever_it_held() -> None:
    stored = {"epoch": 3, "rng": (1, [2]), "buffer": ones(3), "rows": [ones(2), ones(4)], "b": b"x" * 2000}
    kept = zeros(3)
    target = Loader({"epoch": 0, "more": 1, "buffer": kept, "rows": [zeros(2)]})
    Saved({"loader": Loader(stored)}).restore({"loader": target})
    assert same(target.state, stored)
    assert target.state["buffer"] is kept


def test_an_object_may_hold_no_dict() -> None:
    target = Loader(None)
    Saved([Loader([1, ones(2)])]).restore([target])
    assert same(target.state, [1, ones(2)])


def test_an_object_that_cannot_make_a_chunk_is_a_mismatch() -> None:
    stored = {"t": LocalChunk(ones(2), (4,), (0,))}
    error = mismatch_of_objects(Loader(stored), Loader({}))
    assert "use training_state" in error.mismatched[0]
    again = Loader({"t": LocalChunk(zeros(2), (4,), (0,))})
    Saved({"l": Loader(stored)}).restore({"l": again})
    assert same(again.state["t"].tensor, ones(2))


def mismatch_of_objects(stored: Loader, target: Loader) -> StateMismatchError:
    with pytest.raises(StateMismatchError) as caught:
        Saved({"l": stored}).match({"l": target})
    return caught.value


def test_large_values_inside_objects_come_back() -> None:
    stored = {"a": np.arange(2000), "b": bytearray(b"x" * 3000)}
    target = Loader({"a": np.zeros(1)})
    Saved([Loader(stored)]).restore([target])
    assert same(target.state, stored)
