"""How does a state get into an arena: laid out first, then copied, in the call or behind the training?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptengine.adapters.collector import gc_paused
from ckptengine.adapters.pinning import pin_arena
from ckptengine.adapters.stage import copy_items
from ckptengine.adapters.state import FlatState, StateItem
from ckptengine.config import Config
from ckptengine.errors import CheckpointError
from ckptengine.format.layout import PAD_PREFIX, lay_out
from ckptengine.format.names import AttemptId
from ckptengine.format.shard import HeaderTemplate, ShardHeader, TensorEntry, encode_header
from ckptengine.staging.arena import Arena


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Where the bytes of a state will lie in an arena's payload: the header, then the data."""

    flat: FlatState
    template: HeaderTemplate
    starts: dict[str, int]
    """Of each item, in the data."""
    pads: list[tuple[int, int]]
    data_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.template.nbytes + self.data_nbytes

    def begin(self, arena: Arena) -> None:
        """Write what is no item's: the header, and the pads."""
        if any(item.on_cuda for item in self.flat.items):
            pin_arena(arena)
        arena.payload[: self.template.nbytes] = self.template.data
        data = self.data(arena)
        # The arena is reused: whatever a pad covers is another snapshot's bytes.
        for start, stop in self.pads:
            data[start:stop] = bytes(stop - start)

    def copy(self, items: Sequence[StateItem], arena: Arena) -> None:
        """Copy items to their places."""
        copy_items(items, self.offsets(items), self.data(arena))

    def offsets(self, items: Sequence[StateItem]) -> list[int]:
        return [self.starts[item.name] for item in items]

    def data(self, arena: Arena) -> memoryview:
        return arena.payload[self.template.nbytes : self.nbytes]


@gc_paused()
def plan_snapshot(
    flat: FlatState, *, attempt: AttemptId, step: int, rank: int, world_size: int, config: Config
) -> Snapshot:
    placed, data_nbytes = lay_out([(item.name, item.nbytes, item.alignment) for item in flat.items])
    spans = {name: (start, stop) for name, start, stop in placed}
    template = encode_header(
        ShardHeader(
            run=str(attempt.run),
            attempt=str(attempt),
            step=step,
            rank=rank,
            world_size=world_size,
            codec="raw" if config.codec == "raw" else "zstd",
            block_nbytes=config.block_nbytes,
            data_nbytes=data_nbytes,
            tensors=tuple(_entry(item, *spans[item.name]) for item in flat.items),
            views=tuple(flat.views),
            replicas=flat.replicas,
            tree=flat.tree,
        )
    )
    starts = {name: start for name, (start, _) in spans.items()}
    pads = [(start, stop) for name, start, stop in placed if name.startswith(PAD_PREFIX)]
    return Snapshot(flat, template, starts, pads, data_nbytes)


def _entry(item: StateItem, start: int, stop: int) -> TensorEntry:
    return TensorEntry(
        name=item.name,
        dtype=item.dtype,
        shape=item.shape,
        start=start,
        stop=stop,
        chunk=item.chunk,
        stride=item.stride,
        placement=item.placement,
        kind=item.kind,
        descr=item.descr,
    )


class Staging:
    """A snapshot that is being taken behind the training, in a thread of its own. `done` comes in any case,
    then `error` tells."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._cancelled: CheckpointError | None = None

    def start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.error = error
            finally:
                self.done.set()

        threading.Thread(target=run, name="ckpt-snapshot", daemon=True).start()

    def cancel(self, error: CheckpointError) -> None:
        """Let the work end with `error` where it next asks."""
        self._cancelled = error

    def go_on(self) -> None:
        """Asked by the work between its pieces."""
        if self._cancelled is not None:
            raise self._cancelled
