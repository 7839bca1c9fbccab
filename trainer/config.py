"""What a run of the trainer is: one frozen value, from the command line, checked as a whole."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

DESCRIPTION = """\
Train a small Llama-like model on the bytes of Python's standard library, checkpointing with ckptengine.

A run continues from the newest committed checkpoint under --root; from scratch only if there is none.
With several ranks, start it with torchrun:

  torchrun --standalone --nproc-per-node 2 --max-restarts 2 -m trainer --root runs/first --fsdp 2
"""


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the model: `n_heads` heads of even size make up `dim`, and share `n_kv_heads` keys, values."""

    vocab_size: int = 256
    dim: int = 256
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 4
    ffn_dim: int = 704
    seq_len: int = 128
    dropout: float = 0.0
    tied_head: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        problems = []
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "seq_len"):
            if getattr(self, name) < 1:
                problems.append(f"{flag(name)} must be at least 1, not {getattr(self, name)}")
        if not problems:
            if self.dim % self.n_heads or (self.dim // self.n_heads) % 2:
                problems.append(
                    f"--dim must split into --n-heads heads of even size, not {self.dim} into {self.n_heads}"
                )
            if self.n_heads % self.n_kv_heads:
                problems.append(
                    f"--n-heads must be a multiple of --n-kv-heads, not {self.n_heads} of {self.n_kv_heads}"
                )
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"--dropout must be in [0, 1), not {self.dropout}")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


def _option(default: Any, text: str, group: str, metavar: str | None = None) -> Any:
    extra = {"help": text, "group": group, "metavar": metavar}
    if default is dataclasses.MISSING:
        return field(metadata=extra)
    return field(default=default, metadata=extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run. Each field is a flag of the same name, with dashes; its help text says what it means."""

    root: str = _option(dataclasses.MISSING, "folder of the run's checkpoints", "run", "DIR")
    fsdp: Literal["none", "1", "2"] = _option(
        "none",
        "how the model is sharded: FSDP1 (saved as LOCAL_STATE_DICT), FSDP2 (fully_shard), or not at all "
        "(with several ranks: DDP)",
        "run",
    )
    steps: int = _option(60, "train up to this step", "run", "N")
    seed: int = _option(0, "seed of initialisation, data order and dropout", "run", "N")
    dist_timeout_s: float = _option(
        120.0, "how long a rank waits for the others in a collective", "run", "SECONDS"
    )

    dim: int = _option(256, "width of the model", "model", "N")
    n_layers: int = _option(4, "decoder layers", "model", "N")
    n_heads: int = _option(4, "attention heads", "model", "N")
    n_kv_heads: int = _option(
        4, "heads of keys and values, shared by groups of attention heads", "model", "N"
    )
    ffn_dim: int = _option(704, "width of the feed-forward layers", "model", "N")
    seq_len: int = _option(128, "bytes in one sequence", "model", "N")
    dropout: float = _option(0.0, "dropout after attention and feed-forward", "model", "P")
    tied_head: bool = _option(False, "use the embedding's weight for the output layer", "model")

    batch_size: int = _option(
        4,
        "sequences per step, of all ranks together: it must split evenly over them, and stays what it is on "
        "another number of ranks",
        "training",
        "N",
    )
    lr: float = _option(1e-3, "peak learning rate of AdamW", "training", "X")
    warmup_steps: int = _option(
        10, "steps of linear warm-up, before a cosine decay to a tenth", "training", "N"
    )
    weight_decay: float = _option(0.1, "AdamW's weight decay", "training", "X")
    grad_clip: float | None = _option(
        None, "clip the gradients' norm to this (default: no clipping)", "training", "X"
    )
    corpus_mib: int = _option(
        8, "read at most this much of the standard library's sources", "training", "MIB"
    )
    noise: float = _option(0.0, "replace this share of the input bytes at random", "training", "P")

    save_every: int = _option(
        10, "save every N steps, and after the last; 0: only after the last", "checkpoints", "N"
    )
    keep_last: int | None = _option(
        None, "keep only the newest N checkpoints (default: all)", "checkpoints", "N"
    )
    codec: Literal["raw", "zstd", "auto"] = _option(
        "raw", "store shards as they are, compressed, or compressed where that is faster", "checkpoints"
    )
    snapshot: Literal["copy", "overlap"] = _option(
        "copy",
        "copy the state before training goes on, or meanwhile, while optimizer steps wait for it",
        "checkpoints",
    )
    resize_rng: Literal["reseed", "rank0"] = _option(
        "reseed",
        "what another number of ranks does that cannot go on with the random generators of those that saved: "
        "seed them anew, from seed, rank and step, or take rank 0's on all",
        "checkpoints",
    )
    streaming_restore: bool = _option(
        False,
        "begin to train while the state is still being read; the first optimizer step waits for all of it",
        "checkpoints",
    )
    commit_timeout_s: float = _option(
        300.0, "fail a save that is not committed by then", "checkpoints", "SECONDS"
    )

    log_every: int = _option(5, "log a line every N steps", "output", "N")
    events: str | None = _option(None, "append what happens, as JSON lines, to this file", "output", "PATH")
    final_dir: str | None = _option(
        None, "write final-rank<r>.json there: digests of all parameters and optimizer state", "output", "DIR"
    )

    kill_rank: int | None = _option(None, "SIGKILL the process of this rank ...", "faults", "R")
    kill_step: int | None = _option(None, "... after this step, in the job's first life only", "faults", "S")
    kill_after_commit: bool = _option(
        False,
        "... once the saves requested so far are committed, so that the kill falls between two checkpoints",
        "faults",
    )
    kill_once_file: str | None = _option(
        None,
        "instead of in the first life, kill while this file does not exist; it is then made",
        "faults",
        "PATH",
    )

    def __post_init__(self) -> None:
        problems = []
        if not self.root:
            problems.append("--root must not be empty")
        for name in ("steps", "batch_size", "corpus_mib", "log_every"):
            if getattr(self, name) < 1:
                problems.append(f"{flag(name)} must be at least 1, not {getattr(self, name)}")
        for name in ("seed", "warmup_steps", "save_every", "weight_decay"):
            if getattr(self, name) < 0:
                problems.append(f"{flag(name)} must not be negative, not {getattr(self, name)}")
        for name in ("dist_timeout_s", "commit_timeout_s", "lr"):
            if not getattr(self, name) > 0:
                problems.append(f"{flag(name)} must be positive, not {getattr(self, name)}")
        if not 0.0 <= self.noise < 1.0:
            problems.append(f"--noise must be in [0, 1), not {self.noise}")
        if self.grad_clip is not None and not self.grad_clip > 0:
            problems.append(f"--grad-clip must be positive, not {self.grad_clip}")
        if self.keep_last is not None and self.keep_last < 1:
            problems.append(f"--keep-last must be at least 1, not {self.keep_last}")
        if (self.kill_rank is None) != (self.kill_step is None):
            problems.append(
                "--kill-rank and --kill-step go together: one names the process, the other the moment"
            )
        if (self.kill_once_file is not None or self.kill_after_commit) and self.kill_rank is None:
            problems.append("--kill-once-file and --kill-after-commit need --kill-rank and --kill-step")
        if self.kill_step is not None and not 1 <= self.kill_step <= self.steps:
            problems.append(
                f"--kill-step must be a step of the run, in [1, {self.steps}], not {self.kill_step}"
            )
        try:
            self.model_config()
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError("; ".join(problems))

    def model_config(self) -> ModelConfig:
        return ModelConfig(
            dim=self.dim,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            ffn_dim=self.ffn_dim,
            seq_len=self.seq_len,
            dropout=self.dropout,
            tied_head=self.tied_head,
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse prints the whole usage first, a screen of it here, and the message drowns.
        self.exit(2, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m trainer",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    hints = get_type_hints(TrainConfig)
    groups: dict[str, Any] = {}
    for item in dataclasses.fields(TrainConfig):
        extra = item.metadata
        if extra["group"] not in groups:
            groups[extra["group"]] = parser.add_argument_group(extra["group"])
        group = groups[extra["group"]]
        required = item.default is dataclasses.MISSING
        default = None if required else item.default
        text = extra["help"]
        if default is not None and default is not False:
            text += f" (default: {default})"
        kind = _plain(hints[item.name])
        if kind is bool:
            group.add_argument(
                flag(item.name), action=argparse.BooleanOptionalAction, default=default, help=text
            )
        elif get_origin(kind) is Literal:
            group.add_argument(flag(item.name), choices=get_args(kind), default=default, help=text)
        else:
            group.add_argument(
                flag(item.name),
                type=kind,
                default=default,
                required=required,
                help=text,
                metavar=extra["metavar"],
            )
    return parser


def _plain(hint: Any) -> Any:
    """The type a flag's text is turned into: `int` for `int | None`."""
    if get_origin(hint) is types.UnionType:
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint


def parse_config(argv: Sequence[str] | None = None) -> TrainConfig:
    """The run that the command line asks for; on a mistake, exit with code 2 and one line that names it."""
    parser = make_parser()
    values = vars(parser.parse_args(argv))
    try:
        return TrainConfig(**values)
    except ValueError as error:
        parser.error(str(error))
