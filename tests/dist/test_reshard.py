"""Do other ranks, in other layouts, get back what some have saved? Real processes in real gloo groups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptengine.format.names import step_dirname
from tests.dist import reshard_cases
from tests.dist.conftest import Groups
from tests.helpers.checkpoints import flip, read_manifest

pytestmark = pytest.mark.dist


FEW = [(4, 2), (2, 3), (2, 2)]
MORE = [(saved, restored) for saved in (1, 2, 4) for restored in (1, 2, 3, 4) if (saved, restored) not in FEW]
MORE += [(4, 8)]
WORLDS = [*FEW, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE)]


@pytest.mark.parametrize(("saved_by", "restored_by"), WORLDS)
def test_tensors_of_any_layout_become_any_other(
    groups: Groups, root: str, saved_by: int, restored_by: int
) -> None:
    """Of each layout, into every third; all pairs of layouts come up in one or the other world. Whole, for who is no
    rank."""
    for step, layout in enumerate(reshard_cases.LAYOUTS):
        groups[saved_by].call(reshard_cases.save_layout, root, layout, step)
        assert reshard_cases.wrong_for_a_reader(root, step) == [], layout
        third = (step + saved_by + 2 * restored_by) % 3
        wrong = groups[restored_by].call(reshard_cases.restore_layouts, root, step, third)
        assert wrong == [[]] * restored_by, layout


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("saved_by", "restored_by"), WORLDS)
def test_a_model_and_its_optimizer_become_any_others(
    groups: Groups, root: str, saved_by: int, restored_by: int, optimizer: str
) -> None:
    for step, wrap in enumerate(reshard_cases.WRAPS):
        if wrap == "plain" and saved_by > 1:
            continue  # ranks whose models nobody keeps alike
        groups[saved_by].call(reshard_cases.save_training, root, wrap, optimizer, step)
        compared = groups[restored_by].call(reshard_cases.restore_training, root, optimizer, step)
        assert all(count >= 14 for of_rank in compared for count in of_rank.values()), (wrap, compared)


@pytest.mark.parametrize("restored_by", [2, 3])
def test_names_that_a_wrapper_was_in_are_known_again(groups: Groups, root: str, restored_by: int) -> None:
    groups[2].call(reshard_cases.save_with_wrappers_in_the_names, root)
    for counts in groups[restored_by].call(reshard_cases.restore_from_wrappers_in_the_names, root):
        assert min(counts) >= 14


@pytest.mark.parametrize("restored_by", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_local_state_dicts_of_flat_parameters(groups: Groups, root: str, restored_by: int) -> None:
    groups[4].call(reshard_cases.save_local_state_dict, root)
    assert groups[restored_by].call(reshard_cases.restore_local_state_dict, root) == [3] * restored_by


def test_training_goes_on_with_another_number_of_ranks(groups: Groups, root: str) -> None:
    """All ranks of all worlds see the same data, so that only the order of sums differs."""
    expected = groups[4].call(reshard_cases.training_goes_on, root, "fsdp1 flat", True)
    for size, wrap in ((1, "plain"), (2, "fsdp2"), (3, "fsdp1 original"), (4, "fsdp2 hybrid")):
        found = groups[size].call(reshard_cases.training_goes_on, root, wrap, False)
        assert found == pytest.approx(expected[:1] * size, rel=1e-4)


def test_stages_of_a_pipeline_are_shared_out_anew(groups: Groups, root: str) -> None:
    groups[3].call(reshard_cases.pieces_of_a_pipeline, root, True)
    for size in (1, 2, 4):
        found = groups[size].call(reshard_cases.pieces_of_a_pipeline, root, False)
        assert [layer for of_rank in found for layer in of_rank] == [float(layer) for layer in range(12)]


# --- the ranks decide together -------------------------------------------------------------------


@pytest.mark.parametrize("odd", [0, 1])
def test_one_rank_may_reshard_while_the_others_read_their_own(
    groups: Groups, root: str, odd: int
) -> None:
    groups[2].call(reshard_cases.save_own, root, [1])
    found = groups[2].call(reshard_cases.restore_with_another_layout_on, odd, root)
    sums = [190.0, 590.0]
    sums[odd] = 780.0
    assert found == [(0, sums[0]), (100, sums[1])]


def test_values_of_each_ranks_own_are_refused_on_all(groups: Groups, root: str) -> None:
    groups[4].call(reshard_cases.save_own, root, [1])
    for text in groups[2].call(reshard_cases.restore_own_is_refused, root):
        assert "in 2 places" in text
        assert re.search("rng: .*its own.*\n.*seen: .*its own", text)


def test_a_shape_that_differs_on_one_rank_is_an_error_on_all(groups: Groups, root: str) -> None:
    groups[4].call(reshard_cases.save_own, root, [1])
    for text in groups[2].call(reshard_cases.restore_mismatched_on, 1, root):
        assert "w: shape (20, 3), in the checkpoint (20, 2)" in text


def test_keys_that_no_rank_has_a_place_for_are_an_error_on_all(groups: Groups, root: str) -> None:
    groups[4].call(reshard_cases.save_own, root, [1])
    for text in groups[2].call(reshard_cases.restore_without_a_place, root):
        assert "in 2 places" in text
        assert "seen: only in the checkpoint" in text
        assert "lr" not in text


@pytest.mark.parametrize("damaged", [0, 2, 3])
@pytest.mark.parametrize("what", ["data", "header", "missing", "INDEX"])
def test_damage_to_any_shard_sends_all_ranks_to_the_commit_before(
    groups: Groups, root: str, damaged: int, what: str
) -> None:
    groups[4].call(reshard_cases.save_own, root, [1, 2])
    step = Path(root, step_dirname(2))
    ref = read_manifest(step).shards[damaged]
    path = step / ref.path
    if what == "data":
        flip(path, ref.header_nbytes + 3)
    elif what == "header":
        flip(path, 100)
    elif what == "missing":
        path.unlink()
    else:
        flip(step / "INDEX", 50)
    for info in groups[2].call(reshard_cases.restore_whole, root):
        if what == "INDEX":  # it can be done without
            assert info.step == 2
            continue
        (fall_back,) = info.fell_back_from
        assert (info.step, fall_back.step, fall_back.rank) == (1, 2, damaged)
        assert path.name in fall_back.reason
        if what == "data":
            assert re.search("tensor w|holds w", fall_back.reason)
            assert f"offset {ref.header_nbytes}" in fall_back.reason
