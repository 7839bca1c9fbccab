"""Restoring into a state: what fits is filled, what does not is reported at once, and nothing is touched
before.
"""

from __future__ import annotations

import collections
import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptengine.adapters.restore import RestoreTarget
from ckptengine.adapters.tensors import LocalChunk
from ckptengine.errors import StateMismatchError, UnsupportedStateError
from tests.adapters.fake import Saved, bits, destinations, read_all, same


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def mismatch(saved_state: Any, target: Any, **options: Any) -> StateMismatchError:
    """The error; the target is checked to be as it was."""
    before = Saved(target).load()
    with pytest.raises(StateMismatchError) as caught:
        Saved(saved_state).match(target, **options)
    assert same(Saved(target).load(), before)
    return caught.value


# Values


def test_values_come_back_in_the_dicts_and_lists_that_hold_them() -> None:
    state = {"a": 1, "b": [1.5, {"c": "x"}], "t": (1, [2]), "n": None, "s": {1, 2}}
    inner: dict[str, Any] = {"c": ""}
    middle = [0.0, inner]
    nested = [0]
    target = {"a": 0, "b": middle, "t": (0, nested), "n": 5, "s": set()}
    Saved(state).restore(target)
    assert same(target, state)
    assert target["b"] is middle
    assert middle[1] is inner
    assert target["t"][1] is nested  # type: ignore[index]


def test_mutable_values_are_changed_in_place() -> None:
    state = {"l": [1, 2, 3], "s": {1}, "b": bytearray(b"xyz"), "a": np.arange(3), "big": np.arange(1000)}
    target = {"l": [], "s": set(), "b": bytearray(), "a": np.zeros(3, int), "big": np.zeros(1000, int)}
    held = dict(target)
    Saved(state).restore(target)
    assert same(target, state)
    assert all(target[key] is held[key] for key in held)


def test_an_array_of_another_shape_is_replaced() -> None:
    target = {"a": np.zeros(2), "r": np.zeros(3)}
    target["r"].flags.writeable = False
    Saved({"a": np.arange(3), "r": np.ones(3)}).restore(target)
    assert same(target, {"a": np.arange(3), "r": np.ones(3)})


def test_a_value_may_change_its_type() -> None:
    state = {"x": 1.5, "y": "text", "z": [1, (2,)], "w": None, "v": b"x" * 5000}
    target = {"x": 1, "y": 5, "z": None, "w": [1], "v": 0}
    Saved(state).restore(target)
    assert same(target, state)


def test_none_stands_for_a_dict_of_values() -> None:
    target = {"a": None, "b": {"x": 1}}
    Saved({"a": {"k": [1]}, "b": None}).restore(target)
    assert same(target, {"a": {"k": [1]}, "b": None})


def test_tuples_are_rebuilt_up_to_what_can_hold_them() -> None:
    tensor = zeros(2)
    inner = (1, (tensor, "old"))
    target = [inner, (tensor,)]
    Saved([(1, (ones(2), "new")), (ones(2),)]).restore(target)
    assert same(target, [(1, (ones(2), "new")), (ones(2),)])
    assert target[0][1][0] is tensor
    assert target[1][0] is tensor


def test_a_tuple_as_the_state_is_filled_but_cannot_be_changed() -> None:
    target = (zeros(2), 5, [1])
    Saved((ones(2), 5, [7])).restore(target)
    assert same(target, (ones(2), 5, [7]))
    error = mismatch((ones(2), 6, [1]), (zeros(2), 5, [1]))
    assert "tuple" in error.mismatched[0]


def test_equal_values_of_other_types_are_told_apart() -> None:
    state = [1.0, True, -0.0, 0, 1]
    target = [1, 1, 0.0, False, True]
    Saved(state).restore(target)
    assert same(target, state)


def test_pickled_values_are_restored_on_request_only() -> None:
    Point = collections.namedtuple("Point", "x y")
    globals()["Point"] = Point
    Point.__module__, Point.__qualname__ = __name__, "Point"
    state = {"p": Point(1, 2), "d": collections.defaultdict(list, a=[1]), "c": collections.Counter("ab")}
    saved = Saved(state, allow_pickle=True)
    target: dict[str, Any] = {"p": None, "d": collections.defaultdict(list), "c": collections.Counter()}
    with pytest.raises(UnsupportedStateError, match="allow_pickle"):
        saved.match(target)
    saved.restore(target, allow_pickle=True)
    assert target == state
    assert type(target["d"]) is collections.defaultdict


# Structure


def test_all_differences_are_reported_at_once() -> None:
    saved = {
        "same": ones(2),
        "dtype": ones(2),
        "shape": ones(2, 3),
        "both": ones(4),
        "kind": {"a": 1},
        "tensor": ones(1),
        "value": 3,
        "only_stored": {"x": ones(1)},
        "list": [ones(1), ones(1)],
        "seq": [1],
    }
    target = {
        "same": zeros(2),
        "dtype": zeros(2).double(),
        "shape": zeros(3, 2),
        "both": torch.zeros(3, dtype=torch.int64),
        "kind": [1],
        "tensor": 1,
        "value": zeros(1),
        "only_target": zeros(1),
        "list": [zeros(1), zeros(1), zeros(1)],
        "seq": (1,),
    }
    error = mismatch(saved, target)
    assert error.missing == ("only_target", "list.2")
    assert error.unexpected == ("only_stored",)
    assert error.mismatched == (
        "dtype: dtype float64, in the checkpoint float32",
        "shape: shape (3, 2), in the checkpoint (2, 3)",
        "both: dtype int64, in the checkpoint float32; shape (3,), in the checkpoint (4,)",
        "kind: a list, in the checkpoint a dict",
        "tensor: an int, in the checkpoint a tensor",
        "value: a tensor, in the checkpoint an int",
        "seq: a tuple, in the checkpoint a list",
    )
    assert error.path == "p"
    assert error.rank == 0
    assert "which is unchanged, in 10 places" in str(error)


def test_keys_of_other_types_are_other_keys() -> None:
    error = mismatch({1: 1, "2": 2}, {"1": 1, 2: 2})
    assert error.missing == ("1", "2")
    assert error.unexpected == ("1", "2")


def test_not_strict_leaves_other_keys_alone_but_not_other_shapes() -> None:
    saved = Saved({"a": ones(2), "b": ones(1), "l": [ones(1), ones(1)]})
    target = {"a": zeros(2), "c": zeros(1), "l": [zeros(1)]}
    match = saved.restore(target, strict=False)
    assert match.missing == ("c",)
    assert match.unexpected == ("l.1", "b")
    assert same(target, {"a": ones(2), "c": zeros(1), "l": [ones(1)]})
    with pytest.raises(StateMismatchError) as caught:
        saved.match({"a": zeros(3)}, strict=False)
    assert "only in the checkpoint" not in str(caught.value)


def test_dicts_of_any_kind_are_filled() -> None:
    target = collections.defaultdict(list, {"a": collections.OrderedDict(x=zeros(1), y=0)})
    Saved(collections.OrderedDict(a={"x": ones(1), "y": 1})).restore(target)
    assert same(dict(target), {"a": collections.OrderedDict(x=ones(1), y=1)})


def test_only_what_is_wanted_is_read() -> None:
    saved = Saved({"a": ones(1000), "b": torch.randn(5)})
    match = saved.match({"b": zeros(5)}, strict=False)
    assert read_all(match, lambda _: saved) == 20


def test_every_shard_is_called_by_its_rank_also_the_own() -> None:
    tensors = {"a": ones(3), "b": zeros(3)}
    owner = Saved(tensors, rank=0, world_size=2)
    header = replace(Saved({"c": ones(3)}, rank=1, world_size=2).header, replicas={"a": 0})
    header = replace(header, tree={"a": {"$": "t", "i": 1}, "c": {"$": "t", "i": 0}})
    for target, ranks in (
        ({"c": zeros(3)}, {1}),
        ({"a": zeros(3)}, {0}),
        ({"a": zeros(3), "c": zeros(3)}, {0, 1}),
    ):
        match = RestoreTarget(target).match(header, strict=False, others=lambda rank: owner.header)
        assert match.shards == {rank for rank, _, _ in match.extents()} == ranks
        assert [{*one.destinations} for one in match.rounds()] == [ranks]


def test_match_changes_nothing_and_can_be_repeated() -> None:
    model, optimizer = nn.Linear(2, 2), None
    optimizer = torch.optim.Adam(model.parameters())
    model(ones(1, 2)).sum().backward()
    optimizer.step()
    saved = Saved({"m": model, "o": optimizer, "v": [1]})
    other = nn.Linear(2, 2)
    target = {"m": other, "o": torch.optim.Adam(other.parameters()), "v": [2]}
    restore = RestoreTarget(target)
    before = copy.deepcopy(other.state_dict())
    for _ in range(3):
        match = restore.match(saved.header)
    assert same(other.state_dict(), before)
    assert target["o"].state_dict()["state"] == {}
    assert target["v"] == [2]
    read_all(match, lambda _: saved)
    match.apply()
    assert same(other.state_dict(), model.state_dict())
    assert same(target["o"].state_dict(), optimizer.state_dict())


def test_a_target_is_a_container_or_an_object() -> None:
    with pytest.raises(UnsupportedStateError, match="a restore target is"):
        RestoreTarget(ones(2))


def test_a_meta_tensor_cannot_be_filled() -> None:
    with pytest.raises(StateMismatchError, match="cannot be filled: a tensor on the meta device"):
        Saved({"a": ones(2)}).match({"a": torch.empty(2, device="meta")})


# Memory


def test_tensors_are_read_straight_into_place() -> None:
    target = {"a": zeros(3, 4), "p": nn.Parameter(zeros(5)), "s": torch.zeros((), dtype=torch.int64)}
    match = Saved({"a": ones(3, 4), "p": ones(5), "s": torch.tensor(7)}).restore(target)
    addresses = {d.address for d in destinations(match)}
    assert addresses == {t.data_ptr() for t in target.values()}
    assert same(target["p"].detach(), ones(5))
    assert target["p"].requires_grad


def test_what_autograd_had_saved_is_known_to_be_stale() -> None:
    weight = nn.Parameter(ones(3))
    loss = (weight * weight).sum()
    Saved({"w": ones(3) * 2}).restore({"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tied_targets_are_read_once() -> None:
    weight = torch.randn(4, 6)
    saved = Saved({"a": weight, "b": weight, "c": weight[1:3], "d": weight.t()})
    into = zeros(4, 6)
    match = saved.restore({"a": into, "b": into.view(4, 6), "c": into[1:3], "d": into.t()})
    assert [d.stop - d.start for d in destinations(match)] == [96]
    assert same(into, weight)


def test_separate_targets_of_tied_tensors_are_all_filled() -> None:
    weight = torch.randn(4, 6)
    state = {"a": weight, "b": weight, "c": weight[1:3], "d": weight.t()}
    target = {"a": zeros(4, 6), "b": zeros(4, 6), "c": zeros(2, 6), "d": zeros(6, 4)}
    Saved(state).restore(target)
    assert same(target, state)


def test_tied_targets_of_equal_tensors_are_filled() -> None:
    into = zeros(3)
    Saved({"a": ones(3), "b": ones(3)}).restore({"a": into, "b": into})
    assert same(into, ones(3))


def test_tied_targets_of_different_tensors_are_an_error() -> None:
    into = zeros(3)
    with pytest.raises(StateMismatchError, match="share memory") as caught:
        Saved({"a": ones(3), "b": ones(3) * 2}).restore({"a": into, "b": into})
    assert caught.value.mismatched == ("a",)
    assert "of step 1: 'a' with 'b'. " in str(caught.value)
    assert "[path p, rank 0]" in str(caught.value)


def test_of_overlapping_targets_each_is_named_with_those_it_overlaps() -> None:
    into = zeros(9)
    state = {"a": ones(4), "b": ones(4) * 2, "c": ones(4) * 3, "d": ones(2)}
    target = {"a": into[:4], "b": into[3:7], "c": into[4:8], "d": zeros(2)}
    with pytest.raises(StateMismatchError) as caught:
        Saved(state).restore(target)
    assert "'a' with 'b'; 'b' with 'a', 'c'. " in str(caught.value)


def test_interleaved_targets_are_filled() -> None:
    into = zeros(10)
    Saved({"even": ones(5), "odd": ones(5) * 2}).restore({"even": into[::2], "odd": into[1::2]})
    assert into.tolist() == [1, 2] * 5


def test_an_expanded_target_takes_equal_elements_only() -> None:
    into = zeros(3)
    Saved({"e": torch.arange(3.0).expand(4, 3)}).restore({"e": into.expand(4, 3)})
    assert into.tolist() == [0, 1, 2]
    with pytest.raises(StateMismatchError, match=r"share memory.*'e' with itself"):
        Saved({"e": torch.arange(12.0).view(4, 3)}).restore({"e": into.expand(4, 3)})


def test_a_flat_whole_tensor_fits_its_own_shape() -> None:
    flat = LocalChunk(torch.arange(6.0), (6,), (0,), (2, 3))
    target = {"a": zeros(2, 3)}
    Saved({"a": flat}).restore(target)
    assert same(target["a"], torch.arange(6.0).view(2, 3))
    back = LocalChunk(zeros(6), (6,), (0,), (2, 3))
    Saved({"a": torch.arange(6.0).view(3, 2).t()}).restore({"a": back})
    assert same(back.tensor.view(2, 3), torch.arange(6.0).view(3, 2).t())


def test_chunks_elsewhere_are_a_mismatch() -> None:
    state = {"a": LocalChunk(ones(2), (6,), (2,))}
    for target, text in (
        (
            LocalChunk(zeros(2), (6,), (0,)),
            "the chunk of shape (2,) at (0,), in the checkpoint the chunk of shape",
        ),
        (LocalChunk(zeros(2), (8,), (2,)), "shape (8,), in the checkpoint (6,)"),
        (LocalChunk(zeros(2), (6,), (2,), (2, 3)), "shape (2, 3), in the checkpoint (6,)"),
        (zeros(6), "the whole tensor, in the checkpoint the chunk"),
        (zeros(2), "shape (2,), in the checkpoint (6,)"),
    ):
        assert text in mismatch(state, {"a": target}).mismatched[0]


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


@pytest.mark.parametrize("shape", [(3,), (1,)])
@pytest.mark.parametrize("kind", ["conj", "neg", "both"])
def test_conjugate_and_negative_views_are_filled_also_where_they_are_expanded(
    shape: tuple[int, ...], kind: str
) -> None:
    def view(base: torch.Tensor) -> torch.Tensor:
        wide = base.expand(4, *shape)
        if kind == "neg":
            return torch._neg_view(wide)
        return wide.conj() if kind == "conj" else wide.conj().imag

    saved = view(torch.randn(shape, dtype=torch.float32 if kind == "neg" else torch.complex64))
    target = view(torch.zeros(shape, dtype=saved.dtype if kind == "neg" else torch.complex64))
    Saved({"v": saved}).restore({"v": target})
    assert torch.equal(target.resolve_conj().resolve_neg(), saved.resolve_conj().resolve_neg())
