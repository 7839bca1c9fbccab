"""The staged copy: every byte in its place, whatever the layout and the number of threads."""

from __future__ import annotations

import pytest
import torch

from ckptengine.adapters import stage
from ckptengine.adapters.stage import copy_items
from ckptengine.adapters.state import flatten
from tests.adapters.fake import Saved, bits, same


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_large_tensors_are_copied_by_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(stage, "PIECE_NBYTES", 1 << 16)
    state = {
        "big": torch.randint(0, 256, (1_000_003,), dtype=torch.uint8),
        "strided": torch.randn(300, 400).t()[::3],
        "small": torch.randn(7),
        "bytes": b"x" * 3000,
        "empty": torch.empty(0),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    saved = Saved(state, threads=threads)
    assert same(saved.load(), state)


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_said_to_be_there_is_there_and_stays(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(stage, "PIECE_NBYTES", 1 << 16)
    monkeypatch.setattr(stage, "SMALL_NBYTES", 100)
    tensors = [torch.randint(1, 256, (n,), dtype=torch.uint8) for n in (300_000, 10, 500_001, 70_000)]
    flat = flatten([*tensors, torch.randint(1, 256, (400, 300), dtype=torch.uint8).t()])
    # Not in the order of the payload.
    ends = [sum(item.nbytes for item in flat.items[:i]) for i in range(len(flat.items) + 1)]
    items, offsets = flat.items[::-1], ends[:-1][::-1]
    payload = memoryview(bytearray(ends[-1]))
    seen: list[tuple[int, bytes]] = []
    copy_items(
        items,
        offsets,
        payload,
        threads=threads,
        on_staged=lambda nbytes: seen.append((nbytes, bytes(payload[:nbytes]))),
    )
    if threads == 1:  # several may end the first piece last, and then there is nothing to say
        assert len({nbytes for nbytes, _ in seen}) > 5
    assert [nbytes for nbytes, _ in seen] == sorted(nbytes for nbytes, _ in seen)
    for nbytes, there in seen:
        assert 0 not in there
        assert there == bytes(payload[:nbytes])


def test_an_item_that_does_not_fit_is_an_error_before_anything_is_written() -> None:
    flat = flatten([torch.ones(4), torch.ones(4)])
    payload = memoryview(bytearray(31))
    with pytest.raises(ValueError, match="does not fit"):
        copy_items(flat.items, [0, 16], payload)
    assert bytes(payload) == bytes(31)


def test_what_is_copied_is_not_changed_by_its_source_afterwards() -> None:
    tensor = torch.ones(5)
    saved = Saved([tensor])
    tensor.fill_(2)
    assert same(saved.load(), [torch.ones(5)])


def test_parameters_that_require_a_gradient_are_copied() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 6))
    saved = Saved({"w": weight, "t": torch.nn.Parameter(torch.randn(4, 6).t())})
    assert bits(saved.load()["w"]) == bits(weight)


def test_nothing_to_copy() -> None:
    copy_items([], [], memoryview(bytearray(0)))
    copy_items(flatten([torch.empty(0)]).items, [0], memoryview(bytearray(0)))


@pytest.mark.gpu
def test_device_tensors_are_copied_in_order_with_the_current_stream() -> None:
    device = torch.device("cuda")
    x = torch.zeros(1 << 22, device=device)
    big = torch.randn(4096, 4096, device=device)
    for _ in range(20):
        x = x + (big @ big)[0, 0] * 0 + 1
    state = {"x": x, "t": torch.arange(12.0, device=device).view(3, 4).t(), "cpu": torch.ones(3), "e": x[:0]}
    saved = Saved(state)
    assert same(saved.load(), {key: value.cpu() for key, value in state.items()})


@pytest.mark.gpu
def test_the_arena_can_be_pinned_and_unpinned() -> None:
    import mmap

    from ckptengine.adapters.pinning import pin, unpin
    from ckptengine.adapters.stage import address_of

    memory = mmap.mmap(-1, 1 << 20)
    address = address_of(memoryview(memory))
    assert pin(address, 1 << 20)
    assert pin(address, 1 << 20)
    unpin(address)
    unpin(address)


@pytest.mark.gpu
def test_an_arena_is_pinned_once_and_unpinned_when_it_is_closed() -> None:
    from ckptengine.adapters.pinning import pin_arena
    from ckptengine.staging.arena import Arena

    with Arena(1 << 20) as arena:
        pin_arena(arena)
        pin_arena(arena)
        assert torch.frombuffer(arena.payload, dtype=torch.uint8).is_pinned()
        view = arena.payload
    assert not torch.frombuffer(view, dtype=torch.uint8).is_pinned()


@pytest.mark.gpu
def test_device_targets_are_filled() -> None:
    saved = Saved({"a": torch.randn(100), "b": torch.randn(4, 5).t()})
    target = {"a": torch.zeros(100, device="cuda"), "b": torch.zeros(5, 4, device="cuda")}
    saved.restore(target)
    assert same({key: value.cpu() for key, value in target.items()}, saved.load())
