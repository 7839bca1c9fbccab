"""The error of a target that a checkpoint does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from ckptengine.errors import StateMismatchError
from tests.adapters.fake import Saved, same


def mismatch(saved_state: Any, target: Any, **options: Any) -> StateMismatchError:
    """The target is checked to be as it was."""
    before = Saved(target).load()
    with pytest.raises(StateMismatchError) as caught:
        Saved(saved_state).match(target, **options)
    assert same(Saved(target).load(), before)
    return caught.value
