"""One save through the whole write path, with every I/O failing once and the power going at every moment.

Ranks are threads with one memory transport; stores are the shipped test stores and a real directory.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from ckptengine.catalog.catalog import list_steps, read_manifest
from ckptengine.comm.transport import MemoryTransport
from ckptengine.errors import CheckpointError, SaveFailedError
from ckptengine.format.index import build_index
from ckptengine.format.layout import lay_out
from ckptengine.format.names import INDEX_NAME, MANIFEST_NAME, AttemptId, RunId, shard_filename, step_dirname
from ckptengine.format.shard import ShardHeader, TensorEntry, encode_header
from ckptengine.read.plan import Destination
from ckptengine.read.reader import read_shard
from ckptengine.read.shards import open_header, shard_path
from ckptengine.staging.arena import Arena
from ckptengine.storage.direct import AlignedBuffer
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import Store
from ckptengine.testing.faulty import FaultyStore
from ckptengine.testing.nondurable import NonDurableStore, SimulatedCrash
from ckptengine.write import save as writing
from ckptengine.write.messages import ArenaRef, Outcome, SaveStatus, TransportSpec, WriteTask, fate_key
from ckptengine.write.methods import History
from ckptengine.write.save import run_save
from ckptengine.write.staged import refusal

RUN = RunId(3, 1_700_000_000_000, "00c0ffee")
BLOCK = 8192
RANKS = 2


@contextmanager
def holding(payload: memoryview) -> Iterator[Arena]:
    """An arena with a whole snapshot."""
    with Arena(len(payload)) as arena:
        arena.payload[: len(payload)] = payload
        arena.mark.complete()
        yield arena


def content(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng([step, rank]).integers(0, 200, 3 * BLOCK + 100, dtype=np.uint8)


def staged(
    root: str,
    step: int,
    rank: int,
    save: int,
    *,
    ranks: int = RANKS,
    codec: str = "raw",
    timeout_s: float = 30.0,
):
    """A task and its payload, as the trainer leaves them."""
    attempt = str(AttemptId(RUN, save))
    data = content(step, rank)
    placed, nbytes = lay_out([("w", data.nbytes, 1)])
    header = ShardHeader(
        run=str(RUN),
        attempt=attempt,
        step=step,
        rank=rank,
        world_size=ranks,
        codec=codec,
        block_nbytes=BLOCK,
        data_nbytes=nbytes,
        tensors=(TensorEntry("w", "uint8", data.shape, *placed[0][1:]),),
        tree={"w": {"$": "t", "i": 0}},
    )
    template = encode_header(header)
    payload = AlignedBuffer(template.nbytes + nbytes).view
    payload[: template.nbytes] = template.data
    payload[template.nbytes : template.nbytes + data.nbytes] = data.tobytes()
    task = WriteTask(
        root=root,
        step=step,
        attempt=attempt,
        rank=rank,
        world_size=ranks,
        arena=ArenaRef(pid=0, fd=0, capacity=0, serial=0),
        live_arenas=(),
        header_nbytes=template.nbytes,
        digests_at=template.digests_at,
        stored_at=template.stored_at,
        methods_at=template.methods_at,
        data_offset=template.nbytes,
        data_nbytes=nbytes,
        block_nbytes=BLOCK,
        codec=codec,
        zstd_level=1,
        auto=False,
        direct_io="auto",
        io_threads=2,
        transport=TransportSpec(kind="none"),
        deadline=time.monotonic() + timeout_s,
        metadata={"step": step},
        keep_last=2,
    )
    return task, payload


def save_on_all_ranks(
    stores: list[Store],
    root: str,
    step: int,
    save: int,
    **options: object,
) -> list[Outcome]:
    transport = MemoryTransport()

    def run(rank: int) -> Outcome:
        task, payload = staged(root, step, rank, save, ranks=len(stores), **options)  # type: ignore[arg-type]
        with holding(payload) as arena:
            outcome = run_save(task, stores[rank], transport, arena, History())
            seen = msgspec.msgpack.decode(arena.status.read() or b"", type=SaveStatus)
        assert (seen.state, seen.outcome) == ("ended", outcome)
        return outcome

    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(run, range(len(stores))))


def check_whole(store: Store, root: str) -> list[int]:
    """Every listed step restores to exactly what was captured; returns the steps."""
    entries = list_steps(store, root)
    for entry in entries:
        manifest = read_manifest(store, entry.path)
        for ref in manifest.shards:
            header = open_header(store, entry.path, ref, manifest)
            (tensor,) = header.tensors
            out = np.empty(tensor.nbytes, dtype=np.uint8)
            destination = Destination(tensor.start, tensor.stop, out.ctypes.data)
            read_shard(store, shard_path(entry.path, ref), header, [destination], threads=2)
            assert np.array_equal(out, content(entry.step, ref.rank))
    return [entry.step for entry in entries]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_save_commits_what_was_staged(tmp_path: Path, codec: str) -> None:
    stores: list[Store] = [PosixStore()] * RANKS
    outcomes = save_on_all_ranks(stores, str(tmp_path), 10, 1, codec=codec)
    assert all(outcome.committed for outcome in outcomes)
    assert outcomes[0] == outcomes[1]
    manifest = read_manifest(PosixStore(), f"{tmp_path}/step-0000000010")
    assert (manifest.fingerprint, manifest.nbytes) == (outcomes[0].fingerprint, outcomes[0].nbytes)
    assert manifest.metadata == {"step": 10}
    assert check_whole(PosixStore(), str(tmp_path)) == [10]
    if codec == "raw":
        for rank in range(RANKS):
            (path,) = tmp_path.glob(f"step-*/*/shard-{rank:05d}.safetensors")
            assert np.array_equal(load_file(path)["w"], content(10, rank))


@pytest.mark.parametrize("ranks", [1, 3])
def test_index_is_what_the_headers_say(tmp_path: Path, ranks: int) -> None:
    stores: list[Store] = [PosixStore()] * ranks
    save_on_all_ranks(stores, str(tmp_path), 10, 1)
    step = tmp_path / "step-0000000010"
    manifest = read_manifest(PosixStore(), str(step))
    assert manifest.tensors == 1
    headers = [open_header(PosixStore(), str(step), ref, manifest) for ref in manifest.shards]
    assert (step / INDEX_NAME).read_bytes() == build_index(headers)


def test_what_is_no_header_is_never_committed(tmp_path: Path) -> None:
    task, payload = staged(str(tmp_path), 10, 0, 1, ranks=1)
    # Where the tensors' description begins: past all that the writer itself has to find.
    payload[: task.header_nbytes] = bytes(payload[: task.header_nbytes]).replace(b'"dtype"', b'"dtype,')
    with holding(payload) as arena:
        outcome = run_save(task, PosixStore(), MemoryTransport(), arena, History())
    assert outcome.failure is not None
    assert "malformed shard header" in outcome.failure.message
    assert list_steps(PosixStore(), str(tmp_path)) == []


def test_retention_runs_after_the_commit(tmp_path: Path) -> None:
    stores: list[Store] = [PosixStore()] * RANKS
    for save, step in enumerate((1, 2, 3), start=1):
        assert save_on_all_ranks(stores, str(tmp_path), step, save)[0].committed
    assert check_whole(PosixStore(), str(tmp_path)) == [2, 3]


def test_a_step_saved_again_replaces_its_commit_and_drops_the_old_attempt(tmp_path: Path) -> None:
    stores: list[Store] = [PosixStore()] * RANKS
    for save in (1, 2):
        assert save_on_all_ranks(stores, str(tmp_path), 5, save)[0].committed
    assert [path.name for path in tmp_path.glob("step-*/a*")] == [str(AttemptId(RUN, 2))]
    assert check_whole(PosixStore(), str(tmp_path)) == [5]


def test_an_earlier_attempt_never_replaces_a_later_one(tmp_path: Path) -> None:
    stores: list[Store] = [PosixStore()] * RANKS
    assert save_on_all_ranks(stores, str(tmp_path), 5, 7)[0].committed
    for outcome in save_on_all_ranks(stores, str(tmp_path), 5, 6):
        assert not outcome.committed
        assert outcome.failure is not None
        assert "later attempt" in outcome.failure.message
    assert read_manifest(PosixStore(), f"{tmp_path}/step-0000000005").attempt == str(AttemptId(RUN, 7))


def failing_runs(fault: Callable[[Store, int | None], FaultyStore], rank: int, tmp_path: Path) -> int:
    """Save over an existing commit with each operation of `rank` failing in turn; returns how many were
    tried."""
    n = 0
    while True:
        n += 1
        root = str(tmp_path / f"{rank}-{n}")
        assert save_on_all_ranks([PosixStore()] * RANKS, root, 1, 1)[0].committed
        faulty = fault(PosixStore(), n)
        stores: list[Store] = [PosixStore()] * RANKS
        stores[rank] = faulty
        outcomes = save_on_all_ranks(stores, root, 2, 2)
        steps = check_whole(PosixStore(), root)
        assert outcomes[0] == outcomes[1]
        assert 1 in steps
        assert (2 in steps) == outcomes[0].committed or faulty.after, faulty.failed
        if faulty.failed is None:
            assert outcomes[0].committed
            return n
        if not outcomes[0].committed:
            failure = outcomes[0].failure
            assert failure is not None
            # What the coordinator cannot see may be its own mount's fault or the other rank's.
            assert failure.rank == rank or "does not see it" in failure.message, failure
        # The next save works, whatever the last one left.
        assert save_on_all_ranks([PosixStore()] * RANKS, root, 3, 3)[0].committed
        assert check_whole(PosixStore(), root)[-1] == 3


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("after", [False, True])
def test_any_failing_operation_on_any_rank_fails_all_ranks_and_leaves_the_previous_commit(
    tmp_path: Path, rank: int, after: bool
) -> None:
    tried = failing_runs(
        lambda inner, n: FaultyStore(inner, fail_at=n, error=errno.EIO, after=after), rank, tmp_path
    )
    assert tried > 5


@pytest.mark.parametrize("error", ["short write", "lost write"])
def test_a_write_that_goes_missing_is_never_committed_as_whole(tmp_path: Path, error: str) -> None:
    for n in range(1, 6):
        root = str(tmp_path / str(n))
        assert save_on_all_ranks([PosixStore()] * RANKS, root, 1, 1)[0].committed
        stores: list[Store] = [PosixStore(), FaultyStore(PosixStore(), fail_at=n, error=error)]  # type: ignore[arg-type]
        committed = save_on_all_ranks(stores, root, 2, 2)[0].committed
        if error == "short write":
            assert not committed
            assert check_whole(PosixStore(), root) == [1]
        elif committed:
            # The disk said yes and lost a block: only its digest can tell, and does.
            with pytest.raises(CheckpointError):
                check_whole(PosixStore(), root)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_power_cut_at_any_moment_leaves_whole_checkpoints_only(seed: int | None) -> None:
    def protocol(store: NonDurableStore) -> None:
        for save, step in enumerate((1, 2, 2, 3), start=1):
            save_on_all_ranks([store], "/root", step, save)

    counting = NonDurableStore()
    protocol(counting)
    moments = counting.moments
    assert moments > 40
    committed_before = -1
    # The writer's threads make the order of moments vary; every one of them is tried all the same.
    for moment in range(1, moments + 1, 1 if seed is None else 3):
        store = NonDurableStore(crash_at=moment)
        with pytest.raises(SimulatedCrash):
            protocol(store)
        store.crash(None if seed is None else random.Random(f"{seed}/{moment}"))
        if "root" not in {entry.name for entry in store.list("/")}:
            continue
        steps = check_whole(store, "/root")
        newest = steps[-1] if steps else 0
        if seed is None:
            assert newest >= committed_before - 1
            committed_before = max(committed_before, newest)


def test_a_rank_that_never_reports_is_named_when_the_deadline_passes(tmp_path: Path) -> None:
    task, payload = staged(str(tmp_path), 1, 0, 1, ranks=RANKS, timeout_s=1.0)
    with holding(payload) as arena:
        outcome = run_save(task, PosixStore(), MemoryTransport(), arena, History())
    assert not outcome.committed
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.kind) == (1, "CommitTimeoutError")
    assert list_steps(PosixStore(), str(tmp_path)) == []


def test_all_ranks_name_the_one_that_never_reports_though_their_own_deadlines_were_earlier(
    tmp_path: Path,
) -> None:
    transport = MemoryTransport()

    def save(rank: int, timeout_s: float) -> Outcome:
        task, payload = staged(str(tmp_path), 1, rank, 1, ranks=3, timeout_s=timeout_s)
        with holding(payload) as arena:
            return run_save(task, PosixStore(), transport, arena, History())

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(save, [0, 1], [2.0, 1.0]))
    for outcome in outcomes:
        assert outcome.failure is not None
        assert (outcome.failure.rank, outcome.failure.kind) == (2, "CommitTimeoutError")


class WaitingStore(FaultyStore):
    """Waits, in one method, until it may go on."""

    def __init__(self, method: str, may_go_on: Callable[[], bool]) -> None:
        super().__init__(PosixStore())
        self._method, self._may_go_on = method, may_go_on

    def sync_dir(self, path: str) -> None:
        self._wait("sync_dir")
        super().sync_dir(path)

    def publish(self, path: str, data: bytes) -> None:
        if path.endswith(MANIFEST_NAME):
            self._wait("publish")
        super().publish(path, data)

    def _wait(self, method: str) -> None:
        deadline = time.monotonic() + 60
        while method == self._method and not self._may_go_on():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def save_with_a_slow_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, may_go_on: Callable[[MemoryTransport], bool]
) -> list[Outcome]:
    """What the two ranks hear if the coordinator's request came long after the other's."""
    monkeypatch.setattr(writing, "OUTCOME_GRACE_S", 0.1)
    transport = MemoryTransport()
    store = WaitingStore(method, lambda: may_go_on(transport))

    def run(rank: int) -> Outcome:
        task, payload = staged(str(tmp_path), 1, rank, 1, timeout_s=1.5 if rank else 60.0)
        with holding(payload) as arena:
            return run_save(task, PosixStore() if rank else store, transport, arena, History())

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, [0, 1]))


ATTEMPT = str(AttemptId(RUN, 1))


def test_what_one_rank_has_given_up_is_not_committed_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given_up(transport: MemoryTransport) -> bool:
        return transport.peek(fate_key(ATTEMPT)) is not None

    for outcome in save_with_a_slow_coordinator(tmp_path, monkeypatch, "sync_dir", given_up):
        assert not outcome.committed
        assert outcome.failure is not None
        assert "the coordinator did not say in time how the attempt ended" in outcome.failure.message
    assert list_steps(PosixStore(), str(tmp_path)) == []


def test_a_rank_whose_patience_ends_while_the_commit_is_made_hears_how_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def asked_in_vain(transport: MemoryTransport) -> bool:
        return bool(asked)

    stop = writing.give_up

    def give_up(*args: Any) -> bool:
        given_up = stop(*args)
        asked.append("given up" if given_up else "being committed")
        return given_up

    monkeypatch.setattr(writing, "give_up", give_up)
    outcomes = save_with_a_slow_coordinator(tmp_path, monkeypatch, "publish", asked_in_vain)
    assert asked == ["being committed"]
    assert all(outcome.committed for outcome in outcomes)
    assert check_whole(PosixStore(), str(tmp_path)) == [1]


def test_a_coordinator_that_never_comes_is_named_when_the_deadline_passes(tmp_path: Path) -> None:
    task, payload = staged(str(tmp_path), 1, 1, 1, ranks=RANKS, timeout_s=1.0)
    with holding(payload) as arena:
        outcome = run_save(task, PosixStore(), MemoryTransport(), arena, History())
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.kind) == (0, "CommitTimeoutError")


def test_a_snapshot_refused_when_all_of_it_is_written_is_no_shard(tmp_path: Path) -> None:
    task, payload = staged(str(tmp_path), 1, 0, 1, ranks=1)
    with holding(payload) as arena, ThreadPoolExecutor(1) as pool:
        arena.mark.reset()
        arena.mark.reach(task.data_nbytes)
        saving = pool.submit(run_save, task, PosixStore(), MemoryTransport(), arena, History())
        path = tmp_path / step_dirname(1) / task.attempt / shard_filename(0, compressed=False)
        data = bytes(payload[task.data_offset : task.data_offset + task.data_nbytes])
        deadline = time.monotonic() + 30
        while not (path.exists() and data in path.read_bytes()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert not any(path.read_bytes()[: task.header_nbytes])
        arena.mark.refuse(refusal(SaveFailedError("torn"), 0))
        outcome = saving.result(30)
    assert not outcome.committed
    assert outcome.failure is not None
    assert (outcome.failure.message, outcome.failure.rank, outcome.retry) == ("torn", 0, False)
    assert not path.exists()
