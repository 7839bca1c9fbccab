"""The table of stripe counts, row by row and at every border."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.storage.lustre_policy import GIB, MIB, stripe_count

BORDERS = (64 * MIB, GIB, 10 * GIB, 100 * GIB)


def by_the_table(nbytes: int, ranks: int, osts: int) -> int:
    """The table as it is written in the guide, without a thought."""
    row = sum(nbytes >= border for border in BORDERS)
    if row == 0:
        return 1
    if row == 1:
        return 1 if ranks >= osts else min(4, osts, ceil(osts / ranks))
    if ranks >= 4 * osts:
        return min(2, osts)
    return min(osts, (8, 16, 32)[row - 2], max(4, ceil(osts / ranks)))


@pytest.mark.parametrize(
    "nbytes", [0, 1, *(at for border in BORDERS for at in (border - 1, border, border + 1)), 1 << 50]
)
def test_every_count_of_ranks_and_osts_at_every_border(nbytes: int) -> None:
    for osts in (*range(1, 70), 128, 500, 2000):
        for ranks in (*range(1, 70), *(4 * osts + d for d in (-1, 0, 1)), 1024, 4096):
            found = stripe_count(nbytes, ranks, osts)
            assert found == by_the_table(nbytes, ranks, osts), (nbytes, ranks, osts)
            assert 1 <= found <= osts


@pytest.mark.parametrize(
    ("nbytes", "ranks", "osts", "expected"),
    [
        (64 * MIB - 1, 1, 100, 1),
        (64 * MIB, 1, 100, 4),
        (64 * MIB, 8, 8, 1),
        (64 * MIB, 7, 8, 2),
        (GIB - 1, 1, 3, 3),
        (GIB, 1, 3, 3),
        (GIB, 8, 8, 4),
        (GIB, 1, 100, 8),
        (GIB, 31, 8, 4),
        (GIB, 32, 8, 2),
        (GIB, 32, 1, 1),
        (10 * GIB - 1, 1, 100, 8),
        (10 * GIB, 1, 100, 16),
        (100 * GIB, 1, 100, 32),
        (100 * GIB, 400, 100, 2),
        (100 * GIB, 20, 100, 5),
    ],
)
def test_by_hand(nbytes: int, ranks: int, osts: int, expected: int) -> None:
    assert stripe_count(nbytes, ranks, osts) == expected


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 20), st.integers(1, 2000))
def test_fewer_ranks_never_mean_fewer_stripes(nbytes: int, ranks: int, osts: int) -> None:
    assert stripe_count(nbytes, ranks, osts) >= stripe_count(nbytes, ranks + 1, osts)


@pytest.mark.parametrize("impossible", [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_nonsense_is_refused(impossible: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no stripe count"):
        stripe_count(*impossible)
