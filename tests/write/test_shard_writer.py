"""Does a shard come back, whatever way its blocks are stored, and is `auto` as fast as the better way?"""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.errors import StorageError
from ckptengine.format import dtypes
from ckptengine.format.blocks import AS_IT_IS, METHODS
from ckptengine.format.digest import hexdigest
from ckptengine.format.entries import ShardHeader, TensorEntry
from ckptengine.format.geometry import Chunk
from ckptengine.format.layout import PAD_PREFIX, lay_out
from ckptengine.format.per_rank import OWN_DIGITS
from ckptengine.format.shard import PREFIX_NBYTES, decode_header, encode_header, header_nbytes
from ckptengine.read.plan import Destination
from ckptengine.read.reader import find_damage, read_shard
from ckptengine.storage.posix import PosixStore
from ckptengine.storage.store import BlockWriter
from ckptengine.testing.faulty import FaultyStore
from ckptengine.write.methods import History
from ckptengine.write.shard_writer import Compression, _Meter, write_shard
from tests.format.strategies import few

RUN = "a000001-000000000000-00000000"


def contents(seed: int, kinds: list[tuple[str, int]]) -> tuple[ShardHeader, memoryview]:
    """Tensors of so many elements, of bytes that are typical of their dtype, and the data section."""
    rng = np.random.default_rng(seed)
    sizes = [(dtype, n, n * dtypes.itemsize(dtype)) for dtype, n in kinds]
    placed, data_nbytes = lay_out(
        [(f"t{i}", nbytes, dtypes.alignment(dtype)) for i, (dtype, _, nbytes) in enumerate(sizes)]
    )
    data = np.zeros(data_nbytes, np.uint8)
    tensors = []
    spans = [span for span in placed if not span[0].startswith(PAD_PREFIX)]
    for (dtype, n, nbytes), (name, start, stop) in zip(sizes, spans, strict=True):
        tensors.append(TensorEntry(name, dtype, (n,), start, stop))
        if dtype == "bool":
            data[start:stop] = rng.integers(0, 2, n)
        elif dtype == "int64":
            data[start:stop] = rng.integers(0, 1000, n).view(np.uint8)
        elif dtype == "uint8":
            data[start:stop] = np.frombuffer(rng.bytes(nbytes), np.uint8)
        else:
            size = min(dtypes.itemsize(dtype), 4)
            values = rng.standard_normal(nbytes // size, dtype=np.float32).view(np.uint8)
            data[start:stop] = values.reshape(-1, 4)[:, 4 - size :].reshape(-1)
    header = ShardHeader(
        run=RUN,
        attempt=f"{RUN}-000001.0",
        step=1,
        rank=0,
        world_size=1,
        codec="zstd",
        block_nbytes=4096,
        data_nbytes=data_nbytes,
        tensors=tuple(tensors),
    )
    return header, memoryview(data)


def write(
    store: Any, path: Path, header: ShardHeader, data: memoryview, *, auto: bool = False,
    history: History | None = None, threads: int = 3,
) -> ShardHeader:  # fmt: skip
    path.unlink(missing_ok=True)
    written = write_shard(
        store,
        str(path),
        template=encode_header(header),
        data=data,
        block_nbytes=header.block_nbytes,
        compression=Compression(1, auto, history or History()),
        threads=threads,
    )
    assert written.size == path.stat().st_size
    raw = path.read_bytes()
    return decode_header(
        raw[: header_nbytes(raw[:PREFIX_NBYTES], str(path))], path=str(path), file_nbytes=written.size
    )


def check_whole(path: Path, header: ShardHeader, data: memoryview) -> None:
    out = np.zeros(len(data), np.uint8)
    if len(data):
        read_shard(PosixStore(), str(path), header, [Destination(0, len(data), out.ctypes.data)])
    assert out.tobytes() == bytes(data)
    assert find_damage(PosixStore(), str(path), header) == []


KINDS = ["uint8", "bool", "bfloat16", "float16", "float32", "int64", "complex64", "complex128"]


@few
@given(
    st.integers(0, 99),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5000)), max_size=8),
    st.sampled_from([4096, 8192, 1 << 20]),
    st.booleans(),
)
def test_a_shard_of_any_tensors_comes_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kinds: list[tuple[str, int]], block: int, auto: bool
) -> None:
    header, data = contents(seed, kinds)
    header = ShardHeader(
        **{name: getattr(header, name) for name in ShardHeader.__slots__} | {"block_nbytes": block}
    )
    path = tmp_path_factory.mktemp("shard") / "shard-00000.ckptz"
    history = History(device=1.0, cores=1.0) if auto else None
    check_whole(path, write(PosixStore(), path, header, data, auto=auto, history=history), data)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_shard_keeps_the_digests_of_its_own_tensors_where_it_is_asked_to(
    tmp_path: Path, compressed: bool
) -> None:
    header, data = contents(
        3, [("float32", 900), ("bfloat16", 5000), ("uint8", 0), ("int64", 1), ("bool", 70)]
    )
    entries = list(header.tensors)
    entries[1] = msgspec.structs.replace(entries[1], chunk=Chunk((10000,), (0,), (5000,)))
    header = replace(header, tensors=tuple(entries), own=b"", codec="zstd" if compressed else "raw")
    written = write_shard(
        PosixStore(),
        str(tmp_path / "shard"),
        template=encode_header(header),
        data=data,
        block_nbytes=header.block_nbytes,
        compression=Compression(1, False, History()) if compressed else None,
        threads=2,
    )
    raw = (tmp_path / "shard").read_bytes()
    assert len(raw) == written.size
    found = decode_header(raw[: header_nbytes(raw[:PREFIX_NBYTES], "")], path="").own
    own = [entry for entry in entries if entry.chunk is None]
    expected = [hexdigest(data[entry.start : entry.stop])[:OWN_DIGITS] for entry in own]
    assert len(expected) == 4
    assert found == "".join(expected).encode()


def test_every_method_is_used_where_it_leaves_the_fewest_bytes(tmp_path: Path) -> None:
    kinds = [("uint8", 20), ("bool", 20), ("bfloat16", 19), ("float32", 18), ("int64", 17)]
    header, data = contents(1, [(dtype, 1 << log2) for dtype, log2 in kinds])
    header = replace(header, block_nbytes=1 << 19)
    written = write(PosixStore(), tmp_path / "s.ckptz", header, data)
    assert written.methods == "0011224488"
    assert set(written.methods) == METHODS
    check_whole(tmp_path / "s.ckptz", written, data)


def test_what_was_reserved_and_not_needed_is_given_back(tmp_path: Path) -> None:
    header, data = contents(1, [("bool", 1 << 20)])
    header = replace(header, block_nbytes=1 << 18)
    path = tmp_path / "s.ckptz"
    write(PosixStore(), path, header, data)
    assert path.stat().st_size < len(data) // 2
    assert path.stat().st_blocks * 512 < len(data) // 2 + 65536


def test_a_compressed_shard_may_fit_where_its_bytes_do_not(tmp_path: Path) -> None:
    header, data = contents(1, [("bool", 1 << 16)])
    store = FaultyStore(PosixStore(), fail_at=1, error=errno.ENOSPC, only={"create"})
    check_whole(tmp_path / "s.ckptz", write(store, tmp_path / "s.ckptz", header, data), data)
    assert store.failed is not None
    for error in (errno.EIO, errno.EACCES):
        store = FaultyStore(PosixStore(), fail_at=1, error=error, only={"create"})
        with pytest.raises(StorageError):
            write(store, tmp_path / "s.ckptz", header, data)


@pytest.mark.parametrize("auto", [False, True])
def test_a_write_that_fails_ends_the_save_and_leaves_no_file(tmp_path: Path, auto: bool) -> None:
    header, data = contents(1, [("bfloat16", 40_000)])
    for n in (1, 2, 5, 10):
        store = FaultyStore(PosixStore(), fail_at=n, error=errno.EIO, only={"pwrite"})
        with pytest.raises(StorageError):
            write(store, tmp_path / "s.ckptz", header, data, auto=auto)
        assert os.listdir(tmp_path) == []


# --- a device slower than the codec, and one faster -----------------------------------------------------


class Throttled:
    """A `Store` whose files take `rate` bytes per second, one write after the other, as a device would."""

    def __init__(self, rate: float) -> None:
        self.inner = PosixStore()
        self.rate = rate
        self.turn = threading.Lock()
        self.busy_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def create(self, path: str, *, nbytes: int) -> BlockWriter:
        return _ThrottledWriter(self, self.inner.create(path, nbytes=nbytes))  # type: ignore[return-value]


class _ThrottledWriter:
    def __init__(self, store: Throttled, inner: BlockWriter) -> None:
        self.store, self.inner = store, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def direct(self) -> bool:
        return True  # what is measured is this device, on whatever file system the tests run

    def pwrite(self, offset: int, data: memoryview) -> None:
        self.inner.pwrite(offset, data)
        with self.store.turn:
            time.sleep(len(data) / self.store.rate)
            self.store.busy_s += len(data) / self.store.rate


def large() -> tuple[ShardHeader, memoryview]:
    header, data = contents(3, [("bfloat16", 6 << 20), ("uint8", 4 << 20)])
    return replace(header, block_nbytes=1 << 20), data


def test_auto_gives_a_slow_device_less_to_write(tmp_path: Path) -> None:
    """The device's own time is compared, which no other load on the machine changes."""
    header, data = large()
    history = History()
    busy = []
    for _ in range(2):
        store = Throttled(25 << 20)
        written = write(store, tmp_path / "s.ckptz", header, data, auto=True, history=history)
        check_whole(tmp_path / "s.ckptz", written, data)
        busy.append(store.busy_s)
    as_it_is_s = len(data) / (25 << 20)
    # The weights, not the noise; and one block in sixteen to measure by.
    assert written.methods == AS_IT_IS + "2" * 11 + AS_IT_IS * 4
    assert busy[1] < 0.8 * as_it_is_s
    # Even the first save has learnt of it, after as many blocks as there are threads.
    assert busy[0] < 0.9 * as_it_is_s
    assert history.device == pytest.approx(25 << 20, rel=0.5)


def test_auto_leaves_a_fast_device_alone(tmp_path: Path) -> None:
    header, data = large()
    written = write(PosixStore(), tmp_path / "s.ckptz", header, data, auto=True, history=History(device=1e12))
    assert written.methods == AS_IT_IS * 16
    check_whole(tmp_path / "s.ckptz", written, data)


def test_auto_leaves_a_device_alone_when_the_codec_gets_no_core(tmp_path: Path) -> None:
    header, data = large()
    history = History(device=100 << 20, cores=0.01)
    assert write(PosixStore(), tmp_path / "s.ckptz", header, data, auto=True, history=history).methods == (
        AS_IT_IS * 16
    )


@pytest.mark.parametrize("auto", [False, True])
def test_a_thread_that_cannot_be_started_fails_the_write_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auto: bool
) -> None:
    """The threads that were started wait for what the calling one finds out."""
    start, calls = threading.Thread.start, 0

    def second_fails(self: threading.Thread) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError("can't start new thread")
        start(self)

    header, data = contents(1, [("float32", 20_000)])
    monkeypatch.setattr(threading.Thread, "start", second_fails)
    with pytest.raises(RuntimeError, match="new thread"):
        write(PosixStore(), tmp_path / "shard", header, data, auto=auto)
    assert not (tmp_path / "shard").exists()


def test_the_devices_rate_is_that_of_writes_that_were_ready_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two come together and take a second each; before them one whose thread is late for another second."""
    clock = [1.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    meter = _Meter()
    with meter.writing(4 << 20):
        clock[0] = 3.0
    assert meter.written(direct=True) == (4 << 20, 2.0)  # all there is
    clock[0] = 5.0
    first, second = meter.writing(4 << 20), meter.writing(4 << 20)
    first.__enter__(), second.__enter__()
    clock[0] = 6.5
    first.__exit__(None, None, None)
    clock[0] = 7.5
    second.__exit__(None, None, None)
    assert meter.written(direct=True) == (4 << 20, 1.0)
    assert meter.written(direct=False) == (12 << 20, 4.5)
