"""What becomes of each rank's own values if another number of ranks restores them? Real processes, gloo groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist import cases, per_rank_cases
from tests.helpers.ranks import Ranks

pytestmark = pytest.mark.dist


def test_more_ranks_get_what_they_ask_for(pair: Ranks, trio: Ranks, root: str) -> None:
    pair.call(per_rank_cases.save, root, 4)
    for error in trio.call(per_rank_cases.refused, root, 4):
        for name in per_rank_cases.OWN:
            assert f"{name}: each rank that saved it had its own" in error
        assert 'restore(per_rank="rank0")' in error
    told = trio.call(per_rank_cases.restore, root, 4, "rank0", 0)
    assert [(size, set(taken), dropped) for size, taken, dropped, _ in told] == [(2, per_rank_cases.OWN, ())] * 3
    (line,) = told[0][3]
    assert line.startswith("step 4 was saved by 2 ranks, not by 3; of values that each had its own of, rank 0's")
    assert [lines for *_, lines in told[1:]] == [[], []]
    told = trio.call(per_rank_cases.restore, root, 4, "drop", None)
    assert [(taken, set(dropped)) for _, taken, dropped, _ in told] == [((), {"rng", "table", "loader"})] * 3


def test_one_rank_gets_what_it_asks_for(pair: Ranks, root: str) -> None:
    pair.call(per_rank_cases.save, root, 4)
    assert "loader.seed: each rank that saved it had its own" in per_rank_cases.refused(root, 4)
    assert "table" not in per_rank_cases.refused(root, 4, {"table": "drop", "rng": "rank0"}).partition("[")[0]
    assert per_rank_cases.restore(root, 4, "rank0", 0)[0] == 2
    assert set(per_rank_cases.restore(root, 4, "drop", None)[2]) == {"rng", "table", "loader"}


def test_what_one_rank_saved_is_alike_for_all_but_what_is_dropped_by_name(pair: Ranks, root: str) -> None:
    per_rank_cases.save(root, 4)
    for told in pair.call(per_rank_cases.restore, root, 4, "error", 0):
        assert told == (1, (), (), [])
    by_name = {"rng": "drop", "table": "drop", "loader": "drop", "*": "error"}
    for _, taken, dropped, _ in pair.call(per_rank_cases.restore, root, 4, by_name, None):
        assert (taken, set(dropped)) == ((), {"rng", "table", "loader"})


def test_as_many_ranks_have_their_own_back_whatever_the_policy(pair: Ranks, root: str) -> None:
    pair.call(per_rank_cases.save, root, 4)
    for spec in ("error", "rank0", "drop", {"rng": "drop"}):
        assert pair.call(per_rank_cases.restore_own, root, 4, spec) == [(2, (), (), [])] * 2


@pytest.mark.parametrize("saved_by", [2, 3])
def test_what_has_fewer_rows_than_ranks_is_put_together_whatever_is_said_of_its_name(
    pair: Ranks, trio: Ranks, root: str, saved_by: int
) -> None:
    """Rank 0 has all of it and stores it as a whole tensor."""
    savers, others = (pair, trio) if saved_by == 2 else (trio, pair)
    savers.call(per_rank_cases.save_few_rows, root, 4)
    specs = ("rank0", "drop", {"own": "rank0", "*row*": "drop"}, {"*row*": "drop", "*": "drop"})
    for spec, dropped in zip(specs, ((), ("own",), (), ("own",)), strict=True):
        taken = () if dropped else ("own",)
        for told in others.call(per_rank_cases.restore_few_rows, root, 4, spec):
            assert told == (dropped, taken, [None if dropped else 0, "row", "rows", "epoch"]), spec
        assert per_rank_cases.restore_few_rows(root, 4, spec)[:2] == (dropped, taken)
        for columns in (False, True):
            own = savers.call(per_rank_cases.restore_few_rows, root, 4, spec, columns)
            assert own == [((), (), [rank, "row", "rows", "epoch"]) for rank in range(saved_by)], spec
    for error in others.errors(per_rank_cases.restore_few_rows, root, 4, "error"):
        assert error.mismatched == ("own: each rank that saved it had its own",)


def test_a_choice_that_there_is_not_is_refused_before_anything_is_waited_for(pair: Ranks, root: str) -> None:
    pair.call(per_rank_cases.save, root, 4)
    assert [type(error) for error in pair.errors(per_rank_cases.refused, root, 4, "mine")] == [ValueError] * 2
