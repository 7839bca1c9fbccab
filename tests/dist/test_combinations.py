"""Do the ways to restore go together: read once, in part, streaming, cast, renamed, on other ranks?

Real gloo groups. Each result is compared with the whole tensors that the job had when it saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptengine as ck
from ckptengine.format.names import step_dirname
from ckptengine.format.shard import decode_header
from tests.dist import cases, combination_cases, exchange_cases
from tests.helpers.checkpoints import flip, read_manifest
from tests.helpers.ranks import Ranks

pytestmark = pytest.mark.dist

BLOCK = "1.b.weight"

PARTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "all": ({}, "train", "float32"),
    "included": ({"include": "train.model"}, "train.model", "float32"),
    "excluded": ({"exclude": ["train.optimizer", "rng", "step"]}, "train.model", "float32"),
    "parameters": ({"parameters_only": True}, "parameters", "float32"),
    "cast": ({"parameters_only": True, "cast": True}, "parameters", "bfloat16"),
}
"""Options, what they take, and the dtype of the target."""

MEMBERS = {4: [0, 1, 2, 3], 2: combination_cases.TWO}
FEWER = {"per_rank": {"rng": "drop", "*": "error"}}
STREAMING = {"streaming": True}


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        ranks.call(cases.lend_writers)
        ranks.call(combination_cases.prepare)
        yield ranks


CHANNELS = {"ddp": "shared memory", "hsdp": "gloo"}
"""What blocks are exchanged through, by the kind of model that was saved."""


def saved_by(four: Ranks, root: str, saved: str, steps: list[int]) -> None:
    four.call(exchange_cases.same_host_again)
    if CHANNELS[saved] == "gloo":
        four.call(exchange_cases.network_only)
    four.call(combination_cases.save, root, saved, steps)


def restored(four: Ranks, root: str, kind: str, ranks: int, part: str, **more: Any) -> list[Any]:
    options, taken, dtype = PARTS[part]
    if ranks == 2 and part == "all":
        more = {**FEWER, **more}
    how = (root, kind, ranks, {**options, **more}, taken, dtype)
    return four.call(combination_cases.restore, *how, ranks=MEMBERS[ranks])


@pytest.mark.parametrize("saved", ["ddp", "hsdp"])
def test_every_tensor_is_what_was_saved_or_as_it_was(four: Ranks, root: str, saved: str) -> None:
    """By names that a wrapper has added to, where only one of the two has one."""
    saved_by(four, root, saved, [1])
    for ranks, kinds in ((4, ("ddp", "hsdp", "fsdp2")), (2, ("ddp", "fsdp2", "plain"))):
        for number, kind in enumerate(kinds):
            for part in PARTS if kind == saved else list(PARTS)[number % 2 :: 2]:
                infos = restored(four, root, kind, ranks, part)
                # Two that shard all among them may have no block in common.
                channels = {info.exchange.channel for info in infos if info.exchange.used}
                assert channels == {CHANNELS[saved]} or (ranks, kind) == (2, "fsdp2")
                assert all(info.missing == info.unexpected == () for info in infos)
                for info in restored(four, root, kind, ranks, part, **STREAMING):
                    assert not info.exchange.used
                    assert "streaming" in info.exchange.why


def test_a_policy_is_asked_for_what_is_restored_and_no_more(four: Ranks, root: str) -> None:
    saved_by(four, root, "ddp", [1])
    for more in ({}, STREAMING):
        how = (root, "ddp", 2, {"exclude": "rng", **more}, "train")
        for info in four.call(combination_cases.restore, *how, ranks=MEMBERS[2]):
            assert info.dropped == info.from_rank0 == ()
        for error in four.errors(combination_cases.restore, *how[:3], more, ranks=MEMBERS[2]):
            assert isinstance(error, ck.StateMismatchError)
            assert "rng: each rank that saved it had its own" in str(error)
        for info in four.call(
            combination_cases.restore, *how[:3], {"include": ["train.model", "rng"], "per_rank": "rank0", **more},
            "train.model", ranks=MEMBERS[2],
        ):  # fmt: skip
            assert info.from_rank0 == ("rng",)


def holder(root: str, step: int, name: str) -> tuple[Path, int, int]:
    """The shard that has a tensor of the model, its rank, and where in the file the middle of that is: in a block
    of which nothing is needed before streaming begins."""
    path = Path(root, step_dirname(step))
    for ref in read_manifest(path).shards:
        header = decode_header((path / ref.path).read_bytes()[: ref.header_nbytes], path=ref.path)
        for entry in header.tensors:
            if ".model." in entry.name and entry.name.endswith(name) and entry.stop > entry.start:
                return path / ref.path, ref.rank, header.header_nbytes + (entry.start + entry.stop) // 2
    raise AssertionError(f"nobody stores {name}")


@pytest.mark.parametrize("saved", ["ddp", "hsdp"])
def test_damage_sends_all_ranks_to_the_step_before_or_is_an_error_on_all(
    four: Ranks, root: str, saved: str
) -> None:
    saved_by(four, root, saved, [1, 2])
    path, rank, at = holder(root, 2, BLOCK)
    flip(path, at)
    ways = {
        "ddp": [(4, "ddp", "all"), (2, "ddp", "included"), (2, "fsdp2", "all")],
        "hsdp": [(4, "hsdp", "cast"), (4, "ddp", "parameters"), (2, "ddp", "all")],
    }[saved]
    for ranks, kind, part in ways:
        for info in restored(four, root, kind, ranks, part):
            (fall_back,) = info.fell_back_from
            assert (info.step, fall_back.step, fall_back.rank) == (1, 2, rank)
            assert path.name in fall_back.reason
            assert BLOCK in fall_back.reason
        options, taken, dtype = PARTS[part]
        policy = FEWER if (ranks, part) == (2, "all") else {}
        how = (root, kind, ranks, {**options, **policy, **STREAMING}, taken, dtype)
        for error in four.call(combination_cases.fails, *how, ranks=MEMBERS[ranks]):
            assert isinstance(error, ck.CorruptCheckpointError)
            assert error.rank == rank
            assert path.name in str(error)
            assert BLOCK in str(error)
    path.unlink()
    for ranks, kind, part in ways:
        for more in ({}, STREAMING):  # found out in the call
            for info in restored(four, root, kind, ranks, part, **more):
                (fall_back,) = info.fell_back_from
                assert (info.step, fall_back.rank) == (1, rank)
                assert path.name in fall_back.reason
