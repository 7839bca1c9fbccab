"""By which method is each block of a compressed shard stored?

What compresses how well, and how fast, is tried on samples of each group of tensors, in the writer process.
A block is a mixture of groups. `zstd` takes the method that leaves the fewest bytes. `auto` takes the one
that is through first, where codec and device work side by side and the slower one decides: so nothing is
compressed that the device would have taken sooner as it is.

How fast the device is, earlier saves of this process have shown; the first save, and each one that is large
enough to spare it, begins with a few blocks as they are, whose writes tell. Only the first save waits for
them: the others begin to compress meanwhile, by what is known, so that the device is never without work.
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
SPARE = 0.8
"""...and only by a codec that needs no more than this share of that time: where both are as fast, they wait
for each other, and a codec that gets a little less than it was thought to is the slower one."""
PROBE_SHARE = 16
"""At most one block in so many is written as it is to measure the device, once something is known of it."""
PATIENCE = 2
"""After so many compressed blocks of each thread `auto` checks whether they were through sooner; without the
first of each, for which the device had to wait: that time is gone, whatever becomes of the others."""
WORTH_THE_WAIT = 2
"""`auto` compresses nothing unless the device gains this many times what it loses at the beginning, when it
waits for the first compressed blocks."""
MEASURABLE_NBYTES = 1 << 20
"""Fewer bytes say more about latency than about rate..."""
MEASURABLE_S = 1e-3
"""...and so does less work for the codec."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a method makes of a group's sample: the share that is left, and one core's seconds per byte."""

    left: float
    seconds: float


class History:
    """What the saves of one process have shown: the device's rate in bytes per second, and the cores that the
    codec got, counted in what one alone does with the samples: two that share their units, or their caches
    with other work, may come to little more than one. None: not known yet."""

    def __init__(self, device: float | None = None, cores: float | None = None) -> None:
        self.device = device
        self.cores = cores
        self.compressed = True
        """Whether anything was, of the last shard."""

    def wrote(self, nbytes: int, seconds: float, *, compressed: bool) -> None:
        """Learn from a shard: `nbytes` were written in `seconds`, in which the device had work."""
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

    def packed(self, expected_s: float, wall_s: float, threads: int) -> None:
        """Learn from the time that `threads` have spent in the codec, with blocks that by their samples take
        one core `expected_s`."""
        there_are = float(available_cores())
        self.compressed = wall_s > 0
        if wall_s > 0:
            if expected_s < MEASURABLE_S:
                return
            got = min(threads * expected_s / wall_s, there_are)
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
    parts = shares(groups, blocks)
    return "".join(choice.method for choice in _choices(parts, groups, estimates, device, cores))


@dataclass(frozen=True, slots=True)
class _Choice:
    """A block's method, the share of the time as it is that it then takes, or of the bytes, and one core's
    seconds for it."""

    method: str
    share: float
    seconds: float


def _choices(
    parts: Sequence[dict[int, int]],
    groups: Sequence[Group],
    estimates: Sequence[dict[str, Estimate]],
    device: float | None,
    cores: float,
) -> list[_Choice]:
    choices = []
    for members in parts:
        # Without what fills the last page: next to a few bytes that do not shrink, it would look like a gain.
        whole = sum(members.values())
        worth = WORTH if device is None else WORTH_AUTO
        best = _Choice(AS_IT_IS, 1.0, 0.0)
        for candidate in _candidates(members, groups) if whole else ():
            left = seconds = 0.0
            for index, nbytes in members.items():
                known = estimates[index]
                # Elements of another size than the planes': taken as noise, at the cost of a whole frame.
                one = known.get(candidate) or Estimate(1.0, known[ZSTD].seconds if ZSTD in known else 0.0)
                left += nbytes * one.left
                seconds += nbytes * one.seconds
            share = left / whole
            if device is not None:
                busy = seconds / cores * device / whole
                if busy > SPARE:
                    continue
                share = max(share, busy)
            if share <= min(worth, best.share):
                best = _Choice(candidate, share, seconds)
        choices.append(best)
    return choices


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
        self._probe_rate: float | None = None
        self._methods: str | None = None
        self._device = history.device
        self._parts: list[dict[int, int]] = []
        self._seconds = [0.0] * blocks.count
        self._expected_s = 0.0
        self._under_way_at: float | None = None
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
        # Tens of milliseconds for thousands of tensors, and it may be decided twice.
        parts = shares(self._groups, self._blocks)
        with self._changed:
            self._estimates, self._parts = estimates, parts
            # As much of each core as this thread got of one.
            self._cores = available_cores() * min(cpu / wall, 1.0) if wall > 0 else float(available_cores())
            self._changed.notify_all()

    def method(self, index: int) -> str:
        """How to store block `index`; waits until it is decided."""
        if index < self._probes:
            return AS_IT_IS
        with self._changed:
            if self._auto and self._estimates is None and not self._history.compressed:
                return AS_IT_IS  # as it will probably be decided: the device need not wait for the samples
            self._changed.wait_for(lambda: self._stopped or self._can_decide())
            if self._stopped:
                return AS_IT_IS
            if self._methods is None:
                self._methods = self._decide()
            if self._losing or self._methods[index] == AS_IT_IS:
                return AS_IT_IS
            self._expected_s += self._seconds[index]
            return self._methods[index]

    def _can_decide(self) -> bool:
        return self._estimates is not None and (self._device is not None or self._probed >= self._probes)

    def wrote(self, index: int, method: str, nbytes: int, seconds: float) -> None:
        """A block is written, by this method; so far the device wrote `nbytes` in `seconds` in which it had
        work."""
        with self._changed:
            if index < self._probes:
                self._probed += 1
                if self._probed == self._probes and nbytes >= MEASURABLE_NBYTES and seconds > 0:
                    self._probe_rate = nbytes / seconds
                    if self._methods is not None:
                        self._methods = self._decide()
                self._changed.notify_all()
            elif self._auto and self._methods is not None:
                self._compressed += method != AS_IT_IS
                if self._under_way_at is not None:
                    start, stop = self._blocks.span(index)
                    self._done_nbytes += stop - start
                    if self._compressed >= PATIENCE * self._threads and not self._losing:
                        self._losing = self._is_losing(self._under_way_at, nbytes, seconds)
                elif self._compressed == self._threads:
                    self._under_way_at = time.monotonic()

    def _is_losing(self, began: float, nbytes: int, seconds: float) -> bool:
        """Would the device have taken the blocks sooner as they are? It is asked what it does when it has
        something to do, not what was estimated: the codec may get fewer cores than it was thought to."""
        elapsed = time.monotonic() - began
        if nbytes < MEASURABLE_NBYTES or self._done_nbytes * seconds >= nbytes * elapsed:
            return False
        logger.info("auto: the codec is slower than estimated; the other blocks are stored as they are")
        return True

    @property
    def expected_s(self) -> float:
        """What one core takes for the blocks that were to be compressed so far, by the samples."""
        return self._expected_s

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _decide(self) -> str:
        estimates = self._estimates
        assert estimates is not None
        known = [rate for rate in (self._device, self._probe_rate) if rate is not None]
        device = sum(known) / len(known) if known and self._auto else None
        cores = self._cores if self._history.cores is None else self._history.cores
        if self._auto and device is None:
            choices = [_Choice(AS_IT_IS, 1.0, 0.0)] * self._blocks.count
        else:
            choices = _choices(self._parts, self._groups, estimates, device, cores)
        waiting = gained = 0.0
        if device is not None:
            waiting, gained = self._waiting_s(choices, device, cores), self._gained_s(choices, device)
            if gained < WORTH_THE_WAIT * waiting:
                choices = [_Choice(AS_IT_IS, 1.0, 0.0)] * self._blocks.count
        methods = "".join(choice.method for choice in choices)
        self._seconds = [choice.seconds for choice in choices]
        if self._auto and methods != self._methods and logger.isEnabledFor(logging.INFO):
            logger.info(
                "auto: %s of %d blocks as they are; device %s, %.1f cores, %.0f ms to be gained, %.0f lost "
                "at first; %s",
                methods.count(AS_IT_IS),
                len(methods),
                f"{device / 2**20:.0f} MiB/s" if device else "not measured yet",
                cores,
                gained * 1e3,
                waiting * 1e3,
                "; ".join(map(_describe, self._groups, estimates)),
            )
        return methods

    def _waiting_s(self, choices: Sequence[_Choice], device: float, cores: float) -> float:
        """How long the device waits until each thread has compressed a block, but for the probes."""
        first = [choice.seconds for choice in choices[self._probes :] if choice.method != AS_IT_IS]
        probes = self._blocks.span(self._probes - 1)[1] if self._probes else 0
        return max(0.0, sum(first[: self._threads]) / cores - probes / device)

    def _gained_s(self, choices: Sequence[_Choice], device: float) -> float:
        """How much sooner the device is done, once it has work."""
        nbytes = 0.0
        for i, choice in enumerate(choices[self._probes :], self._probes):
            start, stop = self._blocks.span(i)
            nbytes += (1 - choice.share) * (stop - start)
        return nbytes / device


def _describe(one: Group, known: dict[str, Estimate]) -> str:
    parts = [
        f"{'zstd' if method == ZSTD else 'planes'} to {e.left:.0%} at {1 / e.seconds / 2**20:.0f} MiB/s"
        for method, e in known.items()
        if e.seconds > 0
    ]
    return f"{one.name}: {', '.join(parts) or 'does not shrink'}"
