"""Over how many of Lustre's servers should a shard be striped?

Enough that the job's clients together use all object storage targets (OSTs), and no more: a stripe costs a
lock, an object and a server that can fail. With fewer ranks than OSTs the ranks' own files have to span the
OSTs; with more, one file per rank does that by itself, and only a large shard needs several, since a client
without EFA moves at most 5 Gb/s to one server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB, GIB = 1 << 20, 1 << 30

StripeCount = int | Literal["auto", "inherit"]
"""A number of OSTs (-1: all); `"auto"`: by `stripe_count`; `"inherit"`: what the directory above has."""


@dataclass(frozen=True, slots=True)
class Striping:
    """What the caller wishes: how many stripes a shard has, and of which size in bytes."""

    count: StripeCount = "auto"
    nbytes: int = 4 * MIB


BY_POLICY = Striping()


def stripe_count(shard_nbytes: int, ranks: int, osts: int) -> int:
    """How many stripes a shard of `shard_nbytes` gets, of a job of `ranks` (one shard each), on `osts` OSTs.

    At least 1, at most `osts`. Sizes are lower bounds of their row: 64 MiB exactly is in the second.

    ==================  ==================================================================
    shard               stripes
    ==================  ==================================================================
    < 64 MiB            1
    64 MiB to 1 GiB     1 if ranks ≥ OSTs, else OSTs per rank, at most 4
    1 GiB to 10 GiB     OSTs per rank, at least 4 and at most 8; 2 if ranks ≥ 4 × OSTs
    10 GiB to 100 GiB   the same, at most 16
    ≥ 100 GiB           the same, at most 32
    ==================  ==================================================================
    """
    if shard_nbytes < 0 or ranks < 1 or osts < 1:
        raise ValueError(f"no stripe count for {shard_nbytes} bytes, {ranks} ranks and {osts} OSTs")
    per_rank = -(-osts // ranks)
    if shard_nbytes < 64 * MIB:
        return 1
    if shard_nbytes < GIB:
        return min(4, osts, per_rank)  # 1 if there are as many ranks as OSTs
    if ranks >= 4 * osts:
        return min(2, osts)
    cap = 8 if shard_nbytes < 10 * GIB else 16 if shard_nbytes < 100 * GIB else 32
    return min(osts, cap, max(4, per_rank))
