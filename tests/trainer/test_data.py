"""The data order: decided by seed and position only, divided over the ranks, resumed exactly."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import DataChangedError, Loader, read_corpus

CORPUS = np.arange(1000, dtype=np.int64).astype(np.uint8)


def loader(**changes: object) -> Loader:
    return Loader(CORPUS, **{"seq_len": 10, "batch_size": 2, "seed": 3, **changes})  # type: ignore[arg-type]


def test_targets_are_the_inputs_shifted_by_one() -> None:
    inputs, targets = loader().next_batch()
    assert inputs.shape == targets.shape == (2, 10)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_an_epoch_visits_every_window_once_and_the_next_in_another_order() -> None:
    data = loader(batch_size=1)
    assert data.n_windows == 99
    epochs = [[data.windows(step, 0)[0] for step in range(first, first + 99)] for first in (0, 99)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(99))
    assert epochs[0] != epochs[1]
    assert epochs[0] != [loader(batch_size=1, seed=4).windows(step, 0)[0] for step in range(99)]


def test_ranks_share_a_step_without_overlap() -> None:
    both = [loader(batch_size=4, rank=rank, world_size=2) for rank in range(2)]
    alone = loader(batch_size=4)
    for step in range(60):  # past the end of the epoch
        assert both[0].windows(step, 0) + both[0].windows(step, 1) == alone.windows(step, 0)
        together = torch.cat([part.next_batch()[0] for part in both])
        assert torch.equal(together, alone.next_batch()[0])


@given(before=st.integers(0, 120), after=st.integers(1, 60), rank=st.integers(0, 2))
def test_a_restored_loader_continues_exactly(before: int, after: int, rank: int) -> None:
    whole = loader(batch_size=6, rank=rank, world_size=3)
    for _ in range(before):
        whole.next_batch()
    resumed = loader(batch_size=6, rank=rank, world_size=3)
    resumed.load_state_dict(whole.state_dict())
    for _ in range(after):
        for mine, theirs in zip(whole.next_batch(), resumed.next_batch(), strict=True):
            assert torch.equal(mine, theirs)


@given(sizes=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(0, 9)), max_size=6))
def test_loaders_of_other_numbers_of_ranks_continue_the_same_order(sizes: list[tuple[int, int]]) -> None:
    """As if one rank had read all: no window is left out, and none is read twice."""
    alone = loader(batch_size=12)
    state = alone.state_dict()
    for world_size, steps in sizes:
        ranks = [loader(batch_size=12, rank=rank, world_size=world_size) for rank in range(world_size)]
        for one in ranks:
            one.load_state_dict(state)
        for _ in range(steps):
            parts = [one.next_batch() for one in ranks]
            for together, whole in zip(zip(*parts, strict=True), alone.next_batch(), strict=True):
                assert torch.equal(torch.cat(together), whole)
        states = [one.state_dict() for one in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]


def test_a_batch_that_does_not_split_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="4 sequences do not split evenly over 3 ranks"):
        loader(batch_size=4, world_size=3)


def test_noise_changes_inputs_only_and_draws_from_the_global_generators() -> None:
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return loader(noise=0.5).next_batch()

    np.random.seed(1)
    random.seed(1)
    first = batch()
    state = np.random.get_state()
    random.seed(1)
    assert not torch.equal(batch()[0], first[0])
    np.random.set_state(state)
    clean = loader().next_batch()
    assert torch.equal(first[1], clean[1])
    assert not torch.equal(first[0], clean[0])
    np.random.seed(1)
    random.seed(1)
    assert torch.equal(batch()[0], first[0])


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"seed": 4}, "seed: saved 4, here 3"), ({"seq_len": 20}, "seq_len: saved 20, here 10")],
)
def test_a_position_of_other_data_is_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(DataChangedError, match=named):
        loader().load_state_dict(loader(**changes).state_dict())


def test_a_position_in_another_corpus_is_refused() -> None:
    other = Loader(CORPUS[1:], seq_len=10, batch_size=2, seed=3)
    with pytest.raises(DataChangedError, match="corpus: saved"):
        loader().load_state_dict(other.state_dict())


def test_a_corpus_without_one_window_is_refused() -> None:
    with pytest.raises(ValueError, match="10 bytes has no window of 10 bytes"):
        Loader(CORPUS[:10], seq_len=10, batch_size=1)


def test_the_corpus_is_sorted_bounded_and_without_installed_packages(tmp_path: Path) -> None:
    for name, text in {
        "b.py": "B",
        "a/z.py": "AZ",
        "a/y.txt": "no",
        "site-packages/s.py": "no",
        "c.py": "CCC",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_corpus(100, tmp_path).tobytes() == b"AZBCCC"
    assert read_corpus(4, tmp_path).tobytes() == b"AZBC"


def test_the_standard_library_fills_the_default_corpus() -> None:
    corpus = read_corpus(1 << 20)
    assert len(corpus) == 1 << 20
    assert corpus.tobytes() == read_corpus(1 << 20).tobytes()
    assert len(set(corpus.tolist())) > 60


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Python sources"):
        read_corpus(10, tmp_path)
