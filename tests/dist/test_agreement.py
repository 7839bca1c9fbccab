"""Are ranks that do not agree, or of which one leaves, told so at once and by name? Real processes, gloo groups.

With a wait until the deadline, the error would be another: that a rank did not report.
"""

from __future__ import annotations

from typing import Any

import pytest

import ckptengine as ck
from tests.dist import agreement_cases, cases
from tests.helpers.ranks import RankDied, Ranks

pytestmark = pytest.mark.dist

LEAVES = {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}

DIFFERENT = {
    "step": ({"step": 1}, {}, "step=1 on rank 0, step=None on rank 1"),
    "strict": ({}, {"strict": False}, "strict=True on rank 0, strict=False on rank 1"),
    "verify": ({}, {"verify": False}, "verify=True on rank 0, verify=False on rank 1"),
    "per_rank": (
        {"per_rank": "rank0"},
        {"per_rank": {"rng": "drop", "*": "rank0"}},
        "per_rank='rank0' on rank 0, per_rank={'rng': 'drop', '*': 'rank0'} on rank 1",
    ),
    "order of per_rank": (
        {"per_rank": {"a*": "drop", "*b": "rank0"}},
        {"per_rank": {"*b": "rank0", "a*": "drop"}},
        "per_rank={'a*': 'drop', '*b': 'rank0'} on rank 0",
    ),
    "parameters_only": ({}, {"parameters_only": True}, "parameters_only=False on rank 0"),
    "cast": ({"cast": True}, {}, "cast=True on rank 0, cast=False on rank 1"),
    "streaming on rank 0": ({"streaming": True}, {}, "streaming=True on rank 0, streaming=False on rank 1"),
    "streaming on rank 1": ({}, {"streaming": True}, "streaming=False on rank 0, streaming=True on rank 1"),
}


@pytest.fixture
def saved(pair: Ranks, root: str) -> str:
    pair.call(agreement_cases.save, root)
    return root


@pytest.mark.parametrize("what", DIFFERENT)
def test_options_that_differ_are_named_on_all_ranks(pair: Ranks, saved: str, what: str) -> None:
    one, other, text = DIFFERENT[what]
    for kind, message, rank in pair.call(agreement_cases.restore_differently, saved, [one, other]):
        assert (kind, rank) == ("CheckpointError", 1), message
        assert message.startswith(f"the ranks call restore with different options: {text}"), message
        assert "; " not in message.partition(": ")[2].partition(" [")[0]  # nothing but what differs


def test_all_that_differs_is_listed_with_its_ranks(trio: Ranks, root: str) -> None:
    trio.call(agreement_cases.save, root)
    options = [{}, {"step": 1, "cast": True}, {"cast": True}]
    for _, message, _ in trio.call(agreement_cases.restore_differently, root, options):
        assert "step=None on ranks 0, 2, step=1 on rank 1; " in message
        assert "cast=False on rank 0, cast=True on ranks 1, 2 [rank 1]" in message


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("bad", "kind"), [({"per_rank": "mine"}, "ValueError"), ({"include": 3}, "TypeError"), ({"step": -1}, "ValueError")]
)
def test_an_option_that_one_rank_cannot_take_fails_all(
    pair: Ranks, saved: str, odd: int, bad: dict[str, Any], kind: str
) -> None:
    told = pair.call(agreement_cases.restore_differently, saved, [bad if rank == odd else {} for rank in range(2)])
    assert told[odd][0] == kind
    other, message, rank = told[1 - odd]
    assert (other, rank) == ("CheckpointError", odd)
    assert message.startswith(f"{kind}: ")


def test_an_option_that_no_rank_can_take_is_each_ranks_own_error(pair: Ranks, saved: str) -> None:
    told = pair.call(agreement_cases.restore_differently, saved, [{"per_rank": "mine"}] * 2)
    assert [kind for kind, _, _ in told] == ["ValueError"] * 2


def test_names_are_each_ranks_own(pair: Ranks, root: str) -> None:
    assert pair.call(agreement_cases.restore_own_parts, root) == [
        ([0.0, 0.0], 0, -1, 1),
        ([1.0, 1.0], 1, -1, 1),
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("exchange", "on"), ("keep_last", 3), ("retries", 1), ("zstd_level", 3), ("on_error", "warn"), ("snapshot", "overlap")],
)
def test_settings_of_the_job_that_differ_are_found_when_it_begins(pair: Ranks, root: str, name: str, value: Any) -> None:
    default = getattr(ck.Config(), name)
    for error in pair.errors(agreement_cases.open_differently, root, [{}, {name: value}]):
        assert isinstance(error, ck.CheckpointError)
        assert error.message == f"the ranks' Configs differ: {name}={default!r} on rank 0, {name}={value!r} on rank 1"


def test_settings_of_a_machine_may_differ(pair: Ranks, root: str) -> None:
    own = {"io_threads": 2, "direct_io": "off", "max_arenas": 3, "storage_gbps": 1.0, "restore_timeout_s": 99.0}
    pair.call(agreement_cases.open_differently, root, [own, {}])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("hook", ["on_take", "on_load"])
@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_leaves_a_restore_is_named_on_the_others(
    pair: Ranks, saved: str, victim: int, name: str, hook: str, streaming: bool
) -> None:
    told = pair.call(agreement_cases.leave, saved, victim, hook, LEAVES[name], streaming)
    assert told[victim][0] == name
    assert told[1 - victim] == (
        "CheckpointError",
        f"this rank left the restore by {name}: 4 [rank {victim}]",
        victim,
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_leaves_when_a_stream_ends_is_named_on_the_others(pair: Ranks, root: str, victim: int) -> None:
    told = pair.call(agreement_cases.leave_at_the_end_of_a_stream, root, victim)
    assert told[victim][0] == "SystemExit"
    kind, message, rank = told[1 - victim]
    assert (kind, rank) == ("CheckpointError", victim)
    assert "this rank left the restore by SystemExit: 4" in message


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_interrupted_while_it_waits_is_named_on_the_others(pair: Ranks, saved: str, victim: int) -> None:
    told = pair.call(agreement_cases.interrupted_in_a_wait, saved, victim)
    assert told[victim][0] == "KeyboardInterrupt"
    kind, message, rank = told[1 - victim]
    assert (kind, message, rank) == (
        "CheckpointError",
        f"this rank left the restore by KeyboardInterrupt [rank {victim}]",
        victim,
    )


@pytest.mark.parametrize(
    ("method", "victim", "streaming"),
    [
        ("match", 0, False),
        ("read", 2, False),
        ("read", 0, True),
        pytest.param("are_cached", 2, False, marks=[pytest.mark.slow, pytest.mark.sample]),
        pytest.param("read", 0, False, marks=[pytest.mark.slow, pytest.mark.sample]),
        pytest.param("read", 2, True, marks=[pytest.mark.slow, pytest.mark.sample]),
        pytest.param("are_cached", 0, False, marks=[pytest.mark.slow, pytest.mark.sample]),
    ],
)
def test_a_rank_that_is_killed_is_named_long_before_a_deadline(
    root: str, method: str, victim: int, streaming: bool
) -> None:
    with Ranks(3, init="agent") as ranks:
        ranks.call(cases.lend_writers)
        ranks.call(agreement_cases.save_replicated, root)
        results = ranks.start(agreement_cases.killed_in, method, root, victim, streaming).results()
    assert isinstance(results.pop(victim).error, RankDied)
    for result in results:
        kind, message, rank = result.value
        assert (kind, rank) == ("CommitTimeoutError", victim), message
        assert f"the process of rank {victim} has ended while" in message


@pytest.mark.parametrize("exchange", ["on", "off"])
def test_a_fall_back_names_the_rank_that_met_the_error_and_whose_shard_it_was(
    pair: Ranks, root: str, exchange: str
) -> None:
    options = {"exchange": exchange, "direct_io": "off"}
    for told in pair.call(agreement_cases.fall_back_where_one_rank_cannot_read, root, options):
        ((step, rank, met_by, reason),) = told
        assert (step, rank, met_by) == (2, 0, 1)
        assert "rank 0, met by rank 1" in reason
