"""Do ranks that need the same bytes read them once, and stop together when one of them cannot go on?

Real gloo groups, through shared memory and, as if each rank were on a host of its own, over gloo.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import ckptengine as ck
from ckptengine.format.names import step_dirname
from tests.dist import cases, exchange_cases
from tests.helpers.checkpoints import flip, read_manifest
from tests.helpers.ranks import Ranks, wait_until

pytestmark = pytest.mark.dist

CHANNELS = ("shared memory", "gloo")
ON = {"exchange": "on"}


@contextlib.contextmanager
def through(ranks: Ranks, channel: str) -> Iterator[None]:
    ranks.call(exchange_cases.same_host_again)
    if channel == "gloo":
        ranks.call(exchange_cases.network_only)
    try:
        yield
    finally:
        ranks.call(exchange_cases.same_host_again)


def blocks_of(root: str, step: int = 1, nbytes: int = 4096) -> int:
    """Of all shards together."""
    path = Path(root, step_dirname(step))
    shards = read_manifest(path).shards
    return sum(-(-(shard.size - shard.header_nbytes) // nbytes) for shard in shards)


def damage(root: str, step: int, rank: int, at: int = 5000) -> str:
    path = Path(root, step_dirname(step))
    shard = read_manifest(path).shards[rank]
    flip(path / shard.path, shard.header_nbytes + at)
    return str(path / shard.path)


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("kind", list(exchange_cases.STATES))
def test_each_block_is_read_once(four: Ranks, root: str, kind: str, channel: str) -> None:
    with through(four, channel):
        four.call(exchange_cases.save, root, kind)
        results = four.call(exchange_cases.restore, root, kind, ON)
    infos: list[ck.RestoreInfo] = [info for info, _ in results]
    assert sum(count for _, count in results) == blocks_of(root)
    assert all(info.exchange.used and info.exchange.channel == channel for info in infos)
    assert all(info.exchange.received_nbytes == info.phases.exchange.nbytes > 0 for info in infos)
    assert four.call(exchange_cases.left_behind) == [([], 0)] * 4


@pytest.mark.parametrize("channel", CHANNELS)
def test_the_device_is_asked_for_each_byte_once(pair: Ranks, root: str, channel: str) -> None:
    with through(pair, channel):
        read = sum(pair.call(exchange_cases.read_from_the_device, root, ON))
    if not read:
        pytest.skip("the files are in memory: the kernel counts nothing")
    assert 64 << 20 <= read <= 1.05 * (64 << 20)


def test_without_it_each_rank_reads_all_it_needs(four: Ranks, root: str) -> None:
    four.call(exchange_cases.save, root, "ddp")
    results = four.call(exchange_cases.restore, root, "ddp", {"exchange": "off"})
    assert sum(count for _, count in results) > 3 * blocks_of(root)
    assert all(not info.exchange.used and "off" in info.exchange.why for info, _ in results)


@pytest.mark.parametrize("channel", CHANNELS)
def test_compressed_shards(pair: Ranks, root: str, channel: str) -> None:
    with through(pair, channel):
        pair.call(exchange_cases.save, root, "ddp", (1,), {"codec": "zstd", "block_nbytes": 8192})
        results = pair.call(exchange_cases.restore, root, "ddp", ON)
    assert glob.glob(f"{root}/step-*/*/*.ckptz")
    assert all(info.exchange.used for info, _ in results)


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_restore_in_rounds_reads_the_blocks_where_they_meet_once(
    pair: Ranks, root: str, channel: str
) -> None:
    with through(pair, channel):
        pair.call(exchange_cases.save, root, "transposed")
        results = pair.call(exchange_cases.in_rounds, root, ON)
    assert sum(count for _, count in results) == blocks_of(root)


def test_auto_lets_all_read_what_the_page_cache_has(pair: Ranks, root: str) -> None:
    pair.call(exchange_cases.save, root, "ddp")
    for path in Path(root).rglob("*.safetensors"):
        path.read_bytes()
    results = pair.call(exchange_cases.restore, root, "ddp", {"exchange": "auto"})
    assert [info.exchange.why for info, _ in results] == ["the page cache has the blocks"] * 2


def test_auto_lets_all_read_what_is_not_worth_a_ring(pair: Ranks, root: str) -> None:
    pair.call(exchange_cases.save, root, "ddp")
    for info, _ in pair.call(exchange_cases.restore, root, "ddp", {"exchange": "auto"}):
        assert info.exchange.why.startswith("only ") and not info.exchange.used


def test_the_group_is_made_once(pair: Ranks, root: str) -> None:
    with through(pair, "gloo"):
        pair.call(exchange_cases.save, root, "ddp")
        for infos in pair.call(exchange_cases.restore_twice, root, "ddp", ON):
            assert all(info.exchange.used for info in infos)


@pytest.mark.parametrize(
    ("storage", "fabric", "used"), [(1.0, 10.0, True), (10.0, 1.0, False)], ids=["slow storage", "slow fabric"]
)
def test_rates_decide_over_the_network(
    pair: Ranks, root: str, storage: float, fabric: float, used: bool
) -> None:
    options = {"storage_gbps": storage, "fabric_gbps": fabric, "exchange": "auto", "direct_io": "auto"}
    with through(pair, "gloo"):
        pair.call(exchange_cases.save, root, "ddp")
        results = pair.call(exchange_cases.restore, root, "ddp", options)
    for info, _ in results:
        assert info.exchange.used == used, info.exchange
        assert f"{fabric:.2f} of fabric" in info.exchange.why


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("at", [5000, 40_000], ids=["early", "late"])
def test_damage_sends_all_to_the_commit_before(four: Ranks, root: str, channel: str, at: int) -> None:
    with through(four, channel):
        four.call(exchange_cases.save, root, "ddp", (1, 2))
        path = damage(root, 2, 1, at)
        results = four.call(exchange_cases.restore, root, "ddp", ON)
    for info, _ in results:
        (fall_back,) = info.fell_back_from
        assert (info.step, fall_back.step, fall_back.rank) == (1, 2, 1)
        assert path in fall_back.reason and "model" in fall_back.reason
        assert info.exchange.used
    assert four.call(exchange_cases.left_behind) == [([], 0)] * 4


@pytest.mark.parametrize("channel", CHANNELS)
def test_damage_of_the_step_that_was_asked_for_is_raised_on_all(pair: Ranks, root: str, channel: str) -> None:
    with through(pair, channel):
        pair.call(exchange_cases.save, root, "ddp")
        path = damage(root, 1, 0)
        for error in pair.errors(exchange_cases.restore, root, "ddp", ON):
            assert isinstance(error, ck.CorruptCheckpointError)
            assert path in str(error)


def test_damage_in_the_block_that_is_read_to_measure_sends_all_to_the_commit_before(
    four: Ranks, root: str
) -> None:
    """In the block that rank 1 reads first, which the others have been told nothing of yet."""
    with through(four, "gloo"):
        four.call(exchange_cases.save, root, "ddp", (1, 2))
        path = damage(root, 2, 0)
        results = four.call(exchange_cases.restore_measured, root, {"exchange": "auto"})
    for info in results:
        (fall_back,) = info.fell_back_from
        assert (info.step, fall_back.step, fall_back.met_by) == (1, 2, 1)
        assert path in fall_back.reason


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_rank_that_cannot_make_its_channel_has_all_read_for_themselves(
    four: Ranks, root: str, channel: str
) -> None:
    with through(four, channel):
        four.call(exchange_cases.save, root, "ddp")
        infos = four.call(exchange_cases.restore_without_threads, root, 1, ON)
    assert all(not info.exchange.used and "no new thread" in info.exchange.why for info in infos)
    assert four.call(exchange_cases.left_behind) == [([], 0)] * 4


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_rank_that_fails_before_it_exchanges_is_named_on_all(four: Ranks, root: str, channel: str) -> None:
    with through(four, channel):
        four.call(exchange_cases.save, root, "ddp")
        errors = four.errors(exchange_cases.restore_without_memory, root, 1, ON)
    assert isinstance(errors[1], MemoryError)
    for rank in (0, 2, 3):
        assert isinstance(errors[rank], ck.CheckpointError), errors[rank]
        assert errors[rank].rank == 1 and "no memory for this" in str(errors[rank])


def test_a_group_that_one_rank_has_given_up_is_made_anew(four: Ranks, root: str) -> None:
    with through(four, "gloo"):
        four.call(exchange_cases.save, root, "ddp")
        for infos in four.call(exchange_cases.restore_twice, root, "ddp", ON, 2):
            assert all(info.exchange.used for info in infos)


EVERY = [pytest.mark.slow]
SAMPLE = [pytest.mark.slow, pytest.mark.sample]
MARKS = {
    ("SIGKILL", "shared memory", 1): [],
    ("SIGKILL", "gloo", 2): [],
    ("SIGKILL", "gloo", 0): SAMPLE,
    ("SIGSTOP", "shared memory", 3): SAMPLE,
    ("SIGSTOP", "gloo", 2): SAMPLE,
}


@pytest.mark.parametrize(
    ("how", "channel", "victim"),
    [
        pytest.param(*one, marks=MARKS.get(one, EVERY))
        for one in product(("SIGKILL", "SIGSTOP"), CHANNELS, range(4))
    ],
)
def test_a_rank_that_is_lost_on_the_way_is_named(
    tmp_path: Path, root: str, channel: str, how: str, victim: int
) -> None:
    """By all others, which wait for each other as well. A rank that is killed is not waited for: the others
    have answered long before their time is up."""
    options = {**ON, "restore_timeout_s": 300.0 if how == "SIGKILL" else 6.0}
    ready = tmp_path / "ready"
    others = [rank for rank in range(4) if rank != victim]
    with Ranks(4, init="agent") as ranks:
        ranks.call(cases.lend_writers)
        if channel == "gloo":
            ranks.call(exchange_cases.network_only)
        ranks.call(exchange_cases.save, root, "ddp")
        calls = ranks.start(exchange_cases.restore_held, root, str(ready), victim, options, ranks=others)
        held = ranks.start(exchange_cases.restore_held, root, str(ready), victim, options, ranks=[victim])
        wait_until(ready.exists)
        os.kill(ranks.pid(victim), getattr(signal, how))
        for error in calls.errors(90):
            assert isinstance(error, ck.CommitTimeoutError), error
            assert error.rank == victim and f"rank {victim}" in str(error)
        assert ranks.call(exchange_cases.left_behind, ranks=others) == [([], 0)] * 3
        os.kill(ranks.pid(victim), signal.SIGKILL)
        assert held.errors()
