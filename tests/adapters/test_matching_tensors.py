"""Which tensors of a target does a stored one fit?"""

from __future__ import annotations

import pytest
import torch
from torch import ones, zeros

from ckptengine.adapters.tensors import LocalChunk
from ckptengine.errors import StateMismatchError
from tests.adapters.fake import Saved, same
from tests.adapters.mismatches import mismatch


def test_a_meta_tensor_cannot_be_filled() -> None:
    with pytest.raises(StateMismatchError, match="cannot be filled: a tensor on the meta device"):
        Saved({"a": ones(2)}).match({"a": torch.empty(2, device="meta")})


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
