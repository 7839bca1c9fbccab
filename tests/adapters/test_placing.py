"""Do tensors get the bytes that were stored for them, however they lie in memory, and whatever they share?"""

from __future__ import annotations

import pytest
import torch
from torch import nn, ones, zeros

from ckptengine.errors import StateMismatchError
from tests.adapters.fake import Saved, destinations, same


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
