"""Is every element read, into a bounded buffer, whatever the layout of the tensor and of what is stored?"""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.adapters import rounds
from ckptengine.errors import StateMismatchError
from tests.adapters.fake import Saved, read_all, same

KIB = 1024


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PIECE_NBYTES", 1 * KIB)
    monkeypatch.setattr(rounds, "BUFFER_NBYTES", 4 * KIB)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=4), st.integers(1, 40))
def test_boxes_make_up_the_whole_and_are_small(dims: list[tuple[int, int]], nelem: int) -> None:
    shape, stride = tuple(size for size, _ in dims), tuple(step for _, step in dims)
    seen = []
    for offsets, sizes in rounds.boxes(shape, stride, nelem):
        seen += list(product(*(range(at, at + size) for at, size in zip(offsets, sizes, strict=True))))
        assert rounds._extent(sizes, stride) <= nelem
    assert sorted(seen) == sorted(product(*map(range, shape)))


def stored() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = torch.randn(40, 50)
    return {
        "a": torch.randn(30, 40),
        "lines": torch.randn(7, 3, 100),
        "b": torch.randn(2, 3, 16, 20).to(memory_format=torch.channels_last),
        "base": base,
        "turned": base.t(),
        "c": torch.randn(500),
        "double": torch.randn(13, 17, dtype=torch.float64),
        "complex": torch.randn(300, dtype=torch.complex64),
        "scalar": torch.tensor(3.0),
    }


def other_layouts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same shapes of which most are not in C order."""
    target = {
        name: torch.zeros_like(tensor).t().contiguous().t() if tensor.ndim == 2 else torch.zeros_like(tensor)
        for name, tensor in state.items()
    }
    target["lines"] = torch.zeros(7, 3, 200)[:, :, ::2]
    target["b"] = torch.zeros(2, 3, 16, 20)
    target["turned"] = torch.zeros(50, 40)
    target["complex"] = torch.zeros(300, dtype=torch.complex64).conj()
    return target


@pytest.mark.usefixtures("_small")
def test_tensors_of_any_layout_are_filled_in_rounds() -> None:
    state = stored()
    saved = Saved(state)
    target = other_layouts(state)
    match = saved.match(target)
    held: set[tuple[int, int]] = set()
    targets = {(t.data_ptr(), t.data_ptr() + t.untyped_storage().nbytes()) for t in target.values()}
    count = 0
    for one in match.rounds():
        count += 1
        for destination in one.destinations[0]:
            span = destination.address, destination.address + destination.stop - destination.start
            if not any(start <= span[0] and span[1] <= stop for start, stop in targets):
                held.add(span)
        saved.read(one.destinations[0])
        one.finish()
    match.apply()
    assert same(target, state)
    assert count > 3
    # All that is not read into place goes through one buffer.
    assert max(stop for _, stop in held) - min(start for start, _ in held) <= 4 * KIB


@pytest.mark.usefixtures("_small")
def test_what_lies_between_pieces_is_read_with_them() -> None:
    """Else each of the shard's blocks would be read twice: once for this, once for that."""
    state = {f"{kind}{i}": torch.randn(16, 16) for i in range(16) for kind in ("straight", "turned")}
    target = {
        name: torch.zeros(16, 16) if name.startswith("straight") else torch.zeros(16, 16).t()
        for name in state
    }
    saved = Saved(state)
    match = saved.match(target)
    ends = []
    for one in match.rounds():
        spans = [(d.start, d.stop) for d in one.destinations[0]]
        ends.append((min(start for start, _ in spans), max(stop for _, stop in spans)))
        saved.read(one.destinations[0])
        one.finish()
    assert len(ends) > 3
    assert all(before[1] <= after[0] for before, after in pairwise(ends))
    assert same(target, state)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("equal", [True, False])
def test_tensors_that_share_memory_are_checked_in_rounds_too(equal: bool) -> None:
    first = torch.randn(40, 40)
    second = first.clone() if equal else torch.randn(40, 40)
    saved = Saved({"first": first, "second": second})
    memory = torch.zeros(40, 40)
    match = saved.match({"first": memory, "second": memory})
    if equal:
        # Twice what is stored, twice: once to copy it, once to compare.
        assert read_all(match, lambda _: saved) == 4 * first.nbytes
        assert torch.equal(memory, first)
    else:
        with pytest.raises(StateMismatchError, match="share memory"):
            read_all(match, lambda _: saved)


def test_little_is_read_in_one_round() -> None:
    state = stored()
    saved = Saved(state)
    target = other_layouts(state)
    assert len(list(saved.match(target).rounds())) == 1
    saved.restore(target)
    assert same(target, state)
