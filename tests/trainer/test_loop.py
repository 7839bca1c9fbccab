"""One rank's run resumes exactly, starts from scratch only where nothing was, and never hides an error."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import ckptengine as ck
from trainer.config import TrainConfig
from trainer.digest import final_digests
from trainer.events import EventLog, read_events
from trainer.loop import Run, learning_rate_factor, resume, train
from trainer.parallel import World, join

TINY: dict[str, Any] = {
    "steps": 6, "save_every": 2, "dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 24,
    "seq_len": 16, "corpus_mib": 1, "dropout": 0.2, "noise": 0.1, "grad_clip": 1.0, "warmup_steps": 2,
}  # fmt: skip
ALONE = World(0, 1)


def config(root: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(root=str(root), **{**TINY, **changes})


def trained(run: Run, steps: int) -> dict[str, str]:
    while run.step < steps:
        run.train_step()
    return final_digests(run.model, run.optimizer)


def test_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    factors = [learning_rate_factor(step, warmup_steps=4, steps=20) for step in range(21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[20] == pytest.approx(0.1)


def test_two_runs_of_one_seed_are_equal_and_of_another_are_not(tmp_path: Path) -> None:
    first = trained(Run(config(tmp_path), ALONE), 3)
    assert first == trained(Run(config(tmp_path), ALONE), 3)
    assert first["parameters"] != trained(Run(config(tmp_path, seed=1), ALONE), 3)["parameters"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_restored_run_ends_like_an_uninterrupted_one(tmp_path: Path, tied: bool, streaming: bool) -> None:
    whole = Run(config(tmp_path, tied_head=tied), ALONE)
    trained(whole, 3)
    with ck.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, whole.state)
        expected = trained(whole, 6)
        # Another seed, and steps of its own: nothing of what it had may be left.
        resumed = Run(config(tmp_path, tied_head=tied), ALONE)
        trained(resumed, 2)
        assert checkpointer.restore(resumed.state, streaming=streaming).step == 3  # type: ignore[call-overload]
        assert resumed.step == 3
        assert trained(resumed, 6) == expected


@pytest.mark.parametrize("left_out", ["rng", "loader", "scheduler"])
def test_each_part_of_the_state_is_needed(tmp_path: Path, left_out: str) -> None:
    whole = Run(config(tmp_path), ALONE)
    trained(whole, 3)
    with ck.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, whole.state)
        expected = trained(whole, 6)
        resumed = Run(config(tmp_path), ALONE)
        target = {key: value for key, value in resumed.state.items() if key != left_out}
        checkpointer.restore(target, strict=False)
        resumed.state["step"] = target["step"]
    assert trained(resumed, 6) != expected


@pytest.mark.parametrize("streaming", [False, True])
def test_train_resumes_by_default_and_writes_what_happened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    events = tmp_path / "events"
    caplog.set_level(logging.INFO, "trainer")
    train(config(tmp_path / "root", steps=3, events=str(events)))
    more = {"events": str(events), "final_dir": str(tmp_path), "streaming_restore": streaming}
    train(config(tmp_path / "root", **more))
    assert "starting from scratch" in caplog.text
    assert "resumed from step 3" in caplog.text
    kinds = [event["event"] for event in read_events(events)]
    assert kinds.count("scratch") == kinds.count("resume") == 1
    assert [e["step"] for e in read_events(events) if e["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for e in read_events(events) if e["event"] == "save_committed"] == [2, 3, 4, 6]
    assert (tmp_path / "final-rank0.json").exists()


def test_only_a_missing_checkpoint_means_from_scratch(tmp_path: Path) -> None:
    class Broken:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def restore(self, state: Any, **options: Any) -> Any:
            raise self.error

    log = EventLog(str(tmp_path / "events"), rank=0, life=0)
    run = Run(config(tmp_path), ALONE)
    resume(run, Broken(ck.CheckpointNotFoundError("nothing")), log)  # type: ignore[arg-type]
    for error in (
        ck.CorruptCheckpointError("bits"),
        ck.NotCommittedError("no manifest"),
        ck.UnsupportedFormatError("version 9"),
        ck.StateMismatchError("shapes"),
        ck.StorageError("EIO"),
        FileNotFoundError("not the engine's"),
    ):
        with pytest.raises(type(error)):
            resume(run, Broken(error), log)  # type: ignore[arg-type]


@pytest.mark.parametrize("fsdp", ["1", "2"])
def test_sharding_alone_says_how_to_start_it(fsdp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(
        SystemExit, match=rf"--fsdp {fsdp} shards over two ranks or more; start it with\s+torchrun"
    ):
        join(fsdp, 1.0)
