"""How does a state get into an arena: laid out first, then copied, in the call or behind the training?"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from queue import SimpleQueue

from ckptengine.adapters.collector import gc_paused
from ckptengine.adapters.pinning import pin_arena
from ckptengine.adapters.stage import copy_items
from ckptengine.adapters.state import FlatState, StateItem
from ckptengine.config import Config
from ckptengine.errors import CheckpointError
from ckptengine.format.layout import PAD_PREFIX, lay_out
from ckptengine.format.names import AttemptId
from ckptengine.format.shard import HeaderTemplate, ShardHeader, encode_header
from ckptengine.staging.arena import Arena
from ckptengine.staging.mark import StagedMark
from ckptengine.write.messages import WriteTask
from ckptengine.write.staged import refusal


class Snapshot:
    """Where the bytes of a state will lie in an arena's payload: the header, then the data.

    starts: of each item, in the data, by name. pads: what lies between them, in the data. encode: makes the
    header, when it is first asked for; behind the training, where the state is copied there.
    """

    def __init__(
        self,
        flat: FlatState,
        starts: dict[str, int],
        pads: list[tuple[int, int]],
        data_nbytes: int,
        encode: Callable[[], HeaderTemplate],
    ) -> None:
        self.flat = flat
        self.starts = starts
        self.pads = pads
        self.data_nbytes = data_nbytes
        self._encode = encode

    @cached_property
    def template(self) -> HeaderTemplate:
        return self._encode()

    @property
    def nbytes(self) -> int:
        return self.template.nbytes + self.data_nbytes

    def begin(self, arena: Arena) -> None:
        """Write what is no item's: the header, and the pads. The writer may hear of it from then on."""
        arena.mark.reset()
        if any(item.on_cuda for item in self.flat.items):
            pin_arena(arena)
        arena.payload[: self.template.nbytes] = self.template.data
        data = self.data(arena)
        # The arena is reused: whatever a pad covers is another snapshot's bytes.
        for start, stop in self.pads:
            data[start:stop] = bytes(stop - start)

    def copy(
        self,
        items: Sequence[StateItem],
        arena: Arena,
        on_staged: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Copy items to their places; `on_staged` as of `copy_items`."""
        copy_items(items, self.offsets(items), self.data(arena), on_staged=on_staged)

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

    def encode() -> HeaderTemplate:
        return encode_header(
            ShardHeader(
                run=str(attempt.run),
                attempt=str(attempt),
                step=step,
                rank=rank,
                world_size=world_size,
                codec="raw" if config.codec == "raw" else "zstd",
                block_nbytes=config.shard_block_nbytes,
                data_nbytes=data_nbytes,
                tensors=tuple(item.entry(*spans[item.name]) for item in flat.items),
                views=tuple(flat.views),
                replicas=flat.replicas,
                tree=flat.tree,
                # With one rank there is nothing to tell apart.
                own=b"" if world_size > 1 else None,
            )
        )

    starts = {name: start for name, (start, _) in spans.items()}
    pads = [(start, stop) for name, start, stop in placed if name.startswith(PAD_PREFIX)]
    return Snapshot(flat, starts, pads, data_nbytes, encode)


class Behind:
    """A thread that does what is handed to it behind the training, in order.

    It is there before there is anything to do: who starts a thread waits until it runs, and then for the
    GIL, which it need not give back for 5 ms (`sys.getswitchinterval`). Who hands it something goes on.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._do_all, name="ckpt-snapshot", daemon=True).start()

    def do(self, work: Callable[[], None]) -> None:
        """Have it done when what was handed over before is done. It must not raise."""
        self._work.put(work)

    def close(self) -> None:
        """Let the thread end after what it has to do."""
        self._work.put(None)

    def _do_all(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # and the state that it refers to


class Staging:
    """A snapshot that is being taken, in the call or in a thread behind the training.

    `begun` comes when the writer may start on it, `done` when nothing is copied any more, and both in any
    case; then `error` tells. `arena` and `task` are there from `begun` on, unless it never began.
    """

    def __init__(self, rank: int) -> None:
        self.begun = threading.Event()
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.arena: Arena | None = None
        self.task: WriteTask | None = None
        self._rank = rank
        # Not by way of the arena, which is closed when a copy is given up that does not stop in time.
        self._mark: StagedMark | None = None
        self._lock = threading.Lock()
        self._cancelled: CheckpointError | None = None

    def begin(self, arena: Arena, task: WriteTask) -> None:
        """Header and pads are in the arena: the writer may start. Whoever drives the save owns the arena from
        now on; not if this raises, because of `cancel`."""
        with self._lock:
            self.go_on()
            self.arena, self.task, self._mark = arena, task, arena.mark
        self.begun.set()

    def run(self, work: Callable[[], None]) -> None:
        """Do the work, which calls `begin` and ends with the whole snapshot in the arena; let the writer know
        how it ended."""
        try:
            work()
            if self._mark is not None:
                self._mark.complete()
        except BaseException as error:
            self.error = error
            if self._mark is not None:
                self._mark.refuse(refusal(error, self._rank))
            raise
        finally:
            self.begun.set()
            self.done.set()

    def run_behind(self, work: Callable[[], None]) -> None:
        """`run`, in another thread: its errors are in `error` only."""
        with contextlib.suppress(BaseException):
            self.run(work)

    def cancel(self, error: CheckpointError) -> None:
        """Let the work end with `error` where it next asks; if it has not begun, it never will."""
        with self._lock:
            self._cancelled = error
            if self.error is None and self.task is None:
                self.error = error
        self.begun.set()

    def go_on(self) -> None:
        """Asked by the work between its pieces."""
        if self._cancelled is not None:
            raise self._cancelled
