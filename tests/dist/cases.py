"""What runs on every rank of `test_save_restore.py`: each function checks itself, together with the other
ranks."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.nn.parallel import DistributedDataParallel

import ckptengine as ck
from ckptengine import monitor
from ckptengine.adapters.state import flatten
from ckptengine.format.names import shard_filename
from ckptengine.format.shard import decode_header
from tests.adapters.fake import bits, same
from tests.adapters.sharded_cases import adamw, fsdp1, fsdp2, local_state, model, paired, train
from tests.helpers import writers
from tests.helpers.ranks import kept
from tests.helpers.trace_events import check, load, spans

WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp1, original parameters": fsdp1(True),
    "fsdp1, flat parameters": fsdp1(False),
    "fsdp2": fsdp2,
    "ddp": DistributedDataParallel,
}


def lend_writers() -> None:
    """From now on, this rank's Checkpointers pass one writer process on."""
    monitor.WriterProcess = writers.LentWriter  # type: ignore[misc,assignment]
    kept["leave"] = writers.end_all


def checkpointer(root: str | Path, **options: Any) -> ck.Checkpointer:
    group = options.pop("process_group", None)
    config = {"block_nbytes": 4096, "agree_timeout_s": 30.0, "commit_timeout_s": 60.0, **options}
    return ck.Checkpointer(root, config=ck.Config(**config), process_group=group)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def state_of(step: int, of_rank: int, *, values: int = 3000) -> dict[str, Any]:
    """What `of_rank` holds at `step`: nothing of it is the same on another rank or at another step."""
    generator = np.random.default_rng([step, of_rank])
    return {
        "weights": [torch.from_numpy(generator.standard_normal(values + of_rank)) for _ in range(3)],
        "name.with/odd characters": torch.from_numpy(generator.integers(0, 9, (3, 5))).to(torch.bfloat16),
        "array": generator.standard_normal((4, 3)),
        "step": step,
        "rank": of_rank,
        "note": [f"step {step}", (of_rank, None)],
    }


def target_of(of_rank: int, *, values: int = 3000) -> dict[str, Any]:
    return state_of(10**9, of_rank, values=values)


def save_steps(root: str, steps: list[int], options: dict[str, Any] | None = None) -> list[ck.CommitInfo]:
    with checkpointer(root, **(options or {})) as ckpt:
        return [ckpt.save(step, state_of(step, rank()), metadata={"step": step}) for step in steps]


def restore(root: str, step: int | None = None) -> ck.RestoreInfo:
    """Restore into a fresh target and compare it with what this rank saved."""
    target = target_of(rank())
    with checkpointer(root) as ckpt:
        info = ckpt.restore(target, step=step)
    assert same(target, state_of(info.step, rank()))
    return info


# --- state ---------------------------------------------------------------------------------------


def figures_of_all_ranks(root: str) -> None:
    """Every rank hears of the slowest, and the coordinator of all."""
    with checkpointer(root) as ckpt:
        ckpt.save(1, state_of(1, rank()))
        info = ckpt.restore(target_of(rank()))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (info.phases, info.slowest, info.ranks))
    assert [len(ranks) for _, _, ranks in told] == [dist.get_world_size(), *[0] * (dist.get_world_size() - 1)]
    of_all = told[0][2]
    assert all(slowest == max(of_all, key=lambda one: one.seconds) for _, slowest, _ in told)
    for number, (phases, _, _) in enumerate(told):
        assert of_all[number].rank == number
        # What was sent is what the rank itself has, but for the wait that came after.
        assert of_all[number].phases.read == phases.read
        assert of_all[number].phases.apply == phases.apply
        assert of_all[number].phases.agree.seconds <= phases.agree.seconds


def traced_ranks(root: str) -> None:
    """Each rank's trainer and writer leave a trace, and the waits for one another are in it."""
    directory = Path(root).parent / "trace"
    with checkpointer(root, trace=str(directory)) as ckpt:
        ckpt.save(1, state_of(1, rank()))
        ckpt.restore(target_of(rank()))
    deadline = time.monotonic() + 30
    mine: list[Path] = []
    while len(mine) < 2:
        assert time.monotonic() < deadline, mine
        mine = [path for path in directory.iterdir() if path.name.startswith(f"rank-{rank():05d}-")]
    assert sorted(path.name.split("-")[2] for path in mine) == ["trainer", "writer"]
    events = {path.name.split("-")[2]: load(path) for path in mine}
    while not spans(events["writer"], "save"):  # which ends after its outcome is known
        assert time.monotonic() < deadline
        events = {path.name.split("-")[2]: load(path) for path in mine}
    for of_process in events.values():
        check(of_process)
    while_ = {event["args"]["while"] for event in spans(events["trainer"], "wait for all ranks")}
    assert "reading the shards" in while_
    waited_for = {event["args"]["for"] for event in spans(events["writer"], "wait for ranks")}
    assert waited_for == ({"receipt/1"} if rank() == 0 else {"ready", "outcome"})


def own_tensors_values_and_rng(root: str) -> None:
    """With the random number generators' state, and as the state was at the call."""

    def rng() -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    torch.manual_seed(rank()), np.random.seed(rank()), random.seed(rank())
    draw()
    state = {**state_of(1, rank()), "rng": rng()}
    with checkpointer(root) as ckpt:
        handle = ckpt.async_save(1, state)
        state["weights"][0].zero_()
        state["array"][:] = 0
        state["note"].append("late")
        expected = draw()
        handle.result()
        random.seed(99), torch.manual_seed(99), np.random.seed(99)
        target = {**target_of(rank()), "rng": rng()}
        ckpt.restore(target)
    back = target.pop("rng")
    torch.set_rng_state(back["torch"]), np.random.set_state(back["numpy"]), random.setstate(back["python"])
    assert draw() == expected
    assert same(target, state_of(1, rank()))


def training(root: str, wrap: str, codec: str) -> None:
    """Train, save while training goes on, restore into a new model with a new optimizer, and go on alike."""
    make = WRAPS[wrap]
    module = make(model(1))
    optimizer = adamw(module)
    train(module, optimizer)
    expected = local_state(module, optimizer)
    with checkpointer(root, codec=codec) as ckpt:
        handle = ckpt.async_save(5, paired(module, optimizer))
        loss = train(module, optimizer, 1)
        after = local_state(module, optimizer)
        assert after != expected
        handle.result()
        again = make(model(2))
        other = adamw(again)
        assert ckpt.restore(paired(again, other)).step == 5
    assert local_state(again, other) == expected
    assert train(again, other, 1) == loss
    assert local_state(again, other) == after


def save_replicas(root: str, steps: list[int]) -> None:
    """What all ranks hold alike is written by one of them, by bytes."""
    module = DistributedDataParallel(model(1))
    optimizer = adamw(module)
    with checkpointer(root) as ckpt:
        for step in steps:
            train(module, optimizer, 1)
            ckpt.save(step, paired(module, optimizer))
            kept[f"replicas {step}"] = local_state(module, optimizer)


def restore_replicas(root: str) -> ck.RestoreInfo:
    module = DistributedDataParallel(model(2))
    optimizer = adamw(module)
    with checkpointer(root) as ckpt:
        info = ckpt.restore(paired(module, optimizer))
    assert local_state(module, optimizer) == kept[f"replicas {info.step}"]
    return info


def local_state_dicts(root: str) -> None:
    """FSDP1's LOCAL_STATE_DICT as torch returns it: ShardedTensors of flat parameters."""
    for number, use_orig_params in enumerate((True, False)):
        source, target = (_local_state_dict(seed, use_orig_params) for seed in (1, 2))
        assert any(hasattr(value, "local_shards") for value in source.values())
        before = _local_bits(target)
        with checkpointer(root) as ckpt:
            ckpt.save(number, {"model": source})
            ckpt.restore({"model": target})
        assert before != _local_bits(source) == _local_bits(target)


def _local_state_dict(seed: int, use_orig_params: bool) -> dict[str, Any]:
    module = fsdp1(use_orig_params)(model(seed))
    with FSDP.state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
        return dict(module.state_dict())


def _local_bits(state: dict[str, Any]) -> dict[str, bytes]:
    return {
        name: b"".join(bits(shard.tensor) for shard in value.local_shards())
        if hasattr(value, "local_shards")
        else bits(value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) or hasattr(value, "local_shards")
    }


def raw_shards_are_safetensors(root: str) -> int:
    """`safe_open` reads each tensor of this rank's shard, equal to the source."""
    read = 0
    for step, name in enumerate(WRAPS):
        module = WRAPS[name](model(1))
        optimizer = adamw(module)
        train(module, optimizer)
        read += _compare_with_safetensors(root, step, paired(module, optimizer))
    read += _compare_with_safetensors(root, 10, {"model": _local_state_dict(1, False)})
    read += _compare_with_safetensors(root, 11, state_of(1, rank()))
    return read


def _compare_with_safetensors(root: str, step: int, state: Any) -> int:
    with checkpointer(root) as ckpt:
        info = ckpt.save(step, state)
    path = os.path.join(info.path, info.attempt, shard_filename(rank(), compressed=False))
    sources = {item.name: item.source for item in flatten(state).items}
    with open(path, "rb") as file:
        # An 8-byte length, then the JSON: what `safe_open` reads, too.
        prefix = file.read(8)
        header = decode_header(prefix + file.read(int.from_bytes(prefix, "little")), path=path)
    with safe_open(path, framework="pt") as opened:
        names = {name for name in opened.keys() if not name.startswith("__pad__.")}  # noqa: SIM118
        assert names == set(sources) - set(header.replicas)
        assert names
        for name in names:
            source, found = sources[name], opened.get_tensor(name)
            if isinstance(source, torch.Tensor):
                assert found.dtype == source.dtype or found.dtype == torch.uint8
                assert bits(found) == bits(source), name
            else:
                assert bits(found) == bytes(source), name
    return len(names)


# --- the ranks decide together -------------------------------------------------------------------


def restore_raises(root: str, step: int | None = None) -> None:
    with checkpointer(root) as ckpt:
        ckpt.restore(target_of(rank()), step=step)


def restore_into_another_shape_on(odd: int, root: str) -> bytes:
    """A target that differs on rank `odd` only; returns the bits of the target afterwards."""
    target = target_of(rank())
    if rank() == odd:
        target["weights"][1] = torch.zeros(7)
        target["more"] = torch.zeros(2)
        del target["array"]
    before = [bits(tensor) for tensor in target["weights"]]
    with checkpointer(root) as ckpt, pytest.raises(ck.StateMismatchError) as caught:
        ckpt.restore(target)
    assert [bits(tensor) for tensor in target["weights"]] == before
    assert target["step"] == 10**9
    assert caught.value.rank == odd
    text = str(caught.value)
    assert caught.value.missing == ("more",)
    assert caught.value.unexpected == ("array",)
    assert len(caught.value.mismatched) == 1
    assert "weights" in caught.value.mismatched[0]
    return text.encode()


def restore_what_is_there(root: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`strict=False`, with keys on one side only."""
    target = target_of(rank())
    target["more"] = torch.ones(2)
    del target["array"]
    with checkpointer(root) as ckpt:
        info = ckpt.restore(target, strict=False)
    assert same(target.pop("more"), torch.ones(2))
    expected = state_of(info.step, rank())
    del expected["array"]
    assert same(target, expected)
    return info.missing, info.unexpected


def two_saves_under_way(root: str) -> tuple[list[int], int | None]:
    """Later saves do not wait for earlier ones; retention keeps the last two."""
    with checkpointer(root, keep_last=2) as ckpt:
        handles = [ckpt.async_save(step, state_of(step, rank())) for step in range(1, 6)]
        infos = [handle.result() for handle in handles]
        assert [info.step for info in infos] == [1, 2, 3, 4, 5]
        ckpt.wait(30)
        # What is listed may still be being deleted when the last save has committed.
        dist.barrier()
        return ckpt.steps()[-2:], ckpt.latest


def restore_an_older_step(root: str) -> None:
    save_steps(root, [1, 2, 3])
    assert restore(root, step=2).step == 2
    assert restore(root).step == 3


# --- groups --------------------------------------------------------------------------------------


def keys_after_saves(root: str) -> list[int]:
    """How many keys the job's store holds after a few saves and restores, and after more of them."""
    found = []
    with checkpointer(root) as ckpt:
        for step in range(1, 13):
            ckpt.save(step, state_of(step, rank()))
            ckpt.restore(target_of(rank()))
            if step % 4 == 0:
                dist.barrier()
                found.append(_job_store().num_keys())
                dist.barrier()
    return found


def _job_store() -> Any:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def make_the_group_anew(root: str) -> None:
    """As after a restart in the process: another process group over the same store."""
    save_steps(root, [1])
    store, me, size = _job_store(), rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("anew", store), rank=me, world_size=size)
    assert restore(root).step == 1
    save_steps(root, [2])


def sub_group_then_all(root: str) -> tuple[int, int] | None:
    """Ranks 0 and 2 save together, then all three: ranks that were in different groups still agree."""
    group = dist.new_group([0, 2])
    found = None
    if rank() == 1:
        with pytest.raises(ValueError, match="not a member"):
            checkpointer(f"{root}/sub", process_group=group)
    else:
        with checkpointer(f"{root}/sub", process_group=group) as ckpt:
            found = (ckpt.rank, ckpt.world_size)
            ckpt.save(1, state_of(1, rank()))
            target = target_of(rank())
            ckpt.restore(target)
        assert same(target, state_of(1, rank()))
    save_steps(f"{root}/all", [2])
    restore(f"{root}/all")
    return found


# --- setting up ----------------------------------------------------------------------------------


def open_only(root: str, options: dict[str, Any] | None = None) -> None:
    checkpointer(root, **(options or {})).close()


def open_with_another_codec_on_rank_1(root: str) -> None:
    checkpointer(root, codec="zstd" if rank() == 1 else "raw").close()


def open_where_rank_1_sees_nothing(root: str) -> None:
    """As when the file system is not mounted on that rank's node."""
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(os.path, "isdir", lambda path: False)
        checkpointer(root).close()


def late_coordinator(root: str) -> tuple[str, str]:
    """Ids of two runs over one store; in the second the coordinator comes last."""
    with checkpointer(root) as first:
        one = str(first._run.run)
    if rank() == 0:
        time.sleep(0.5)
    with checkpointer(root) as second:
        return one, str(second._run.run)


def save_ddp(root: str) -> tuple[int, int]:
    """Bytes of all shard files, and of what the ranks' models and optimizers hold, each once."""
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 7)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 200)).sum().backward()
    optimizer.step()
    with checkpointer(root) as ckpt:
        info = ckpt.save(1, {"train": ck.training_state(model, optimizer), "own": torch.full((5,), rank())})
    once = sum(3 * p.numel() * p.element_size() + 4 for p in model.parameters())
    return info.nbytes, once
