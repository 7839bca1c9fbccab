"""Are target and tree compared by their structure, and all differences told at once?"""

from __future__ import annotations

import collections

import pytest
import torch
from torch import ones, zeros

from ckptengine.errors import StateMismatchError
from tests.adapters.fake import Saved, same
from tests.adapters.mismatches import mismatch


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


def test_tuples_are_rebuilt_up_to_what_can_hold_them() -> None:
    tensor = zeros(2)
    inner = (1, (tensor, "old"))
    target = [inner, (tensor,)]
    Saved([(1, (ones(2), "new")), (ones(2),)]).restore(target)
    assert same(target, [(1, (ones(2), "new")), (ones(2),)])
    assert target[0][1][0] is tensor
    assert target[1][0] is tensor


def test_none_stands_for_a_dict_of_values() -> None:
    target = {"a": None, "b": {"x": 1}}
    Saved({"a": {"k": [1]}, "b": None}).restore(target)
    assert same(target, {"a": {"k": [1]}, "b": None})
