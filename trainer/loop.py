"""What one run does: build, resume, train, save, and say how it went."""

from __future__ import annotations

import logging
import math
import os
import time
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

import ckptengine as ck
from trainer.config import TrainConfig
from trainer.data import Loader, read_corpus
from trainer.digest import final_digests, write_final
from trainer.events import EventLog
from trainer.faults import KillPlan, current_life
from trainer.model import ByteLlama
from trainer.parallel import World, clip_gradients, distribute, join, leave, mean_over_ranks
from trainer.rng import RngState, rank_seed, seed_everything
from trainer.saves import Saves

logger = logging.getLogger("trainer")

RNG_POLICY: dict[str, Literal["drop", "rank0"]] = {"reseed": "drop", "rank0": "rank0"}


def learning_rate_factor(step: int, *, warmup_steps: int, steps: int) -> float:
    """Linear warm-up to 1, then a cosine down to a tenth at the last step."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))


class Run:
    """The parts of one rank's run, and the state that a checkpoint of it holds."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        # One seed for all ranks while the parameters are made, so that the shards are of the same model; then
        # each rank its own, so that dropout and noise differ.
        seed_everything(config.seed)
        model = ByteLlama(config.model_config())
        self.n_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model: nn.Module = distribute(model, config.fsdp, world)
        seed_everything(rank_seed(config.seed, world.rank))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: learning_rate_factor(step, warmup_steps=config.warmup_steps, steps=config.steps),
        )
        batch_size = config.batch_size
        if batch_size % world.size:
            raise SystemExit(
                f"trainer: error: --batch-size {batch_size} does not split evenly over {world.size} ranks"
            )
        self.loader = Loader(
            read_corpus(config.corpus_mib << 20),
            seq_len=config.seq_len,
            batch_size=batch_size,
            rank=world.rank,
            world_size=world.size,
            seed=config.seed,
            noise=config.noise,
        )
        self.state: dict[str, Any] = {
            "train": ck.training_state(self.model, self.optimizer),
            "scheduler": self.scheduler,
            "loader": self.loader,
            "rng": RngState(),
            "step": 0,
        }

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def train_step(self) -> float:
        """One optimizer step on the next batch; returns this rank's loss."""
        inputs, targets = self.loader.next_batch()
        logits = self.model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        if self.config.grad_clip is not None:
            clip_gradients(self.model, self.config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self.state["step"] = self.step + 1
        return float(loss.detach())


def resume(run: Run, checkpointer: ck.Checkpointer, events: EventLog) -> ck.RestoreHandle | None:
    """Continue from the newest committed checkpoint; from scratch only where there is none.

    Returns what is still under way, with `config.streaming_restore`; `resumed` tells of it when it has ended.
    Every other error ends the run: to start over because a checkpoint could not be read would hide it.
    """
    try:
        per_rank: dict[str, Any] = {"rng": RNG_POLICY[run.config.resize_rng]}
        if run.config.streaming_restore:
            handle = checkpointer.restore(run.state, per_rank=per_rank, streaming=True)
            _resized(run, handle)
            return handle
        info = checkpointer.restore(run.state, per_rank=per_rank)
    except ck.CheckpointNotFoundError:
        logger.info("no checkpoint under %s: starting from scratch", run.config.root)
        events.write("scratch")
        return None
    _resized(run, info)
    resumed(info, events)
    return None


def resumed(info: ck.RestoreInfo, events: EventLog) -> None:
    """Tell of a restore."""
    for damaged in info.fell_back_from:
        logger.warning("step %d could not be restored and was passed over: %s", damaged.step, damaged.reason)
    logger.info(
        "resumed from step %d: %.1f MiB for this rank in %.3f s", info.step, info.nbytes / 2**20, info.seconds
    )
    events.write(
        "resume",
        step=info.step,
        nbytes=info.nbytes,
        seconds=info.seconds,
        read_seconds=info.read_seconds,
        from_cache_nbytes=info.from_cache_nbytes,
        fell_back_from=[damaged.step for damaged in info.fell_back_from],
        saved_by=info.world_size,
    )


def _resized(run: Run, info: ck.RestoreInfo | ck.RestoreHandle) -> None:
    """Where another number of ranks has saved it, say so, and what becomes of their random generators."""
    config, world = run.config, run.world
    if info.world_size == world.size:
        return
    logger.info("step %d was saved by %d ranks, now there are %d", info.step, info.world_size, world.size)
    if config.resize_rng == "reseed":
        seed_everything(rank_seed(config.seed, world.rank, info.step))
    what = {"reseed": "seeded anew on each rank", "rank0": "rank 0's on all ranks"}[config.resize_rng]
    logger.info("the random generators are %s (--resize-rng %s)", what, config.resize_rng)


def train(config: TrainConfig) -> None:
    """Run until `config.steps`, as this process's rank."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    world, life = join(config.fsdp, config.dist_timeout_s), current_life()
    if world.rank:
        logger.setLevel(logging.WARNING)
    events = EventLog(config.events, rank=world.rank, life=life)
    events.write("start", pid=os.getpid(), world_size=world.size, fsdp=config.fsdp)
    run = Run(config, world)
    logger.info(
        "life %d: %s parameters, %d ranks, fsdp %s, steps to %d, saves every %d under %s",
        life, f"{run.n_parameters:,}", world.size, config.fsdp, config.steps,
        config.save_every, config.root,
    )  # fmt: skip
    engine = ck.Config(
        codec=config.codec,
        keep_last=config.keep_last,
        snapshot=config.snapshot,
        commit_timeout_s=config.commit_timeout_s,
    )
    with ck.Checkpointer(config.root, config=engine) as checkpointer:
        restoring = resume(run, checkpointer, events)
        saves = Saves(checkpointer, events)
        _steps(run, saves, events, life, restoring)
        saves.finish()
    events.write("finish", step=run.step)
    if config.final_dir is not None:
        write_final(
            config.final_dir, world.rank, {"step": run.step, **final_digests(run.model, run.optimizer)}
        )
    logger.info("finished at step %d", run.step)
    events.close()
    leave(world)


def _steps(run: Run, saves: Saves, events: EventLog, life: int, restoring: ck.RestoreHandle | None) -> None:
    config, world = run.config, run.world
    kill = None
    if config.kill_rank is not None and config.kill_step is not None:
        kill = KillPlan(config.kill_rank, config.kill_step, config.kill_once_file)
    run.model.train()
    since, tokens = time.perf_counter(), 0
    while run.step < config.steps:
        loss = run.train_step()
        if restoring is not None:  # the step of the optimizer has waited for it
            resumed(restoring.result(), events)
            restoring = None
        step = run.step
        tokens += config.batch_size * config.seq_len
        events.write("step", step=step, loss=loss)
        if step == config.steps or (config.save_every and step % config.save_every == 0):
            saves.start(step, run.state, {"fsdp": config.fsdp, "seed": config.seed})
        saves.poll()
        if step % config.log_every == 0 or step == config.steps:
            mean = mean_over_ranks(loss, world)
            now = time.perf_counter()
            logger.info(
                "step %5d  loss %.4f  lr %.2e  %s tok/s",
                step, mean, run.scheduler.get_last_lr()[0], f"{tokens / (now - since):,.0f}",
            )  # fmt: skip
            since, tokens = now, 0
        if kill is not None and kill.is_due(rank=world.rank, step=step, life=life):
            if config.kill_after_commit:
                saves.finish()
            events.write("kill", step=step)
            kill.strike()
    if restoring is not None:  # it was of the last step
        resumed(restoring.result(), events)
