"""Does a Checkpointer keep its promises to a training script that is one process?"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import ckptengine as ck
from ckptengine import giving_up
from ckptengine.adapters.nvrx import WriterProcess
from ckptengine.format.names import INDEX_NAME, MANIFEST_NAME, AttemptId
from ckptengine.storage.posix import PosixStore
from tests.adapters.fake import same
from tests.helpers.checkpoints import flip, read_manifest, write_checkpoint
from tests.helpers.privileges import modes_bind_root

SMALL = ck.Config(block_nbytes=4096)


@pytest.fixture(autouse=True)
def _one_writer(lent_writer: None) -> None:
    pass


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[ck.Checkpointer]:
    with ck.Checkpointer(tmp_path / "root", config=SMALL) as made:
        yield made


def state_at(step: int) -> dict[str, Any]:
    """A state of a few blocks that is different at each step."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(40, 50, generator=generator)
    return {
        "model": {"weight": weight, "tied": weight, "bias": torch.full((7,), step, dtype=torch.bfloat16)},
        "rng": generator.get_state(),
        "step": step,
        "loss": step / 7,
        "history": [step, (step, str(step))],
    }


def target() -> dict[str, Any]:
    """The shape of `state_at`, and nothing of its content."""
    made = state_at(0)
    made["model"]["weight"].fill_(-1)
    return made | {"step": -1, "loss": -1.0, "history": [0, (0, "0")]}


def restored(ckpt: ck.Checkpointer, **options: Any) -> tuple[dict[str, Any], ck.RestoreInfo]:
    state = target()
    info = ckpt.restore(state, **options)
    return state, info


def step_path(root: Path | str, step: int) -> Path:
    return Path(root) / f"step-{step:010d}"


def shard_of(root: Path | str, step: int) -> Path:
    path = step_path(root, step)
    return path / read_manifest(path).shards[0].path


def damage(root: Path | str, step: int) -> None:
    """Flip a bit in the first block of a step's only shard."""
    path = step_path(root, step)
    flip(shard_of(root, step), read_manifest(path).shards[0].header_nbytes + 11)


@contextlib.contextmanager
def stopped_writer(ckpt: ck.Checkpointer) -> Iterator[None]:
    """Saves are staged meanwhile, and not written."""
    if ckpt.writer_pid is None:
        ckpt.save(0, {"started": True})
    assert ckpt.writer_pid is not None
    pid = ckpt.writer_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# --- the configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_nbytes": 0},
        {"block_nbytes": 4097},
        {"block_nbytes": 1 << 32},
        {"codec": "gzip"},
        {"zstd_level": 23},
        {"direct_io": "maybe"},
        {"on_error": "ignore"},
        {"snapshot": "later"},
        {"io_threads": 0},
        {"max_arenas": 0},
        {"keep_last": 0},
        {"keep_every": -1},
        {"arena_budget_nbytes": 0},
        {"retries": 10},
        {"commit_timeout_s": 0.0},
        {"restore_timeout_s": -1.0},
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{name} must be .*{value}"):
        ck.Config(**wrong)


@pytest.mark.parametrize("name", [field.name for field in msgspec.structs.fields(ck.Config)])
def test_a_setting_of_another_type_is_refused_by_name(name: str) -> None:
    """None gets as far as the writer process, and none means what it was not meant to: "no" is true."""
    wrong: list[Any] = ["no", b"4096", [], float("nan"), float("inf")]
    default = getattr(ck.Config(), name)
    if default is not False:
        wrong.append(True)
    if not isinstance(default, float):
        wrong.append(1.5)
    if default is not None:
        wrong.append(None)
    fits = {"storage_gbps": 1.5, "fabric_gbps": 1.5, "trace": "no"}
    for value in wrong:
        if name in fits and value == fits[name]:
            continue
        with pytest.raises(ValueError, match=rf"{name} must be "):
            ck.Config(**{name: value})


NUMBERS = [
    name
    for name, kind in get_type_hints(ck.Config).items()
    if {int, float} & {kind, *get_args(kind)} and kind is not bool
]


@given(st.sampled_from(NUMBERS), st.integers() | st.sampled_from([10**30, -(10**30), 1 << 63, 10**400]))
@example("keep_last", 10**30)
@example("max_arenas", 1 << 40)
def test_a_number_of_any_size_is_taken_or_refused_at_once(name: str, value: int) -> None:
    """And what is taken goes to the writer process whole."""
    try:
        config = ck.Config(**{name: value})
    except ValueError as error:
        assert re.match(rf"{name} must be .*, not {value}$", str(error)), error  # noqa: PT017
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ck.Config) == config


def test_no_number_is_without_bound() -> None:
    assert len(NUMBERS) == 16
    for name in NUMBERS:
        for value in (10**30, -(10**30)):
            with pytest.raises(ValueError, match=rf"{name} must be .*, not {value}$"):
                ck.Config(**{name: value})
    with pytest.raises(ValueError, match=r"storage_gbps must be in \[1e-06, 1e\+06\] or None, not 5e-324"):
        ck.Config(storage_gbps=5e-324)


def test_a_job_works_at_the_upper_bounds(tmp_path: Path) -> None:
    most = (1 << 63) - 1
    config = ck.Config(
        block_nbytes=4096,
        io_threads=1024,
        max_arenas=1024,
        keep_last=most,
        keep_every=most,
        arena_budget_nbytes=most,
        storage_gbps=1e6,
        commit_timeout_s=1e9,
        stall_timeout_s=1e9,
    )
    with ck.Checkpointer(tmp_path / "root", config=config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_at(step))
        state, info = restored(ckpt)
    assert info.step == 2
    assert same(state, state_at(2))


@pytest.mark.parametrize(("codec", "mib"), [("raw", 16), ("zstd", 8), ("auto", 8)])
def test_compressed_blocks_are_smaller_unless_told(codec: Any, mib: int) -> None:
    assert ck.Config(codec=codec).shard_block_nbytes == mib << 20
    assert ck.Config(codec=codec, block_nbytes=32 << 20).shard_block_nbytes == 32 << 20


def test_all_wrong_settings_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"block_nbytes must be .*; io_threads must be"):
        ck.Config(block_nbytes=1, io_threads=0)
    with pytest.raises(TypeError, match="blocks"):
        ck.Config(blocks=1)  # type: ignore[call-arg]


# --- a save --------------------------------------------------------------------------------------


def test_a_save_goes_through_its_moments_in_order(ckpt: ck.Checkpointer) -> None:
    state = state_at(3)
    before = time.time()
    handle = ckpt.async_save(3, state)
    assert handle.staged()
    info = handle.result(timeout=60)
    assert handle.done()
    assert handle.durable()
    assert handle.committed()
    assert handle.exception() is None
    times = info.times
    assert read_manifest(step_path(ckpt.root, 3)).created < times.committed
    moments = [before, times.requested, times.staged, times.written, times.durable, times.committed]
    assert moments == sorted(moments)
    assert handle.times == times
    assert info.stall_s == times.returned - times.requested
    assert "step=3 committed" in repr(handle)


def test_what_a_commit_says_is_on_the_disk(ckpt: ck.Checkpointer) -> None:
    info = ckpt.save(1000, state_at(1))
    assert (info.step, info.path) == (1000, str(step_path(ckpt.root, 1000)))
    manifest = read_manifest(info.path)
    assert (info.fingerprint, info.attempt) == (manifest.fingerprint, manifest.attempt)
    assert info.nbytes == manifest.nbytes == shard_of(ckpt.root, 1000).stat().st_size
    assert info.rank_nbytes == 40 * 50 * 4 + 7 * 2 + state_at(1)["rng"].numel()
    assert manifest.world_size == 1
    assert ck.verify(info.path).ok
    # Nothing else was left in the root, and no temporary file in the step.
    assert [path.name for path in Path(ckpt.root).iterdir()] == ["step-0000001000"]
    assert {path.name for path in Path(info.path).iterdir()} == {MANIFEST_NAME, INDEX_NAME, info.attempt}


def test_the_writer_starts_with_the_first_save(ckpt: ck.Checkpointer) -> None:
    assert ckpt.writer_pid is None
    ckpt.save(1, state_at(1))
    pid = ckpt.writer_pid
    assert pid is not None
    assert pid != os.getpid()
    ckpt.save(2, state_at(2))
    assert ckpt.writer_pid == pid


def test_what_was_saved_is_the_state_at_the_call(ckpt: ck.Checkpointer) -> None:
    state = {
        "tensor": torch.zeros(3000),
        "array": np.zeros(3000),
        "small_array": np.zeros(3),
        "bytes": bytearray(5000),
        "values": [1, {"a": 2}],
    }
    with stopped_writer(ckpt):
        handle = ckpt.async_save(1, state)
        state["tensor"].fill_(1)
        state["array"][:] = 1
        state["small_array"][:] = 1
        state["bytes"][:] = b"\1" * 5000
        state["values"][1]["a"] = 3
        state["values"].append(4)
    handle.result(60)
    with ck.open_checkpoint(ckpt.root) as c:
        found = c.load()
    assert not found["tensor"].any()
    assert not found["array"].any()
    assert not found["small_array"].any()
    assert found["bytes"] == bytearray(5000)
    assert found["values"] == [1, {"a": 2}]


def test_result_and_wait_can_be_tried_again_after_a_timeout(ckpt: ck.Checkpointer) -> None:
    with stopped_writer(ckpt):
        handle = ckpt.async_save(1, state_at(1))
        with pytest.raises(ck.CommitTimeoutError, match=r"step 1 is not committed after 0\.05 s"):
            handle.result(timeout=0.05)
        with pytest.raises(TimeoutError, match="still under way"):
            ckpt.wait(timeout=0.05)
        assert not handle.done()
        assert not handle.committed()
        assert handle.exception() is None
        assert "step=1 staged" in repr(handle)
        assert ckpt.latest == 0
    assert handle.result(timeout=60).step == 1
    ckpt.wait(timeout=0)
    assert ckpt.latest == 1


def test_two_saves_overlap_and_a_third_waits_and_says_so(
    ckpt: ck.Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    def go_on() -> None:
        wait_until(lambda: "2 of 2 arenas are busy" in caplog.text)
        assert ckpt.writer_pid is not None
        os.kill(ckpt.writer_pid, signal.SIGCONT)

    with stopped_writer(ckpt), caplog.at_level(logging.WARNING, "ckptengine"):
        handles = [ckpt.async_save(step, state_at(step)) for step in (1, 2)]
        assert not any(handle.done() for handle in handles)
        thread = threading.Thread(target=go_on)
        thread.start()
        handles.append(ckpt.async_save(3, state_at(3)))
        thread.join()
    assert "2 of 2 arenas are busy" in caplog.text
    first, second, third = (handle.result(60) for handle in handles)
    assert second.times.staged < first.times.written
    assert third.times.staged > first.times.committed
    assert first.times.committed < second.times.committed < third.times.committed
    for step in (1, 2, 3):
        assert same(restored(ckpt, step=step)[0], state_at(step))


def test_a_state_that_does_not_fit_the_budget_is_refused_and_the_next_one_saved(tmp_path: Path) -> None:
    config = ck.Config(block_nbytes=4096, arena_budget_nbytes=4 << 20)
    with ck.Checkpointer(tmp_path, config=config) as ckpt:
        with pytest.raises(ck.SaveFailedError, match="raise arena_budget_nbytes") as caught:
            ckpt.async_save(1, {"w": torch.zeros(2 << 20)})
        assert "at most 4194304 bytes" in str(caught.value)
        assert ckpt.save(2, state_at(2)).step == 2
        assert ckpt.steps() == [2]


def test_a_value_that_cannot_be_stored_is_refused_in_the_call(ckpt: ck.Checkpointer) -> None:
    with pytest.raises(ck.UnsupportedStateError, match=r'state\["a"\]\[1\]') as caught:
        ckpt.async_save(1, {"a": [1, object()]})
    assert caught.value.fqn == 'state["a"][1]'
    with pytest.raises(ck.UnsupportedStateError, match=r"metadata.*put the tensor into the state"):
        ckpt.async_save(2, state_at(2), metadata={"t": torch.ones(1)})
    ckpt.wait()
    assert os.listdir(ckpt.root) == []
    assert ckpt.save(3, state_at(3)).step == 3


TAKE_A_STEP = {
    "save": lambda ckpt, step: ckpt.save(step, {}),
    "async_save": lambda ckpt, step: ckpt.async_save(step, {}),
    "restore": lambda ckpt, step: ckpt.restore(target(), step=step),
    "streaming restore": lambda ckpt, step: ckpt.restore(target(), step=step, streaming=True),
}
"""Whatever of a Checkpointer takes a step, with one in it that is none."""


@pytest.mark.parametrize("call", TAKE_A_STEP)
@pytest.mark.parametrize(
    ("step", "kind", "message"),
    [
        (-1, ValueError, r"step must be in \[0, 2\^63\), not -1"),
        (1 << 63, ValueError, r"step must be in \[0, 2\^63\), not 9223372036854775808"),
        (np.int64(-7), ValueError, r"step must be in \[0, 2\^63\), not -7"),
        (True, TypeError, r"step must be an integer, not True \(bool\)"),
        (np.True_, TypeError, r"step must be an integer, not .*True"),
        (torch.tensor(True), TypeError, r"step must be an integer, not tensor\(True\)"),
        (1.0, TypeError, r"step must be an integer, not 1.0 \(float\)"),
        ("1", TypeError, r"step must be an integer, not '1' \(str\)"),
        ([1], TypeError, r"step must be an integer, not \[1\] \(list\)"),
    ],
    ids=str,
)
def test_a_step_that_is_none_is_refused(
    ckpt: ck.Checkpointer, call: str, step: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        TAKE_A_STEP[call](ckpt, step)
    ckpt.wait()
    assert os.listdir(ckpt.root) == []


def test_no_step_is_none_to_save(ckpt: ck.Checkpointer) -> None:
    with pytest.raises(TypeError, match=r"step must be an integer, not None \(NoneType\)"):
        ckpt.save(None, {})  # type: ignore[arg-type]


def test_a_steps_range_is_all_of_63_bits(ckpt: ck.Checkpointer) -> None:
    for step in (0, (1 << 63) - 1, np.int64(12), np.uint8(13), torch.tensor(14)):
        assert ckpt.save(step, state_at(1)).step == int(step)
        state, info = restored(ckpt, step=step)
        assert (type(info.step), info.step) == (int, int(step))
        assert same(state, state_at(1))
    assert ckpt.steps() == [0, 12, 13, 14, (1 << 63) - 1]
    assert ckpt.latest == (1 << 63) - 1


def test_steps_are_ordered_as_numbers_whatever_order_they_were_saved_in(ckpt: ck.Checkpointer) -> None:
    assert ckpt.latest is None
    assert ckpt.steps() == []
    for step in (100, 9, 10**12):
        ckpt.save(step, state_at(step % 97))
    write_checkpoint(ckpt.root, 10**13, commit=False)
    assert ckpt.steps() == [9, 100, 10**12]
    assert ckpt.latest == 10**12


def test_a_step_saved_again_is_replaced(ckpt: ck.Checkpointer) -> None:
    first = ckpt.save(5, state_at(1))
    second = ckpt.save(5, state_at(2))
    assert AttemptId.parse(second.attempt) > AttemptId.parse(first.attempt)
    state, info = restored(ckpt)
    assert same(state, state_at(2))
    assert info.step == 5
    assert ckpt.steps() == [5]
    ckpt.save(6, state_at(3))  # retention has run after the second commit when this one is done
    assert not (Path(first.path) / first.attempt).exists()


def test_the_same_state_twice_is_the_same_bytes(ckpt: ck.Checkpointer) -> None:
    shards = [Path(info.path) / info.attempt for info in (ckpt.save(n, state_at(1)) for n in (1, 2))]
    sizes = [read_manifest(path.parent).shards[0].header_nbytes for path in shards]
    one, two = (next(path.iterdir()).read_bytes()[size:] for path, size in zip(shards, sizes, strict=True))
    assert one == two


def test_each_run_is_a_life_of_its_own(tmp_path: Path) -> None:
    lives = []
    for step in (1, 2):
        with ck.Checkpointer(tmp_path, config=SMALL) as ckpt:
            lives.append(AttemptId.parse(ckpt.save(step, state_at(step)).attempt).run.life)
    assert lives == [1, 2]


def test_metadata_comes_back_with_its_types(ckpt: ck.Checkpointer) -> None:
    metadata = {
        "loss": float("inf"),
        "pair": (1, 2.5),
        "tags": {"a", "b"},
        "nested": {1: {"x": None}, "": [True]},
        "lr": np.float32(0.1),
        "dtype": torch.bfloat16,
        "host": "näh",
    }
    ckpt.save(1, state_at(1), metadata=metadata)
    ckpt.save(2, state_at(2))
    with ck.open_checkpoint(step_path(ckpt.root, 1)) as c:
        assert same(c.metadata, metadata)
    with ck.open_checkpoint(ckpt.root) as c:
        assert c.metadata == {}


def test_compressed_shards_restore_and_are_smaller(tmp_path: Path) -> None:
    state = {"zeros": torch.zeros(50_000), "noise": torch.randn(2000)}
    with ck.Checkpointer(tmp_path, config=ck.Config(block_nbytes=65536, codec="zstd")) as ckpt:
        info = ckpt.save(1, state)
        assert shard_of(tmp_path, 1).suffix == ".ckptz"
        assert info.nbytes == shard_of(tmp_path, 1).stat().st_size < 80_000
        found = {"zeros": torch.ones(50_000), "noise": torch.zeros(2000)}
        ckpt.restore(found)
    assert same(found, state)
    assert ck.verify(tmp_path).ok
    # A reader's own configuration says nothing about what it reads.
    with ck.Checkpointer(tmp_path, config=SMALL) as ckpt:
        found = {"zeros": torch.ones(50_000), "noise": torch.zeros(2000)}
        ckpt.restore(found)
    assert same(found, state)


def test_a_save_that_compresses_where_it_pays_restores_whatever_it_chose(tmp_path: Path) -> None:
    state = {
        "zeros": torch.zeros(1 << 20),
        "half": torch.randn(1 << 20).bfloat16(),
        "noise": torch.randint(0, 256, (1 << 20,), dtype=torch.uint8),
    }
    with ck.Checkpointer(tmp_path, config=ck.Config(block_nbytes=1 << 17, codec="auto")) as ckpt:
        for step in range(3):
            ckpt.save(step, state)
            assert read_manifest(step_path(tmp_path, step)).codec == "zstd"
            assert shard_of(tmp_path, step).suffix == ".ckptz"
            found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            ckpt.restore(found)
            assert same(found, state)
    assert ck.verify(tmp_path).ok


def test_noise_that_ends_beyond_a_block_can_be_saved_again_and_again(tmp_path: Path) -> None:
    """Nothing of it shrinks, but its last block is 100 bytes and what fills their page."""
    sizes = {"w": 8 << 20, "rng": 100}
    state = {name: torch.randint(0, 256, (n,), dtype=torch.uint8) for name, n in sizes.items()}
    with ck.Checkpointer(tmp_path, config=ck.Config(block_nbytes=1 << 17, codec="auto")) as ckpt:
        for step in range(4):
            ckpt.save(step, state)
            with ck.open_checkpoint(step_path(tmp_path, step)) as c:
                assert same(c.load(), state)


@pytest.mark.parametrize("codec", ["raw", "zstd", "auto"])
def test_an_empty_state_can_be_saved(tmp_path: Path, codec: Any) -> None:
    with ck.Checkpointer(tmp_path, config=ck.Config(block_nbytes=4096, codec=codec)) as ckpt:
        for step, state in enumerate([{}, [], (), {"nothing": torch.zeros(0, 3)}, [{}]]):
            ckpt.save(step, state)
            with ck.open_checkpoint(step_path(tmp_path, step)) as c:
                assert same(c.load(), state)
            assert ckpt.restore(state, step=step).nbytes == 0
            assert ck.verify(step_path(tmp_path, step)).ok


# --- retention -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"keep_last": 2}, [20, 25]),
        ({"keep_every": 10}, [10, 20, 25]),
        ({"keep_last": 2, "keep_every": 10}, [10, 20, 25]),
        ({"keep_last": 1}, [25]),
        ({}, [5, 10, 15, 20, 25]),
    ],
)
def test_retention_keeps_what_the_policy_says(
    tmp_path: Path, policy: dict[str, int], kept: list[int]
) -> None:
    with ck.Checkpointer(tmp_path, config=ck.Config(block_nbytes=4096, **policy)) as ckpt:
        for step in (5, 10, 15, 20, 25):
            ckpt.save(step, state_at(step))
        # A commit is reported before retention has run; the writer takes its tasks one after the other.
        ckpt.save(25, state_at(25))
        assert wait_until(lambda: len(os.listdir(tmp_path)) == len(kept))
        assert ckpt.steps() == kept
        for step in kept:
            assert same(restored(ckpt, step=step)[0], state_at(step))


def wait_until(condition: Any, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_a_step_that_is_open_is_not_deleted_by_a_save(tmp_path: Path) -> None:
    with ck.Checkpointer(tmp_path, config=ck.Config(block_nbytes=4096, keep_last=1)) as ckpt:
        ckpt.save(1, state_at(1))
        with ck.open_checkpoint(step_path(tmp_path, 1)) as c:
            for step in (2, 3):
                ckpt.save(step, state_at(step))
            assert wait_until(lambda: not step_path(tmp_path, 2).exists())
            assert same(c.load(), state_at(1))
        ckpt.save(4, state_at(4))
        assert wait_until(lambda: not step_path(tmp_path, 1).exists())


def test_a_step_is_not_deleted_while_it_is_restored(
    ckpt: ck.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptengine import step_shards

    def read(*args: Any, **options: Any) -> Any:
        # What retention would ask, in whatever process.
        with PosixStore().try_lock_exclusive(str(step_path(ckpt.root, 1))) as free:
            held.append(not free)
        return read_shards(*args, **options)

    held: list[bool] = []
    read_shards = step_shards.read_shards
    monkeypatch.setattr(step_shards, "read_shards", read)
    ckpt.save(1, state_at(1))
    restored(ckpt)
    assert held == [True]
    with PosixStore().try_lock_exclusive(str(step_path(ckpt.root, 1))) as free:
        assert free


# --- a restore -----------------------------------------------------------------------------------


def test_a_restore_fills_the_state_in_place_and_says_what_it_did(ckpt: ck.Checkpointer) -> None:
    ckpt.save(1, state_at(1))
    handle = ckpt.async_save(7, state_at(7))  # a restore waits for it
    state = target()
    weight, model = state["model"]["weight"], state["model"]
    info = ckpt.restore(state)
    assert handle.done()
    assert same(state, state_at(7))
    assert state["model"] is model
    assert state["model"]["weight"] is weight is state["model"]["tied"]
    assert (info.step, info.path, info.source) == (7, str(step_path(ckpt.root, 7)), "storage")
    assert (info.missing, info.unexpected, info.fell_back_from) == ((), (), ())
    assert info.nbytes == handle.result().rank_nbytes
    assert 0 < info.read_seconds <= info.seconds
    assert info.from_cache_nbytes >= 0
    phases = info.phases
    assert phases.seconds <= info.seconds
    assert phases.read.nbytes >= phases.verify.nbytes >= info.nbytes
    assert all(getattr(phases, name).seconds > 0 for name in ("metadata", "plan", "read", "verify", "apply"))
    assert phases.metadata.nbytes == read_manifest(info.path).shards[0].header_nbytes
    assert (phases.exchange.seconds, phases.exchange.nbytes, phases.decompress.nbytes) == (0.0, 0, 0)
    assert info.slowest == info.ranks[0]
    assert (info.rank, info.slowest.rank, len(info.ranks)) == (0, 0, 1)


def test_a_restore_without_the_check_has_verified_nothing(ckpt: ck.Checkpointer) -> None:
    ckpt.save(1, state_at(1))
    info = ckpt.restore(target(), verify=False)
    assert info.phases.verify.nbytes == 0
    assert info.phases.read.nbytes >= info.nbytes


def test_a_compressed_shards_blocks_are_decompressed(tmp_path: Path) -> None:
    with ck.Checkpointer(tmp_path, config=ck.Config(codec="zstd", block_nbytes=65536)) as ckpt:
        state = {"zeros": torch.zeros(100_000)}
        ckpt.save(1, state)
        phases = ckpt.restore(state).phases
    assert phases.decompress.nbytes == phases.verify.nbytes
    assert 400_000 <= phases.verify.nbytes < 404_096  # the last page is padded
    assert phases.scatter.nbytes == 400_000
    assert phases.read.nbytes < 400_000
    assert phases.decompress.seconds > 0


def test_any_committed_step_can_be_restored(ckpt: ck.Checkpointer) -> None:
    for step in (1, 2, 3):
        ckpt.save(step, state_at(step))
    for step in (2, 1, 3):
        state, info = restored(ckpt, step=step)
        assert same(state, state_at(step))
        assert info.step == step


def test_a_step_that_is_not_there_is_said_to_be(ckpt: ck.Checkpointer) -> None:
    ckpt.save(1, state_at(1))
    write_checkpoint(ckpt.root, 3, ranks=1, commit=False)
    state = target()
    with pytest.raises(ck.CheckpointNotFoundError, match=r"step-0000000002.*newest first: 1$"):
        ckpt.restore(state, step=2)
    with pytest.raises(ck.NotCommittedError, match=r"newest first: 1$"):
        ckpt.restore(state, step=3)
    assert same(state, target())
    assert ckpt.restore(state).step == 1


def test_of_many_steps_the_newest_are_named_for_one_that_is_not_there(ckpt: ck.Checkpointer) -> None:
    with pytest.raises(ck.CheckpointNotFoundError) as caught:
        ckpt.restore(target(), step=8)
    assert "newest first" not in str(caught.value)
    write_checkpoint(ckpt.root, 9, ranks=1, commit=False)
    with pytest.raises(ck.CheckpointNotFoundError, match="no step was ever committed"):
        ckpt.restore(target(), step=8)
    for step in (2, 10, 4, 7, 6, 30):
        ckpt.save(step, state_at(step))
    for streaming in (False, True):
        with pytest.raises(ck.CheckpointNotFoundError, match=r"newest first: 30, 10, 7, 6, 4, …$"):
            ckpt.restore(target(), step=8, streaming=streaming)


def test_without_a_checkpoint_there_is_nothing_to_restore(ckpt: ck.Checkpointer) -> None:
    state = target()
    with pytest.raises(ck.CheckpointNotFoundError, match="no checkpoint here"):
        ckpt.restore(state)
    write_checkpoint(ckpt.root, 3, ranks=1, commit=False)
    with pytest.raises(FileNotFoundError, match="1 saves were begun, none was committed"):
        ckpt.restore(state)
    assert same(state, target())


def test_a_target_that_differs_is_refused_with_all_differences_and_untouched(ckpt: ck.Checkpointer) -> None:
    ckpt.save(1, {"a": torch.ones(3), "b": torch.ones(4), "c": 1, "d": torch.ones(2), "e": torch.ones(2)})

    def made() -> dict[str, Any]:
        return {
            "a": torch.zeros(3),
            "b": torch.zeros(5),
            "d": torch.zeros(2, dtype=torch.float64),
            "e": 5,
            "new": torch.zeros(1),
        }

    state = made()
    with pytest.raises(ck.StateMismatchError) as caught:
        ckpt.restore(state)
    error = caught.value
    assert (error.missing, error.unexpected) == (("new",), ("c",))
    assert [line.partition(":")[0] for line in error.mismatched] == ["b", "d", "e"]
    assert all(name in str(error) for name in ("new", "c:", "b:", "d:", "e:"))
    assert same(state, made())
    with pytest.raises(ck.StateMismatchError):
        ckpt.restore(state, strict=False)
    assert same(state, made())


def test_not_strict_leaves_keys_of_one_side_alone_and_names_them(ckpt: ck.Checkpointer) -> None:
    ckpt.save(1, {"a": torch.ones(3), "old": {"x": torch.ones(2), "y": 1}, "n": 1})
    state = {"a": torch.zeros(3), "new": torch.full((2,), 7.0), "old": {"z": 2}, "n": 0}
    info = ckpt.restore(state, strict=False)
    assert info.missing == ("new", "old.z")
    assert info.unexpected == ("old.x", "old.y")
    assert same(state, {"a": torch.ones(3), "new": torch.full((2,), 7.0), "old": {"z": 2}, "n": 1})


def test_a_damaged_newest_commit_is_fallen_back_from(
    ckpt: ck.Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        ckpt.save(step, state_at(step))
    damage(ckpt.root, 2)
    damage(ckpt.root, 3)
    with caplog.at_level(logging.WARNING, "ckptengine"):
        state, info = restored(ckpt)
    assert same(state, state_at(1))
    assert info.step == 1
    assert [(fall.step, fall.rank) for fall in info.fell_back_from] == [(3, 0), (2, 0)]
    for fall in info.fell_back_from:
        assert shard_of(ckpt.root, fall.step).name in fall.reason
        assert "block 0 is damaged" in fall.reason
    assert "step 3 is damaged" in caplog.text
    with pytest.raises(ck.CorruptCheckpointError, match="block 0 is damaged") as caught:
        restored(ckpt, step=3)
    assert caught.value.path == str(shard_of(ckpt.root, 3))


def test_a_mismatch_after_a_fall_back_does_not_claim_that_nothing_was_written(ckpt: ck.Checkpointer) -> None:
    ckpt.save(1, {"a": torch.zeros(3)})
    ckpt.save(2, {"a": torch.zeros(5000)})
    damage(ckpt.root, 2)
    with pytest.raises(ck.StateMismatchError, match="may hold parts of a newer step, which is damaged"):
        ckpt.restore({"a": torch.ones(5000)})
    with pytest.raises(ck.StateMismatchError, match="which is unchanged"):
        ckpt.restore({"a": torch.ones(5000)}, step=1)


def test_keys_that_only_the_damaged_step_has_are_no_part_of_a_fall_back(ckpt: ck.Checkpointer) -> None:
    ckpt.save(1, {"a": torch.ones(3)})
    ckpt.save(2, {"a": torch.zeros(3), "b": torch.zeros(2)})
    damage(ckpt.root, 2)
    with pytest.raises(ck.StateMismatchError, match="b: only in the newer step") as caught:
        ckpt.restore({"a": torch.ones(3), "b": torch.ones(2)}, strict=False)
    assert len(caught.value.mismatched) == 1
    # Nothing of "c" has been read from anywhere.
    state = {"a": torch.zeros(3), "c": torch.full((2,), 7.0)}
    info = ckpt.restore(state, strict=False)
    assert (info.step, info.missing) == (1, ("c",))
    assert same(state, {"a": torch.ones(3), "c": torch.full((2,), 7.0)})


@pytest.mark.parametrize("cold", [False, True])
def test_large_tensors_of_a_damaged_step_are_overwritten_by_the_one_before(
    tmp_path: Path, cold: bool
) -> None:
    def made(step: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(step)
        return {name: torch.randn(300_007, generator=generator) for name in "abc"} | {"step": step}

    with ck.Checkpointer(tmp_path, config=ck.Config(block_nbytes=1 << 20, io_threads=2)) as ckpt:
        for step in (1, 2):
            ckpt.save(step, made(step))
        # Of the block that holds the end of "b" and the beginning of "c".
        shard = shard_of(ckpt.root, 2)
        flip(shard, shard.stat().st_size - (600 << 10))
        if cold:
            with shard.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        state = made(0)
        info = ckpt.restore(state)
        assert same(state, made(1))
        (fall,) = info.fell_back_from
        assert "block 2 is damaged" in fall.reason
        with pytest.raises(ck.CorruptCheckpointError, match="block 2 is damaged"):
            ckpt.restore(made(0), step=2)


def test_unverified_is_asked_for_and_said(ckpt: ck.Checkpointer) -> None:
    ckpt.save(1, state_at(1))
    damage(ckpt.root, 1)
    state = target()
    info = ckpt.restore(state, verify=False)
    assert (info.step, info.verified) == (1, False)
    assert not same(state, state_at(1))
    damage(ckpt.root, 1)
    state, info = restored(ckpt)
    assert info.verified
    assert same(state, state_at(1))


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "directory", "link", "of another step"])
def test_a_damaged_manifest_of_the_newest_is_fallen_back_from(ckpt: ck.Checkpointer, how: str) -> None:
    ckpt.save(1, state_at(1))
    ckpt.save(2, state_at(2))
    path = step_path(ckpt.root, 2) / MANIFEST_NAME
    data = path.read_bytes()
    if how == "flipped":
        flip(path, 40)
    elif how == "truncated":
        os.truncate(path, len(data) - 1)
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "of another step":
        shutil.copy(step_path(ckpt.root, 1) / MANIFEST_NAME, path)
    else:
        path.unlink()
        if how == "directory":
            path.mkdir()
        else:
            path.symlink_to(step_path(ckpt.root, 1) / MANIFEST_NAME)
    state, info = restored(ckpt)
    assert same(state, state_at(1))
    assert [fall.step for fall in info.fell_back_from] == [2]
    assert MANIFEST_NAME in info.fell_back_from[0].reason
    with pytest.raises(ck.CorruptCheckpointError):
        restored(ckpt, step=2)
    if how != "directory":
        # Saved again, it is whole again.
        ckpt.save(2, state_at(3))
        assert same(restored(ckpt)[0], state_at(3))


@pytest.mark.parametrize("how", ["shard", "missing shard", "manifest"])
def test_when_all_commits_are_damaged_it_is_no_fresh_start(ckpt: ck.Checkpointer, how: str) -> None:
    for step in (1, 2):
        ckpt.save(step, state_at(step))
        if how == "shard":
            damage(ckpt.root, step)
        elif how == "missing shard":
            shard_of(ckpt.root, step).unlink()
        else:
            flip(step_path(ckpt.root, step) / MANIFEST_NAME, 30)
    with pytest.raises(
        ck.CorruptCheckpointError, match="no committed checkpoint could be restored"
    ) as caught:
        restored(ckpt)
    assert not isinstance(caught.value, FileNotFoundError)
    assert "step 2: " in str(caught.value)
    assert "step 1: " in str(caught.value)


def test_a_newer_format_is_an_error_and_no_reason_to_lose_steps(ckpt: ck.Checkpointer) -> None:
    ckpt.save(1, state_at(1))
    ckpt.save(2, state_at(2))
    path = step_path(ckpt.root, 2) / MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 2'))
    for step in (None, 2):
        with pytest.raises(ck.UnsupportedFormatError, match="2"):
            restored(ckpt, step=step)
    assert restored(ckpt, step=1)[1].step == 1


def test_another_state_of_more_ranks_is_a_mismatch(ckpt: ck.Checkpointer) -> None:
    write_checkpoint(ckpt.root, 1, ranks=2)
    with pytest.raises(ck.StateMismatchError, match=r"model\.weight: not in the checkpoint"):
        restored(ckpt)


# --- what a state may be -------------------------------------------------------------------------


class Counter:
    """Something with a state of its own, as a data loader has."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen = torch.arange(count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": self.seen, "epochs": (self.count, None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.seen = state["seen"].clone()


class Stubborn(Counter):
    """Does not take its state."""

    def __init__(self, count: int, error: BaseException) -> None:
        super().__init__(count)
        self.error = error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise self.error


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), ck.CorruptCheckpointError("boom"), ck.StateMismatchError("boom")]
)
def test_an_object_that_does_not_take_its_state_is_named(
    ckpt: ck.Checkpointer, error: Exception, streaming: bool
) -> None:
    for step in (4, 5):
        ckpt.save(step, {"x": {"loader": Counter(step)}, "w": torch.ones(2)})
    state = {"x": {"loader": Stubborn(0, error)}, "w": torch.zeros(2)}
    with pytest.raises(ck.CheckpointError) as caught:
        ckpt.restore(state, streaming=streaming)  # what is small is loaded in the call
    text = str(caught.value)
    kind = type(error).__name__
    assert text.startswith(f"the object 'x.loader' could not take its state of step 5: {kind}: boom. ")
    assert "the restore target is partly written" in text.lower()
    assert "step-0000000005" in text
    assert "rank 0" in text
    assert "restore again" in text
    assert caught.value.__cause__ is error
    # It is no damage, which would have step 4 restored.
    assert not isinstance(caught.value, ck.CorruptCheckpointError)
    assert isinstance(caught.value, ck.StateMismatchError) == isinstance(error, ck.StateMismatchError)
    state["x"]["loader"] = Counter(0)
    assert ckpt.restore(state).step == 5
    assert state["x"]["loader"].count == 5


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_a_process_goes_through_an_object_as_it_is(
    ckpt: ck.Checkpointer, error: BaseException
) -> None:
    ckpt.save(1, {"loader": Counter(1)})
    with pytest.raises(type(error)) as caught:
        ckpt.restore({"loader": Stubborn(0, error)})
    assert caught.value is error


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


def test_objects_are_taken_and_given_back_as_they_are(ckpt: ck.Checkpointer) -> None:
    model, optimizer, scheduler = trained()
    ckpt.save(1, {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": Counter(5)})

    fresh = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    fresh_scheduler = torch.optim.lr_scheduler.StepLR(fresh_optimizer, step_size=7)
    loader = Counter(0)
    weight = fresh[0].weight
    ckpt.restore(
        {"model": fresh, "optimizer": fresh_optimizer, "scheduler": fresh_scheduler, "loader": loader}
    )
    assert fresh[0].weight is weight
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert same(fresh_optimizer.state_dict(), optimizer.state_dict())
    assert same(fresh_scheduler.state_dict(), scheduler.state_dict())
    assert (loader.count, loader.seen.tolist()) == (5, [0, 1, 2, 3, 4])

    for net, opt in ((model, optimizer), (fresh, fresh_optimizer)):
        torch.manual_seed(9)
        net(torch.randn(4, 8)).sum().backward()
        opt.step()
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))


def test_an_object_may_be_the_state(ckpt: ck.Checkpointer) -> None:
    ckpt.save(1, nn.Linear(3, 2, bias=False).requires_grad_(False).eval())
    model = nn.Linear(3, 2, bias=False)
    ckpt.restore(model)
    with ck.open_checkpoint(ckpt.root) as c:
        assert torch.equal(model.weight, c.get_tensor("weight"))


def test_tied_weights_are_stored_once_and_stay_tied(ckpt: ck.Checkpointer) -> None:
    def build() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(50, 16), "head": nn.Linear(16, 50, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model, other = build(), build()
    info = ckpt.save(1, {"model": model})
    assert info.rank_nbytes == 50 * 16 * 4
    ckpt.restore({"model": other})
    assert other["head"].weight is other["embed"].weight
    assert torch.equal(other["head"].weight, model["head"].weight)
    # Into a model whose weights are no longer tied, both are filled.
    untied = build()
    untied["head"].weight = nn.Parameter(torch.zeros(50, 16))
    ckpt.restore({"model": untied})
    assert torch.equal(untied["head"].weight, model["head"].weight)
    assert torch.equal(untied["embed"].weight, model["embed"].weight)


def test_integers_too_long_for_python_to_print_are_values_and_keys(ckpt: ck.Checkpointer) -> None:
    huge = 10**5000
    state = {huge: torch.ones(2), (1, huge): [torch.zeros(1)], "value": huge, "small": 5}
    ckpt.save(1, state)
    found = {huge: torch.zeros(2), (1, huge): [torch.ones(1)], "value": 0, "small": huge}
    ckpt.restore(found)
    assert found["value"] == huge
    assert found["small"] == 5
    assert torch.equal(found[huge], state[huge])
    with pytest.raises(ck.UnsupportedStateError, match=r"state\[<int>\]"):
        ckpt.save(2, {huge: object()})
    with pytest.raises(ck.StateMismatchError, match=r"<int>: shape \(3,\)"):
        ckpt.restore({huge: torch.zeros(3)})
    with ck.open_checkpoint(ckpt.root) as c:
        assert c.keys() == ["<int>", "<tuple>.0"]
        assert c.load()["value"] == huge


# --- the directory -------------------------------------------------------------------------------


def test_a_copied_checkpoint_is_a_checkpoint(ckpt: ck.Checkpointer, tmp_path: Path) -> None:
    ckpt.save(1, state_at(1))
    copy = tmp_path / "elsewhere" / "step-0000000001"
    shutil.copytree(step_path(ckpt.root, 1), copy)
    shutil.copytree(copy, tmp_path / "best model")
    shutil.rmtree(ckpt.root)
    assert ck.verify(copy).ok
    with ck.open_checkpoint(tmp_path / "best model") as c:
        assert same(c.load(), state_at(1))
    with ck.Checkpointer(copy.parent, config=SMALL) as other:
        state, info = restored(other)
        assert same(state, state_at(1))
        assert info.path == str(copy)
        assert AttemptId.parse(other.save(2, state_at(2)).attempt).run.life == 2


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Take away write permission, also from root."""
    for directory, _, files in os.walk(path):
        for name in files:
            os.chmod(os.path.join(directory, name), 0o444)
        os.chmod(directory, 0o555)
    try:
        with modes_bind_root():
            yield
    finally:
        for directory, _, _ in os.walk(path):
            os.chmod(directory, 0o755)


def test_a_root_that_cannot_be_written_to_can_be_restored_from(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with ck.Checkpointer(root, config=SMALL) as ckpt:
        ckpt.save(1, state_at(1))
    with unwritable(root), ck.Checkpointer(root, config=SMALL) as ckpt:
        state, info = restored(ckpt)
        with ck.open_checkpoint(root) as c:
            assert same(c.load(), state_at(1))
        assert ck.verify(root).ok
        with pytest.raises(OSError, match="ermission"):
            (root / "probe").touch()
    assert same(state, state_at(1))
    assert info.step == 1


def test_a_step_that_is_a_link_is_passed_over_and_named(
    ckpt: ck.Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        newest = Path(ckpt.save(step, state_at(step)).path)
    newest.rename(tmp_path / "moved")
    newest.symlink_to(tmp_path / "moved")
    assert restored(ckpt)[1].step == 1
    assert f"{newest} is ignored: it is a symbolic link" in caplog.text
    shutil.rmtree(ckpt.root / Path("step-0000000001"))
    with pytest.raises(ck.CheckpointNotFoundError, match="step-0000000002 is ignored: it is a symbolic link"):
        restored(ckpt)


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ck.StorageError, match=r"a file of that name exists.*move the file away"):
        ck.Checkpointer(tmp_path / "file")


def test_a_relative_root_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ck.Checkpointer("run/checkpoints", config=SMALL) as ckpt:
        monkeypatch.chdir("/")
        ckpt.save(1, state_at(1))
        assert restored(ckpt)[1].step == 1
    assert step_path(tmp_path / "run/checkpoints", 1).is_dir()


# --- failures ------------------------------------------------------------------------------------


def kill_while_saving(ckpt: ck.Checkpointer, step: int) -> ck.SaveHandle:
    """A save whose writer is killed when it has been given it and before it has written a byte."""
    has_it, give = threading.Event(), WriterProcess.async_save

    def giving(self: WriterProcess, task: bytes) -> None:
        give(self, task)
        has_it.set()

    with stopped_writer(ckpt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriterProcess, "async_save", giving)
        handle = ckpt.async_save(step, state_at(step))
        # A writer that has died before is replaced, and the save goes on.
        assert has_it.wait(60)
        assert ckpt.writer_pid is not None
        os.kill(ckpt.writer_pid, signal.SIGKILL)
    assert wait_until(handle.done)
    return handle


def test_a_failed_save_nobody_asked_about_is_raised_by_the_next_call(ckpt: ck.Checkpointer) -> None:
    kill_while_saving(ckpt, 1)
    with pytest.raises(ck.SaveFailedError, match=r"step 1: the writer process ended \(killed by SIGKILL\)"):
        ckpt.async_save(2, state_at(2))
    # Once.
    ckpt.wait()
    assert ckpt.save(3, state_at(3)).step == 3
    assert ckpt.steps() == [0, 3]


def test_wait_and_close_raise_the_failure_nobody_asked_about_once(tmp_path: Path) -> None:
    ckpt = ck.Checkpointer(tmp_path, config=SMALL)
    for end in (ckpt.wait, ckpt.close):
        kill_while_saving(ckpt, 1)
        with pytest.raises(ck.SaveFailedError, match="step 1"):
            end()
        end()


def test_a_failed_save_that_was_asked_about_is_not_raised_again(ckpt: ck.Checkpointer) -> None:
    handle = kill_while_saving(ckpt, 1)
    with pytest.raises(ck.SaveFailedError) as caught:
        handle.result()
    assert handle.exception() is caught.value
    assert handle.done()
    assert not handle.committed()
    assert caught.value.rank == 0
    assert "step=1 failed" in repr(handle)
    assert ckpt.save(2, state_at(2)).step == 2


def test_failures_can_be_logged_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ck.Checkpointer(tmp_path, config=ck.Config(block_nbytes=4096, on_error="warn")) as ckpt:
        with caplog.at_level(logging.WARNING, "ckptengine"):
            kill_while_saving(ckpt, 1)
        assert "step 1 is not saved" in caplog.text
        ckpt.async_save(2, state_at(2))
    assert ckpt.steps() == [0, 2]


def test_a_retry_saves_the_same_snapshot_after_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ck.Checkpointer(tmp_path, config=ck.Config(block_nbytes=4096, retries=1)) as ckpt:
        with caplog.at_level(logging.WARNING, "ckptengine"):
            handle = kill_while_saving(ckpt, 1)
        info = handle.result(60)
        assert AttemptId.parse(info.attempt).retry == 1
        assert "trying again" in caplog.text
        assert same(restored(ckpt)[0], state_at(1))
        assert ck.verify(tmp_path).ok


def test_a_writer_that_stalls_is_ended_and_its_save_fails(tmp_path: Path) -> None:
    with ck.Checkpointer(tmp_path, config=SMALL) as ckpt:
        ckpt.save(0, {})  # a writer that starts makes no progress either
    with ck.Checkpointer(tmp_path, config=ck.Config(block_nbytes=4096, stall_timeout_s=4)) as ckpt:
        with stopped_writer(ckpt):
            pid = ckpt.writer_pid
            handle = ckpt.async_save(1, state_at(1))
            with pytest.raises(ck.CommitTimeoutError, match="no progress for 4 s"):
                handle.result(30)
            assert not os.path.exists(f"/proc/{pid}")
        assert ckpt.steps() == [0]


def test_a_storage_that_hangs_does_not_hold_up_the_word_that_a_save_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator looks whether a writer that is gone had published, and that may hang, too."""
    answers = threading.Event()
    looked = threading.Event()

    def hang(*_: Any) -> None:
        looked.set()
        answers.wait(60)
        raise FileNotFoundError

    monkeypatch.setattr(giving_up, "read_manifest", hang)
    monkeypatch.setattr(giving_up, "LOOK_TIMEOUT_S", 0.2)
    try:
        with ck.Checkpointer(tmp_path, config=SMALL) as ckpt:
            handle = kill_while_saving(ckpt, 1)
            with pytest.raises(ck.SaveFailedError, match="SIGKILL"):
                handle.result(30)
            assert looked.is_set()
            assert not answers.is_set()
            assert ckpt.save(2, state_at(2)).step == 2
    finally:
        answers.set()


# --- the end -------------------------------------------------------------------------------------


def test_close_waits_for_the_saves_and_can_be_called_again(tmp_path: Path) -> None:
    ckpt = ck.Checkpointer(tmp_path, config=SMALL)
    handles = [ckpt.async_save(step, state_at(step)) for step in (1, 2)]
    ckpt.close()
    assert all(handle.committed() for handle in handles)
    ckpt.close()
    with ckpt:
        pass
    ckpt.wait()
    for use in (
        lambda: ckpt.async_save(3, {}),
        lambda: ckpt.save(3, {}),
        lambda: ckpt.restore({}),
    ):
        with pytest.raises(ck.CheckpointError, match="closed"):
            use()
    assert ckpt.steps() == [1, 2]
    assert ckpt.latest == 2


def test_leaving_by_an_exception_keeps_the_exception_and_the_save(tmp_path: Path) -> None:
    def train() -> None:
        with ck.Checkpointer(tmp_path, config=SMALL) as ckpt:
            handles.append(ckpt.async_save(1, state_at(1)))
            raise ZeroDivisionError

    handles: list[ck.SaveHandle] = []
    with pytest.raises(ZeroDivisionError):
        train()
    assert handles[0].committed()
    assert ck.verify(tmp_path).step == 1


def test_a_checkpointer_leaves_no_process_thread_or_descriptor_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptengine.monitor.WriterProcess", WriterProcess)

    def held() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = held()
    for step in (1, 2):
        with ck.Checkpointer(tmp_path, config=SMALL) as ckpt:
            ckpt.save(step, state_at(step))
            restored(ckpt)
            pid = ckpt.writer_pid
        del ckpt
        assert not os.path.exists(f"/proc/{pid}")
        # multiprocessing keeps a pipe to its resource tracker; its queues' threads end on their own.
        assert wait_until(lambda: held() <= (before[0], before[1] + 2)), (before, held())


def test_the_ten_lines_work_without_a_with_statement(tmp_path: Path) -> None:
    ckpt = ck.Checkpointer(str(tmp_path))
    state = {"w": torch.arange(3.0), "step": 4}
    assert ckpt.save(4, state).step == 4
    state["w"].zero_()
    assert ckpt.restore(state).step == 4
    assert state["w"].tolist() == [0.0, 1.0, 2.0]
    ckpt.close()
