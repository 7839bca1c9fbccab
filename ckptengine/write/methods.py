"""By which method is each block of a compressed shard stored?

What compresses how well, and how fast, is tried on samples of each group of tensors, in the writer process.
A block is a mixture of groups. `zstd` takes the method that leaves the fewest bytes. `auto` takes the one
that is through first, where codec and device work side by side and the slower one decides: so nothing is
compressed that the device would have taken sooner as it is.

How fast the device is, earlier saves of this process have shown; the first save, and each one that is large
enough to spare it, begins with a few blocks as they are, whose writes tell.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ckptengine.codecs import block as codec
from ckptengine.format.blocks import AS_IT_IS, PLANES, ZSTD, BlockTable
from ckptengine.write.groups import Group, shares

logger = logging.getLogger(__name__)

WORTH = 0.98
"""`zstd` stores a block as it is unless this share of it, or less, is left: a reader pays for each frame."""
WORTH_AUTO = 0.9
"""`auto` compresses only what is through in this share of the time, or less: the estimates are not exact, and
the CPU is the training's."""
PROBE_SHARE = 16
"""At most one block in so many is written as it is to measure the device, once something is known of it."""
PATIENCE = 2
"""After so many compressed blocks of each thread `auto` checks whether they were through sooner."""
MEASURABLE_NBYTES = 1 << 20
"""Fewer bytes say more about latency than about rate."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a method makes of a group's sample: the share that is left, and one core's seconds per byte."""

    left: float
    seconds: float


class History:
    """What the saves of one process have shown: the device's rate in bytes per second, and how many cores the
    codec got. None: not known yet."""

    def __init__(self, device: float | None = None, cores: float | None = None) -> None:
        self.device = device
        self.cores = cores

    def wrote(self, nbytes: int, seconds: float, *, compressed: bool) -> None:
        """Learn from a shard: `seconds` with a write or the sync under way."""
        if nbytes < MEASURABLE_NBYTES or seconds <= 0:
            return
        rate = nbytes / seconds
        if self.device is None:
            self.device = rate
        elif compressed and rate < self.device:
            # The device was not kept busy by as many writes as when nothing is compressed: a lower bound.
            self.device = 0.8 * self.device + 0.2 * rate
        else:
            self.device = (self.device + rate) / 2

    def packed(self, cpu_s: float, wall_s: float, threads: int) -> None:
        """Learn from the time that `threads` have spent in the codec."""
        there_are = float(available_cores())
        if wall_s > 0:
            got = min(threads * cpu_s / wall_s, there_are)
            self.cores = got if self.cores is None else (self.cores + got) / 2
        elif self.cores is not None:
            # Nothing was compressed: else one busy hour would rule it out for good.
            self.cores += (there_are - self.cores) / 16


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def estimate(one: Group, data: memoryview, level: int) -> dict[str, Estimate]:
    """Each method tried on a sample of the group; a method that does not shrink it is not in the result."""
    sample = memoryview(one.sample(data))
    sample = sample[: len(sample) // one.word * one.word]
    if not len(sample):
        return {}
    out = memoryview(bytearray(len(sample)))
    found = {}
    for method in (ZSTD, *([PLANES[one.word]] if one.word in PLANES else [])):
        # The thread's own time: what else the machine does meanwhile is not the codec's.
        began = time.thread_time()
        packed = codec.pack_into(out, sample, method, level)
        seconds = time.thread_time() - began
        if packed is not None:
            found[method] = Estimate(packed / len(sample), seconds / len(sample))
    return found


def choose(
    blocks: BlockTable,
    groups: Sequence[Group],
    estimates: Sequence[dict[str, Estimate]],
    *,
    device: float | None = None,
    cores: float = 1.0,
) -> str:
    """Each block's method: the one that is through first on a device of so many bytes per second; `device`
    None: the one that leaves the fewest bytes."""
    methods = []
    for i, members in enumerate(shares(groups, blocks)):
        start, stop = blocks.span(i)
        whole = stop - start
        best, method = (WORTH if device is None else WORTH_AUTO), AS_IT_IS
        for candidate in _candidates(members, groups):
            left = seconds = 0.0
            for index, nbytes in members.items():
                known = estimates[index]
                # Elements of another size than the planes': taken as noise, at the cost of a whole frame.
                one = known.get(candidate) or Estimate(1.0, known[ZSTD].seconds if ZSTD in known else 0.0)
                left += nbytes * one.left
                seconds += nbytes * one.seconds
            share = left / whole
            if device is not None:
                share = max(share, seconds / cores * device / whole)
            if share <= best:
                best, method = share, candidate
        methods.append(method)
    return "".join(methods)


def _candidates(members: dict[int, int], groups: Sequence[Group]) -> list[str]:
    """The methods that may pay in a block: whole, and planes of the elements it has most of."""
    words: Counter[int] = Counter()
    for index, nbytes in members.items():
        words[groups[index].word] += nbytes
    planes = [PLANES[word] for word, _ in words.most_common() if word in PLANES][:1]
    return [ZSTD, *planes]


class Chooser:
    """The methods of one shard's blocks, decided while its first blocks are written.

    Used so: `prepare` once, beside the writing threads, which ask `method` before each block and report to
    `wrote` after it; `stop` lets all of them go when one has failed.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        data: memoryview,
        blocks: BlockTable,
        *,
        level: int,
        auto: bool,
        direct: bool,
        threads: int,
        history: History,
    ) -> None:
        self._groups = groups
        self._data = data
        self._blocks = blocks
        self._level = level
        self._threads = threads
        self._auto = auto
        self._history = history
        self._estimates: list[dict[str, Estimate]] | None = None
        self._cores = 1.0
        self._probes = 0
        if auto and direct:
            # What the page cache takes says nothing about the device.
            self._probes = min(threads, blocks.count)
            if history.device is not None:
                self._probes = min(self._probes, blocks.count // PROBE_SHARE)
        self._probed = 0
        self._written = (0, 0.0)
        self._probe_rate: float | None = None
        self._methods: str | None = None
        self._decided_at = (0.0, 0, 0.0)
        self._done_nbytes = 0
        self._compressed = 0
        self._losing = False
        self._stopped = False
        self._changed = threading.Condition()

    def prepare(self) -> None:
        """Sample the groups. Milliseconds each."""
        wall, cpu = time.monotonic(), time.thread_time()
        estimates = [estimate(one, self._data, self._level) for one in self._groups]
        wall, cpu = time.monotonic() - wall, time.thread_time() - cpu
        with self._changed:
            self._estimates = estimates
            # As much of each core as this thread got of one.
            self._cores = available_cores() * min(cpu / wall, 1.0) if wall > 0 else float(available_cores())
            self._changed.notify_all()

    def method(self, index: int) -> str:
        """How to store block `index`; waits until it is decided."""
        if index < self._probes:
            return AS_IT_IS
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or (self._estimates is not None and self._probed >= self._probes)
            )
            if self._stopped:
                return AS_IT_IS
            if self._methods is None:
                self._methods = self._decide()
                self._decided_at = (time.monotonic(), *self._written)
            return AS_IT_IS if self._losing else self._methods[index]

    def wrote(self, index: int, method: str, nbytes: int, seconds: float) -> None:
        """A block is written, by this method; `nbytes` in `seconds` so far, all blocks together."""
        with self._changed:
            self._written = nbytes, seconds
            if index < self._probes:
                self._probed += 1
                if self._probed == self._probes and nbytes >= MEASURABLE_NBYTES and seconds > 0:
                    self._probe_rate = nbytes / seconds
                self._changed.notify_all()
            elif self._auto and self._methods is not None:
                start, stop = self._blocks.span(index)
                self._done_nbytes += stop - start
                self._compressed += method != AS_IT_IS
                if self._compressed >= PATIENCE * self._threads and not self._losing:
                    self._losing = self._is_losing()

    def _is_losing(self) -> bool:
        """Would the device have taken the blocks sooner as they are? It is asked what it does when it has
        something to do, not what was estimated: the codec may get fewer cores than it was thought to."""
        began, nbytes, seconds = self._decided_at
        elapsed = time.monotonic() - began
        stored, busy = self._written[0] - nbytes, self._written[1] - seconds
        if stored < MEASURABLE_NBYTES or self._done_nbytes * busy >= stored * elapsed:
            return False
        logger.info("auto: the codec is slower than estimated; the other blocks are stored as they are")
        return True

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _decide(self) -> str:
        estimates = self._estimates
        assert estimates is not None
        if not self._auto:
            return choose(self._blocks, self._groups, estimates)
        known = [rate for rate in (self._history.device, self._probe_rate) if rate is not None]
        cores = self._cores if self._history.cores is None else self._history.cores
        if not known:
            methods, device = AS_IT_IS * self._blocks.count, 0.0
        else:
            device = sum(known) / len(known)
            methods = choose(self._blocks, self._groups, estimates, device=device, cores=cores)
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "auto: %s of %d blocks as they are; device %s, %.1f cores; %s",
                methods.count(AS_IT_IS),
                len(methods),
                f"{device / 2**20:.0f} MiB/s" if device else "not measured yet",
                cores,
                "; ".join(map(_describe, self._groups, estimates)),
            )
        return methods


def _describe(one: Group, known: dict[str, Estimate]) -> str:
    parts = [
        f"{'zstd' if method == ZSTD else 'planes'} to {e.left:.0%} at {1 / e.seconds / 2**20:.0f} MiB/s"
        for method, e in known.items()
        if e.seconds > 0
    ]
    return f"{one.name}: {', '.join(parts) or 'does not shrink'}"
