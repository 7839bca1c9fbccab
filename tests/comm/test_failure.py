"""What one rank raises is raised on the others with all that is known of it."""

from __future__ import annotations

from ckptengine.comm.failure import Failure
from ckptengine.errors import CheckpointError, StateMismatchError, UnsupportedStateError


def test_a_mismatch_keeps_its_lists_across_ranks() -> None:
    error = StateMismatchError("differs", missing=("a",), unexpected=("b",), mismatched=("c: shape",))
    other = Failure.of(error, 1).to_error()
    assert isinstance(other, StateMismatchError)
    assert (other.missing, other.unexpected, other.mismatched) == (("a",), ("b",), ("c: shape",))


def test_a_foreign_exception_becomes_a_checkpoint_error_that_names_it() -> None:
    error = Failure.of(ZeroDivisionError("division by zero"), 3).to_error()
    assert type(error) is CheckpointError
    assert "ZeroDivisionError: division by zero" in str(error)
    assert error.rank == 3


def test_a_failure_that_only_repeats_an_earlier_one_stays_so_across_ranks() -> None:
    failure = Failure(kind="SaveFailedError", message="m", rank=1, repeated=True)
    assert Failure.of(failure.to_error(), 0).repeated
    assert not Failure.of(CheckpointError("m"), 0).repeated


def test_what_cannot_be_retried_stays_so_across_ranks() -> None:
    assert not Failure.of(UnsupportedStateError("a lambda"), 0).to_error().retryable
