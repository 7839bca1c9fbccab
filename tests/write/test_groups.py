"""Are the bytes that are alike found, and is a sample of them whole elements of them?"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.format.blocks import BlockTable
from ckptengine.format.shard import encode_header, tensor_spans
from ckptengine.write.groups import MAX_GROUPS, PIECE_NBYTES, SAMPLE_PIECES, Group, group, shares
from tests.format.strategies import few, shard_headers

LIMIT = SAMPLE_PIECES * PIECE_NBYTES


def test_layers_of_one_role_are_one_group_and_the_moments_of_adam_are_two() -> None:
    spans = [
        ("model.layers.0.fc.weight", "bfloat16", 0, 64),
        ("model.layers.1.fc.weight", "bfloat16", 64, 128),
        ("model.layers.11.fc.weight", "bfloat16", 132, 196),
        ("optimizer.state.0.exp_avg", "float32", 196, 260),
        ("optimizer.state.0.exp_avg_sq", "float32", 260, 324),
        ("optimizer.state.1.exp_avg", "float32", 324, 388),
        ("step", "int64", 392, 400),
        ("empty", "int64", 400, 400),
    ]
    assert group(spans) == [
        Group("bfloat16 model…weight", 2, ((0, 128), (132, 196))),
        Group("float32 optimizer…exp_avg", 4, ((196, 260), (324, 388))),
        Group("float32 optimizer…exp_avg_sq", 4, ((260, 324),)),
        Group("int64 step", 8, ((392, 400),)),
    ]


@pytest.mark.parametrize(
    ("dtype", "word"), [("uint8", 1), ("float16", 2), ("complex32", 2), ("complex64", 4), ("complex128", 8)]
)
def test_planes_are_those_of_the_numbers_in_an_element(dtype: str, word: int) -> None:
    assert group([("t", dtype, 0, 16)])[0].word == word


def test_too_many_roles_are_put_together_by_their_dtype() -> None:
    letters = [f"{a}{b}" for a in "abcdefghij" for b in "abcdefghij"]
    spans = [
        (name, "int8" if i % 2 else "int16", 2 * i, 2 * i + 2)
        for i, name in enumerate(letters[: MAX_GROUPS + 1])
    ]
    assert [one.name for one in group(spans[:-1])][:2] == ["int16 aa", "int8 ab"]
    assert [(one.name, one.nbytes) for one in group(spans)] == [("int16", 66), ("int8", 64)]


@few
@given(shard_headers())
def test_every_byte_of_every_tensor_is_in_one_group_and_in_the_share_of_its_block(header: object) -> None:
    template = encode_header(header)  # type: ignore[arg-type]
    spans, blocks = tensor_spans(template), header.blocks  # type: ignore[attr-defined]
    groups = group(spans)
    covered = sorted(run for one in groups for run in one.runs)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(covered))
    assert sum(one.nbytes for one in groups) == sum(stop - start for *_, start, stop in spans)
    found = shares(groups, blocks)
    for i, one in enumerate(groups):
        assert sum(members.get(i, 0) for members in found) == one.nbytes
    for i, members in enumerate(found):
        start, stop = blocks.span(i)
        assert sum(members.values()) <= stop - start


@st.composite
def large_groups(draw: st.DrawFn) -> Group:
    word = draw(st.sampled_from([1, 2, 4, 8]))
    runs, at = [], 0
    for gap, nbytes in draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3 * LIMIT // 16)), min_size=1, max_size=20)
    ):
        start = at + gap * 16
        runs.append((start, start + nbytes * word))
        at = -(-runs[-1][1] // 16) * 16
    return Group("", word, tuple(runs))


@few
@given(large_groups())
def test_sample_is_bounded_and_of_the_groups_own_elements(one: Group) -> None:
    # Each element says which group it is of, and which of its bytes each byte is.
    data = np.full(one.runs[-1][1] + 16, 255, np.uint8)
    for start, stop in one.runs:
        data[start:stop] = np.tile(np.arange(one.word, dtype=np.uint8), (stop - start) // one.word)
    sample = np.frombuffer(one.sample(memoryview(data)), np.uint8)
    assert len(sample) == min(one.nbytes, LIMIT) or LIMIT - SAMPLE_PIECES * 8 < len(sample) <= LIMIT
    assert np.array_equal(sample, np.tile(np.arange(one.word, dtype=np.uint8), len(sample) // one.word))


def test_sample_is_spread_over_the_whole_group() -> None:
    data = np.repeat(np.arange(64, dtype=np.uint8), PIECE_NBYTES)
    sample = Group("", 1, ((0, len(data)),)).sample(memoryview(data))
    seen = [int(value) for value in np.unique(np.frombuffer(sample, np.uint8))]
    assert len(sample) == LIMIT
    assert (seen[0], seen[-1]) == (0, 63)
    assert len(seen) >= SAMPLE_PIECES


def test_blocks_share_a_run_that_crosses_them() -> None:
    groups = [Group("a", 1, ((0, 5000),)), Group("b", 1, ((5000, 8192),))]
    assert shares(groups, BlockTable(8192, 4096)) == [{0: 4096}, {0: 904, 1: 3192}]
