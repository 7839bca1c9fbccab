"""Is each block stored in the way that pays, for a device and a codec of given rates?"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.format.blocks import AS_IT_IS, PLANES, ZSTD, BlockTable
from ckptengine.write import methods
from ckptengine.write.groups import Group
from ckptengine.write.methods import Chooser, Estimate, History, choose, estimate

MIB = 1 << 20
GIB = 1 << 30

WEIGHTS = {ZSTD: Estimate(0.8, 1 / GIB), "2": Estimate(0.67, 1 / GIB)}
"""Per core: a GiB a second, to two thirds as planes."""
NOISE: dict[str, Estimate] = {}
TEXT = {ZSTD: Estimate(0.2, 4 / GIB)}


def one_block(*estimates: dict[str, Estimate], words: tuple[int, ...] = (2, 2, 2), **options: float) -> str:
    """The method of a block that the groups have in equal parts."""
    part = 12 * MIB // len(estimates)
    groups = [Group("", word, ((i * part, (i + 1) * part),)) for i, word in zip(range(3), words, strict=True)]
    return choose(BlockTable(12 * MIB, 12 * MIB), groups[: len(estimates)], estimates, **options)


def test_without_a_device_the_smallest_is_chosen() -> None:
    assert one_block(WEIGHTS) == "2"
    assert one_block(TEXT) == ZSTD
    assert one_block(NOISE) == AS_IT_IS
    assert one_block({ZSTD: Estimate(0.99, 0.0)}) == AS_IT_IS


@pytest.mark.parametrize(
    ("device", "cores", "method"),
    [
        (100 * MIB, 1.0, "2"),
        (800 * MIB, 1.0, "2"),
        (850 * MIB, 1.0, AS_IT_IS),  # eight tenths of the codec's rate: not sure enough
        (2000 * MIB, 1.0, AS_IT_IS),
        (1600 * MIB, 2.0, "2"),
        (1700 * MIB, 2.0, AS_IT_IS),
        (100 * MIB, 0.05, AS_IT_IS),  # the training needs the cores
    ],
)
def test_nothing_is_compressed_that_the_device_takes_sooner(device: float, cores: float, method: str) -> None:
    assert one_block(WEIGHTS, device=device, cores=cores) == method


@pytest.mark.parametrize("device", [None, 100 * MIB])
def test_what_fills_the_last_page_is_no_gain(device: float | None) -> None:
    """Blocks of noise, of a hundred bytes of it, and of nothing but filling."""
    groups = [Group("", 1, ((0, 4196),))]
    assert choose(BlockTable(12288, 4096), groups, [NOISE], device=device) == AS_IT_IS * 3


def test_each_group_is_judged_by_itself() -> None:
    groups = [Group("", 2, ((0, 8192),)), Group("", 1, ((8192, 16384),)), Group("", 1, ((16384, 24576),))]
    table = BlockTable(24576, 4096)
    assert choose(table, groups, [WEIGHTS, NOISE, TEXT]) == "220011"
    assert choose(table, groups, [WEIGHTS, NOISE, TEXT], device=500 * MIB, cores=1.0) == "220000"


def test_a_mixed_block_counts_all_that_is_in_it() -> None:
    assert one_block(WEIGHTS, NOISE) == "2"
    # A third of little weighs less than what it costs to read a frame.
    assert one_block({ZSTD: Estimate(0.95, 1 / GIB)}, NOISE, NOISE) == AS_IT_IS
    # Planes of two bytes make noise of text, which is the larger part.
    assert one_block(WEIGHTS, TEXT, TEXT, words=(2, 1, 1)) == ZSTD
    fours = {ZSTD: Estimate(0.95, 1 / GIB), "4": Estimate(0.8, 1 / GIB)}
    assert one_block(WEIGHTS, fours, fours, words=(2, 4, 4)) == "4"


@given(
    st.dictionaries(
        st.sampled_from([ZSTD, "2"]),
        st.builds(Estimate, st.floats(0.001, 0.999), st.floats(1e-12, 1e-6)),
    ),
    st.floats(1e6, 1e11),
    st.floats(0.01, 64),
)
def test_what_auto_chooses_is_never_expected_to_be_slower(
    known: dict[str, Estimate], device: float, cores: float
) -> None:
    method = one_block(known, device=device, cores=cores)
    as_it_is = 1 / device
    if method != AS_IT_IS:
        chosen = known[method]
        assert max(chosen.left / device, chosen.seconds / cores) < as_it_is
    for other in known.values():  # and what is left out would not have been much faster
        best = as_it_is
        if method != AS_IT_IS:
            best = max(known[method].left / device, known[method].seconds / cores)
        if other.seconds / cores <= 0.8 * as_it_is:
            assert max(other.left / device, other.seconds / cores) >= min(best, 0.9 * as_it_is) * (1 - 1e-9)


def test_estimate_tells_weights_from_noise_and_text() -> None:
    rng = np.random.default_rng(1)
    weights = (rng.standard_normal(1 << 17, dtype=np.float32) * np.float32(0.02)).view(np.uint16)[1::2]
    data = weights.tobytes() + rng.bytes(1 << 18) + b"all work and no play " * 5000
    spans = [(0, 1 << 18), (1 << 18, 2 << 18), (2 << 18, len(data))]
    found = [
        estimate(Group("", word, (span,)), memoryview(data), 1)
        for word, span in zip((2, 4, 1), spans, strict=True)
    ]
    assert found[0][PLANES[2]].left < 0.75 < found[0][ZSTD].left
    assert found[1] == {}
    assert found[2].keys() == {ZSTD}
    assert all(e.seconds > 0 for one in found for e in one.values())


# --- what is learnt ------------------------------------------------------------------------------------


def test_the_device_is_as_fast_as_it_was_seen_to_be() -> None:
    history = History()
    history.wrote(1000, 1.0, compressed=False)
    assert history.device is None  # too little to tell
    history.wrote(100 * MIB, 1.0, compressed=False)
    assert history.device == 100 * MIB
    history.wrote(200 * MIB, 1.0, compressed=False)
    assert history.device == 150 * MIB
    history.wrote(250 * MIB, 1.0, compressed=True)
    assert history.device == 200 * MIB


def test_a_shard_that_was_compressed_shows_a_lower_bound() -> None:
    history = History(device=100 * MIB)
    history.wrote(50 * MIB, 1.0, compressed=True)
    assert history.device == 90 * MIB


def test_cores_that_the_codec_did_not_get_are_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "available_cores", lambda: 8)
    history = History()
    history.packed(0.0, 0.0, 4)
    assert history.cores is None
    history.packed(1.0, 4.0, 4)
    assert history.cores == 1.0
    history.packed(9.0, 9.0, 16)  # no more than there are
    assert history.cores == 4.5
    for expected_s in (0.0, 1e-9):  # next to no work tells nothing of them
        history.packed(expected_s, 1e-3, 4)
    assert history.cores == 4.5
    for _ in range(100):
        history.packed(0.0, 0.0, 4)
    assert 7 < history.cores < 8  # in time it is tried again


# --- while a shard is written ---------------------------------------------------------------------------


def chooser(
    n_blocks: int = 64, *, auto: bool = True, direct: bool = True, history: History | None = None
) -> Chooser:
    data = np.tile(np.arange(256, dtype=np.uint8), n_blocks * 16)
    return Chooser(
        [Group("numbers", 1, ((0, len(data)),))],
        memoryview(data),
        BlockTable(len(data), 4096),
        level=1,
        auto=auto,
        direct=direct,
        threads=4,
        history=history or History(),
    )


def test_zstd_compresses_from_the_first_block_on() -> None:
    one = chooser(auto=False)
    one.prepare()
    assert [one.method(i) for i in range(64)] == [ZSTD] * 64


def test_the_first_save_begins_as_it_is_and_then_decides_by_what_it_saw() -> None:
    for nbytes_per_s, method in ((MIB, ZSTD), (1 << 50, AS_IT_IS)):
        one = chooser()
        one.prepare()
        for i in range(4):
            assert one.method(i) == AS_IT_IS
            one.wrote(i, AS_IT_IS, 8 * MIB, 8 * MIB / nbytes_per_s)
        assert {one.method(i) for i in range(4, 64)} == {method}


def test_nothing_is_decided_before_the_first_writes_are_through() -> None:
    one = chooser()
    one.prepare()
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(one.method(4)))
    waiting.start()
    for i in range(4):
        assert not found
        one.wrote(i, AS_IT_IS, 8 * MIB, 8.0)
    waiting.join(10)
    assert found == [ZSTD]


def test_a_failure_elsewhere_ends_the_wait() -> None:
    one = chooser()
    waiting = threading.Thread(target=lambda: one.method(4))
    waiting.start()
    one.stop()
    waiting.join(10)
    assert not waiting.is_alive()


def test_the_page_cache_is_not_taken_for_the_device() -> None:
    one = chooser(direct=False)
    one.prepare()
    assert [one.method(i) for i in range(64)] == [AS_IT_IS] * 64
    one = chooser(direct=False, history=History(device=MIB))
    one.prepare()
    assert one.method(0) == ZSTD


def test_a_known_device_is_measured_again_by_one_block_in_sixteen_at_most() -> None:
    one = chooser(20, history=History(device=MIB))
    one.prepare()
    assert one.method(0) == AS_IT_IS
    one.wrote(0, AS_IT_IS, 8 * MIB, 8.0)
    assert {one.method(i) for i in range(1, 20)} == {ZSTD}
    assert chooser(15, history=History(device=MIB))._probes == 0


def test_a_known_device_is_not_waited_for_and_what_is_seen_of_it_decides_about_the_others() -> None:
    one = chooser(64, history=History(device=MIB))
    one.prepare()
    assert [one.method(i) for i in range(8)] == [AS_IT_IS] * 4 + [ZSTD] * 4  # none of them is written yet
    for i in range(4):
        one.wrote(i, AS_IT_IS, 8 * MIB, 8 * MIB / (1 << 50))
    assert {one.method(i) for i in range(8, 64)} == {AS_IT_IS}


def test_where_nothing_was_compressed_last_time_the_samples_are_not_waited_for() -> None:
    history = History(device=MIB)
    history.packed(0.0, 0.0, 4)
    one = chooser(15, history=history)
    assert [one.method(i) for i in range(5)] == [AS_IT_IS] * 5
    one.prepare()
    assert {one.method(i) for i in range(5, 15)} == {ZSTD}


def test_a_shard_too_small_to_make_up_for_the_wait_at_first_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each block is a millisecond for the device, to half as much; one core needs half a millisecond."""
    monkeypatch.setattr(methods, "available_cores", lambda: 1)
    monkeypatch.setattr(methods, "estimate", lambda *_: {ZSTD: Estimate(0.5, 0.5e-3 / 4096)})
    for n_blocks, method in ((7, AS_IT_IS), (9, ZSTD)):
        one = chooser(n_blocks, history=History(device=4096 / 1e-3, cores=1.0))
        one.prepare()
        assert {one.method(i) for i in range(n_blocks)} == {method}


def test_what_the_codec_needed_is_counted_by_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "estimate", lambda *_: {ZSTD: Estimate(0.5, 1e-9)})
    one = chooser(8, auto=False)
    one.prepare()
    assert [one.method(i) for i in range(4)] == [ZSTD] * 4
    assert one.expected_s == pytest.approx(4 * 4096e-9)


def test_the_wait_for_the_first_blocks_is_not_held_against_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4096 bytes, each written in 3000 bytes' time once the first is there, after a hundred."""
    clock = [0.0]
    monkeypatch.setattr(methods, "MEASURABLE_NBYTES", 1)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    one = chooser(15, history=History(device=MIB))
    one.prepare()
    clock[0] = 100.0
    for i in range(12):
        assert one.method(i) == ZSTD, i
        clock[0] += 1.0
        one.wrote(i, ZSTD, (i + 1) * 3000, i + 1)


def test_a_codec_that_is_slower_than_estimated_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 4096 bytes is through each second, and is written in 3000, in all of the time or in half."""
    clock = [0.0]
    monkeypatch.setattr(methods, "MEASURABLE_NBYTES", 1)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for busy_share, losing in ((0.5, True), (1.0, False)):
        one = chooser(15, history=History(device=MIB))
        one.prepare()
        assert one.method(0) == ZSTD
        for i in range(8):
            assert one.method(i) == ZSTD
            clock[0] += 1.0
            one.wrote(i, ZSTD, (i + 1) * 3000, (i + 1) * busy_share)
        assert one.method(8) == (AS_IT_IS if losing else ZSTD), busy_share
