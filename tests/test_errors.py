"""Errors are one tree, say where and what next, and survive the way to another process."""

from __future__ import annotations

import copy
import errno
import pickle

import pytest

from ckptengine import errors
from ckptengine.errors import CheckpointError, StateMismatchError, StorageError

ALL = sorted(
    (cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, CheckpointError)),
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("cls", ALL)
def test_every_error_is_a_checkpoint_error_named_in_the_tree(cls: type[CheckpointError]) -> None:
    assert errors.__doc__ is not None
    assert cls.__name__ in errors.__doc__


def test_the_message_says_what_where_and_what_next() -> None:
    error = CheckpointError("the block differs", path="/c", rank=3, fqn="w", offset=0, hint="restore step 5")
    assert str(error) == "the block differs [path /c, rank 3, tensor w, offset 0]; restore step 5"


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("through", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_an_error_keeps_its_facts_on_the_way_to_another_process(cls: type[CheckpointError], through) -> None:
    error = cls("what", path="/c", rank=1, hint="next")
    error.offset, error.retryable = 4096, False
    if isinstance(error, StorageError):
        error.errno = errno.ENOSPC
    if isinstance(error, StateMismatchError):
        error.missing = ("a",)
    back = through(error)
    assert type(back) is cls
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    assert getattr(back, "errno", None) == getattr(error, "errno", None)
