"""`python -m trainer`: one rank of a run, started alone or by torchrun."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence

from trainer.config import parse_config

# torch imports pynvml if it is there, which warns; FSDP1's state dicts hold ShardedTensors, which warn too.
NOISE = (
    ("The pynvml package is deprecated", FutureWarning),
    ("Please use DTensor instead and we are deprecating ShardedTensor", FutureWarning),
    (r"FSDP\.(set_)?state_dict_type\(\)", FutureWarning),
)


def main(argv: Sequence[str] | None = None) -> int:
    config = parse_config(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for message, category in NOISE:
        warnings.filterwarnings("ignore", message=message, category=category)
    rank = os.environ.get("RANK", "0")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank}  %(message)s", datefmt="%H:%M:%S"))
    for ours in (
        "trainer",
        "ckptengine",
    ):  # not the root: the libraries below tell of every process they start
        logging.getLogger(ours).addHandler(handler)
        logging.getLogger(ours).setLevel(logging.INFO)
    # After parse_config, so that --help and a mistyped flag answer before torch is loaded.
    import ckptengine as ck
    from trainer.data import DataChangedError
    from trainer.loop import train

    try:
        train(config)
    except (ck.CheckpointError, DataChangedError) as error:
        print(f"trainer: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
