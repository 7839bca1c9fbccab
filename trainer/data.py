"""What the model reads: the standard library's sources as bytes, in an order that can be resumed."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]


def _sources(folder: Path) -> Iterator[Path]:
    """The .py files below a folder, in the order of their names, without installed packages."""
    for entry in sorted(folder.iterdir(), key=lambda path: path.name):
        if entry.is_dir() and not entry.is_symlink():
            if entry.name not in ("site-packages", "dist-packages", "__pycache__"):
                yield from _sources(entry)
        elif entry.suffix == ".py" and entry.is_file():
            yield entry


def read_corpus(limit_nbytes: int, folder: Path | None = None) -> Bytes:
    """The first `limit_nbytes` bytes of the sorted sources below `folder` (default: the standard library)."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    parts: list[bytes] = []
    nbytes = 0
    for source in _sources(folder):
        parts.append(source.read_bytes())
        nbytes += len(parts[-1])
        if nbytes >= limit_nbytes:
            break
    if not nbytes:
        raise ValueError(f"no Python sources under {folder}")
    return np.frombuffer(b"".join(parts)[:limit_nbytes], dtype=np.uint8)


class DataChangedError(ValueError):
    """A checkpoint's position was counted over other data than this run reads."""


class Loader:
    """One rank's share of each batch, in an order that only the seed and the position decide.

    The corpus is cut into windows of `seq_len` bytes and the byte that follows; each epoch visits them all in
    its own shuffled order. The batch of a step is the next `batch_size` windows of that order, whatever the
    number of ranks, and each rank takes its slice. Only the position is saved: how many windows all ranks
    together have read. So a restored loader continues exactly, and so do the loaders of another number of
    ranks together: no window is left out, and none is read twice.

    `noise` is the share of input bytes replaced at random; it draws from the global generators of numpy and
    random, as augmentations do, so that a resume which forgets those is found out.
    """

    def __init__(
        self,
        corpus: Bytes,
        *,
        seq_len: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        noise: float = 0.0,
    ) -> None:
        self.corpus = corpus
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.noise = noise
        self.n_windows = (len(corpus) - 1) // seq_len
        if batch_size % world_size:
            raise ValueError(f"{batch_size} sequences do not split evenly over {world_size} ranks")
        if self.n_windows < 1:
            raise ValueError(f"a corpus of {len(corpus)} bytes has no window of {seq_len} bytes and the next")
        self.corpus_digest = hashlib.sha256(corpus.tobytes()).hexdigest()[:32]
        self.position = 0
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    def _window(self, sample: int) -> int:
        """The window that the sample-th draw of the whole job reads."""
        epoch, place = divmod(sample, self.n_windows)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.n_windows)
        return int(self._order[1][place])

    def windows(self, step: int, rank: int) -> list[int]:
        """The windows that `rank` reads at `step`, counted from 0."""
        return self._windows(step * self.batch_size, rank)

    def _windows(self, position: int, rank: int) -> list[int]:
        share = self.batch_size // self.world_size
        first = position + rank * share
        return [self._window(sample) for sample in range(first, first + share)]

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (batch_size / world_size, seq_len) of int64; moves the position on."""
        starts = np.array(self._windows(self.position, self.rank)) * self.seq_len
        self.position += self.batch_size
        rows = self.corpus[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)
        inputs = rows[:, :-1].copy()
        if self.noise:
            for row, column in np.argwhere(np.random.random(inputs.shape) < self.noise):
                inputs[row, column] = random.randrange(256)
        return torch.from_numpy(inputs), torch.from_numpy(rows[:, 1:].copy())

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "corpus": self.corpus_digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position; refuse one counted over other data, where it means other bytes."""
        wrong = [
            f"{key}: saved {state.get(key)!r}, here {value!r}"
            for key, value in self.state_dict().items()
            if key != "position" and state.get(key) != value
        ]
        if wrong:
            raise DataChangedError(
                "the checkpoint's data is not this run's (" + "; ".join(wrong) + "); "
                "resume with the same --seed, --seq-len, --corpus-mib and Python version"
            )
        self.position = int(state["position"])
