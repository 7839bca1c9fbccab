"""Are a model's tensors called the same whatever wraps it, and are other names told apart?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckptengine as ck
from ckptengine.adapters import wrappers
from ckptengine.read.partial import other_prefix
from tests.adapters.fake import Saved, same
from tests.adapters.test_partial import Restore, as_own, as_world

# torch's own, when it first compiles something.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")

Wrap = Callable[[nn.Module], nn.Module]


class Noted(nn.Module):
    """Has a submodule called as DDP calls what it wraps, a buffer, and a value beside its tensors."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.module = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.note = f"made with {seed}"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def _blocks(wrap: Wrap) -> Wrap:
    def wrapped(module: nn.Module) -> nn.Module:
        assert isinstance(module, Noted)
        for i, block in enumerate(module.blocks):
            module.blocks[i] = wrap(block)
        return module

    return wrapped


WRAPS: dict[str, Wrap] = {
    "none": lambda module: module,
    # As DDP does, and needs no group.
    "parallel": nn.DataParallel,
    "compiled": torch.compile,
    "checkpointed": checkpoint_wrapper,
    "compiled blocks": _blocks(torch.compile),
    "checkpointed blocks": _blocks(checkpoint_wrapper),
    "several": lambda module: torch.compile(nn.DataParallel(_blocks(torch.compile)(module))),
    "the other way round": lambda module: nn.DataParallel(torch.compile(_blocks(checkpoint_wrapper)(module))),
}

PLAIN = list(Noted(0).state_dict())


def adam(module: nn.Module, lr: float = 0.5, *, steps: int = 0) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(module.named_parameters(), lr=lr)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(steps):
        optimizer.step()
    return optimizer


def job(wrap: str, seed: int, steps: int = 0) -> tuple[nn.Module, torch.optim.Adam]:
    module = WRAPS[wrap](Noted(seed))
    return module, adam(module, steps=steps)


@pytest.fixture(params=[as_own, as_world])
def restore(request: pytest.FixtureRequest) -> Restore:
    return request.param  # type: ignore[no-any-return]


def check_same(source: tuple[nn.Module, torch.optim.Adam], into: tuple[nn.Module, torch.optim.Adam]) -> None:
    for one, other in zip(source[0].state_dict().values(), into[0].state_dict().values(), strict=True):
        assert same(one, other)
    for here, there in zip(into[0].parameters(), source[0].parameters(), strict=True):
        assert into[1].state[here]
        assert same(dict(into[1].state[here]), dict(source[1].state[there]))


@pytest.mark.parametrize("wrap", WRAPS)
def test_names_are_those_of_the_bare_model(wrap: str) -> None:
    state = ck.training_state(*job(wrap, 1, steps=1)).state()
    assert list(state["model"]) == PLAIN
    parameters = [name for name, _ in Noted(0).named_parameters()]
    assert list(state["optimizer"]["state"]) == parameters
    assert [group["params"] for group in state["optimizer"]["param_groups"]] == [parameters]
    assert "param_names" not in state["optimizer"]["param_groups"][0]


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_one_wrapper_has_saved_goes_into_any_other(restore: Restore, wrap: str) -> None:
    source = job(wrap, 1, steps=2)
    saved = Saved({"train": ck.training_state(*source)})
    for other in WRAPS:
        into = job(other, 2)
        names = into[1].param_groups[0]["param_names"]
        match = restore(saved, {"train": ck.training_state(*into)})
        assert (match.missing, match.unexpected) == ((), ())
        check_same(source, into)
        assert into[1].param_groups[0]["param_names"] == names


@pytest.mark.parametrize("wrap", WRAPS)
def test_names_that_wrappers_were_in_are_known_again(
    restore: Restore, wrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = job(wrap, 1, steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(wrappers, "plain_names", lambda module, names: {})
        saved = Saved({"train": ck.training_state(*source)})
    for other in WRAPS:
        into = job(other, 2)
        match = restore(saved, {"train": ck.training_state(*into)})
        assert (match.missing, match.unexpected) == ((), ())
        check_same(source, into)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_bare_module_takes_the_plain_names_too(restore: Restore, wrap: str) -> None:
    source, into = Noted(1), WRAPS[wrap](Noted(2))
    restore(Saved({"model": ck.training_state(source)}), {"model": {"model": into}})
    for one, other in zip(source.state_dict().values(), into.state_dict().values(), strict=True):
        assert same(one, other)


@pytest.mark.parametrize("wrap", WRAPS)
def test_buffers_are_told_from_parameters(restore: Restore, wrap: str) -> None:
    source, into = Noted(1), WRAPS[wrap](Noted(2))
    source.blocks[1].running_mean.fill_(7.0)
    restore(Saved({"t": ck.training_state(source)}), {"t": ck.training_state(into)}, parameters_only=True)
    assert all(map(torch.equal, source.parameters(), into.parameters()))
    assert not torch.equal(source.blocks[1].running_mean, next(iter(into.buffers())))


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_state_dict_of_it_can_be_loaded(wrap: str) -> None:
    source, into = job(wrap, 1, steps=2), job(wrap, 2)
    ck.training_state(*into).load_state_dict(ck.training_state(*source).state_dict())
    check_same(source, into)


def test_names_stay_if_two_would_become_one() -> None:
    wrapped = nn.DataParallel(nn.Linear(2, 2))
    wrapped.register_buffer("weight", torch.ones(1))
    assert list(ck.training_state(wrapped).state()["model"]) == ["weight", "module.weight", "module.bias"]


class Wrapped(nn.Module):
    """A wrapper of one's own, of which nobody knows that it is one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inside = module


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("into_wrapped", [False, True])
def test_a_prefix_that_alone_is_different_is_named(
    restore: Restore, into_wrapped: bool, with_model: bool
) -> None:
    source, into = (Noted(1), Wrapped(Noted(2))) if into_wrapped else (Wrapped(Noted(1)), Noted(2))
    saved = Saved({"t": {"train": ck.training_state(source, adam(source, steps=1))}})
    target = {"t": {"train": ck.training_state(into, adam(into))}}
    expected = {"t.train.model.inside": "t.train.model"}
    if not into_wrapped:
        expected = {"t.train.model": "t.train.model.inside"}
    options = {} if with_model else {"include": "t.train.optimizer"}
    with pytest.raises(ck.StateMismatchError) as caught:
        restore(saved, target, **options)
    assert str(caught.value).endswith(f"the names differ by a prefix only: pass rename={expected!r}")
    assert "use training_state" not in str(caught.value)
    restore(saved, target, rename=expected)
    assert all(map(torch.equal, source.parameters(), into.parameters()))
    with pytest.raises(ck.StateMismatchError, match="leave them out of `rename`"):
        restore(Saved(target), target, rename=expected)


def test_a_bare_module_saved_from_a_wrapped_one_is_told_the_prefix(restore: Restore) -> None:
    saved = Saved({"model": nn.DataParallel(Noted(1))})
    for target in ({"model": Noted(2)}, {"model": Noted(2).state_dict()}):
        with pytest.raises(ck.StateMismatchError, match="prefix only") as caught:
            restore(saved, target)
        assert "rename={'model': 'model.module'}" in str(caught.value)


@pytest.mark.parametrize(
    ("here", "stored", "expected"),
    [
        (["a.w", "a.b"], ["m.a.w", "m.a.b"], ("", "m")),
        (["m.a.w", "m.a.b"], ["a.w", "a.b", "c"], ("m", "")),
        (["x.a.w", "x.b.w"], ["y.z.b.w", "y.z.a.w"], ("x", "y.z")),
        (["w", "b"], ["m.w", "n.b"], None),
        (["a.w"], ["a.w"], None),
        (["aw"], ["m.w"], None),
        ([], ["m.w"], None),
        (["a.w"], [], None),
    ],
)
def test_another_beginning(here: list[str], stored: list[str], expected: Any) -> None:
    assert other_prefix(here, stored) == expected
