"""Hypothesis strategies for the values of the format."""

from __future__ import annotations

from math import prod
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from ckptengine.format import dtypes
from ckptengine.format.digest import DIGEST_NBYTES
from ckptengine.format.geometry import Chunk, c_strides
from ckptengine.format.layout import PAD_PREFIX, lay_out
from ckptengine.format.manifest import IndexRef, Manifest, ShardRef
from ckptengine.format.names import AttemptId, RunId, shard_filename
from ckptengine.format.shard import METADATA_KEY, ShardHeader, TensorEntry, ViewEntry
from ckptengine.format.tree import TAG

# No deadline: a busy machine is not a failure.
usual = settings(deadline=None)
few = settings(max_examples=40)
"""For values that take long to make."""

DTYPES = sorted(dtypes._DTYPES)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: not name.startswith(PAD_PREFIX) and name != METADATA_KEY
)
digests = st.binary(min_size=DIGEST_NBYTES, max_size=DIGEST_NBYTES)

run_ids = st.builds(
    RunId,
    life=st.integers(0, 10**9),
    created_ms=st.integers(0, 2**48 - 1),
    nonce=st.integers(0, 2**32 - 1).map(lambda n: f"{n:08x}"),
)
attempt_ids = st.builds(AttemptId, run=run_ids, save=st.integers(0, 10**9), retry=st.integers(0, 99))

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)


def trees(n_leaves: int) -> st.SearchStrategy[Any]:
    leaves = scalars
    if n_leaves:
        leaves |= st.integers(0, n_leaves - 1).map(lambda i: {TAG: "t", "i": i})
    keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda key: key != TAG)
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(keys, inner, max_size=3)
            | st.lists(st.tuples(scalars, inner).map(list), max_size=3).map(lambda v: {TAG: "dict", "v": v})
            | st.lists(inner, max_size=3).map(lambda v: {TAG: "tuple", "v": v})
            | inner.map(lambda v: {TAG: "object", "v": v})
        ),
        max_leaves=8,
    )


@st.composite
def chunks_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Chunk:
    """A hyper-rectangle, possibly empty, of a tensor of this shape."""
    spans = [draw(st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted)) for size in shape]
    return Chunk(shape, tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


@st.composite
def flat_chunks_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Chunk:
    """A range, possibly empty, of the flattened tensor of this shape."""
    numel = prod(shape)
    start, stop = sorted(draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    return Chunk((numel,), (start,), (stop - start,), flat_of=shape)


@st.composite
def around(draw: st.DrawFn, shape: tuple[int, ...]) -> Chunk | None:
    """The chunk a local tensor of this shape may be, or None."""
    kind = draw(st.sampled_from(["whole", "rect", "flat"]))
    if kind == "rect":
        before = [draw(st.integers(0, 3)) for _ in shape]
        after = [draw(st.integers(0, 3)) for _ in shape]
        sizes = tuple(b + size + a for b, size, a in zip(before, shape, after, strict=True))
        return Chunk(sizes, tuple(before), shape)
    if kind == "flat" and len(shape) == 1:
        before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        numel = before + shape[0] + after
        return Chunk((numel,), (before,), shape, flat_of=draw(st.sampled_from([(numel,), (1, numel)])))
    return None


@st.composite
def dense_strides(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    order = draw(st.permutations(range(len(shape))))
    steps = c_strides([shape[i] for i in order])
    stride = [0] * len(shape)
    for i, step in zip(order, steps, strict=True):
        stride[i] = step
    return tuple(stride)


@st.composite
def shard_headers(draw: st.DrawFn) -> ShardHeader:
    """A header as a writer makes it: without digests."""
    attempt = draw(attempt_ids)
    world_size = draw(st.integers(1, 5))
    rank = draw(st.integers(0, world_size - 1))
    all_names = draw(st.lists(names, unique=True, max_size=8))
    cut = sorted(draw(st.tuples(*[st.integers(0, len(all_names))] * 2)))
    tensor_names, view_names, replica_names = (
        all_names[: cut[0]],
        all_names[cut[0] : cut[1]],
        all_names[cut[1] :],
    )
    drafts: dict[str, dict[str, Any]] = {}
    for name in tensor_names:
        if draw(st.integers(0, 4)) == 0:
            nbytes = draw(st.integers(0, 20000))
            descr = draw(st.sampled_from([None, ["<f4", [nbytes], False], [[["a", "<i2"]], [1, 2], True]]))
            kind = "bytes" if descr is None else "ndarray"
            drafts[name] = {"dtype": "uint8", "shape": (nbytes,), "kind": kind, "descr": descr}
            continue
        shape = draw(shapes)
        drafts[name] = {
            "dtype": draw(st.sampled_from(DTYPES)),
            "shape": shape,
            "chunk": draw(around(shape)),
            "stride": draw(st.none() | dense_strides(shape)),
            "placement": draw(st.none() | st.just("Shard(0)")),
        }
    items = [
        (name, prod(d["shape"]) * dtypes.itemsize(d["dtype"]), dtypes.alignment(d["dtype"]))
        for name, d in drafts.items()
    ]
    placed, data_nbytes = lay_out(items)
    tensors = tuple(
        TensorEntry(name=name, start=start, stop=stop, **drafts[name])
        for name, start, stop in placed
        if not name.startswith(PAD_PREFIX)
    )
    views = []
    for name in view_names if tensors else ():
        base = draw(st.sampled_from(tensors))
        offset = draw(st.integers(0, base.nbytes))
        views.append(ViewEntry(name, base.name, offset, "uint8", (base.nbytes - offset,)))
    others = [r for r in range(world_size) if r != rank]
    replicas = {name: draw(st.sampled_from(others)) for name in replica_names if others}
    return ShardHeader(
        run=str(attempt.run),
        attempt=str(attempt),
        step=draw(st.integers(0, 2**63 - 1)),
        rank=rank,
        world_size=world_size,
        codec=draw(st.sampled_from(["raw", "zstd"])),
        block_nbytes=4096 * draw(st.integers(1, 3)),
        data_nbytes=data_nbytes,
        tensors=tensors,
        views=tuple(views),
        replicas=replicas,
        tree=draw(trees(len(tensors) + len(views) + len(replicas))),
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    attempt = draw(attempt_ids)
    compressed = draw(st.booleans())
    refs = []
    for rank in range(draw(st.integers(1, 4))):
        header_nbytes = 4096 * draw(st.integers(1, 5))
        refs.append(
            ShardRef(
                rank,
                f"{attempt}/{shard_filename(rank, compressed=compressed)}",
                header_nbytes + 4096 * draw(st.integers(0, 2**40)),
                header_nbytes,
                draw(digests).hex(),
            )
        )
    return Manifest(
        step=draw(st.integers(0, 2**63 - 1)),
        attempt=str(attempt),
        run=str(attempt.run),
        world_size=len(refs),
        created=draw(st.floats(0, 1e11)),
        codec="zstd" if compressed else "raw",
        block_nbytes=4096 * draw(st.integers(1, 10**6)),
        nbytes=sum(ref.size for ref in refs),
        tensors=draw(st.integers(0, 2**62)),
        metadata=draw(trees(0)),
        shards=tuple(refs),
        index=draw(st.none() | st.builds(IndexRef, st.integers(1, 2**30), digests.map(bytes.hex))),
    )
