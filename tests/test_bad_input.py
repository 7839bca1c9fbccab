"""Does every bad path and every bad checkpoint end in the named error and exit code, whoever reads it?

Each of `CASES` makes one of them. `restore`, `open_checkpoint`, `verify` and `ckpt list`, `inspect` and
`verify` are held to what it says; none may read or write outside the checkpoint, nor fill a restore target.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptengine as ck
from ckptengine.cli import main
from ckptengine.comm.group import Group
from ckptengine.comm.transport import MemoryTransport
from ckptengine.format.digest import hexdigest
from ckptengine.format.geometry import Chunk
from ckptengine.format.names import INDEX_NAME, MANIFEST_NAME
from ckptengine.format.shard import TensorEntry
from ckptengine.read.shards import open_header
from ckptengine.restore_options import RestoreOptions
from ckptengine.restorer import restore
from ckptengine.storage.posix import PosixStore
from ckptengine.testing.strategies import blank
from tests.adapters.fake import same
from tests.cli.test_hostile import make_manifest_agree
from tests.format.abuse import ABUSE, COMPRESSED_ABUSE, Abuse
from tests.helpers.checkpoints import (
    RankContent,
    Tensor,
    flip,
    read_manifest,
    rewrite_manifest,
    rewrite_shard,
    write_checkpoint,
)
from tests.helpers.watch import Watch

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

GOOD, FAILED, DAMAGED, NOT_COMMITTED, NOT_FOUND, UNSUPPORTED = 0, 1, 3, 4, 5, 6
STEP = 3


@pytest.fixture(autouse=True)
def _one_writer(lent_writer: None) -> None:
    pass


# --- one way of reading after the other ----------------------------------------------------------


def sound_state(tmp_path: Path) -> Any:
    """What `write_checkpoint` writes for one rank; also a restore target."""
    return loaded(write_checkpoint(tmp_path / "sound", STEP, ranks=1))[0]


def restored(root: Path, target: Any, *, step: int | None = STEP) -> ck.RestoreInfo:
    with ck.Checkpointer(root) as ckpt:
        return ckpt.restore(target, step=step)


def loaded(path: Path) -> Any:
    with ck.open_checkpoint(path) as c:
        return c.load(), c.metadata


@pytest.fixture
def exit_code(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., int]:
    """Of a `ckpt` command; one that fails must say why, in one line and without a traceback."""

    def run(*args: object) -> int:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["ckpt", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        code = end.value.code
        assert isinstance(code, int)
        if code not in (GOOD, DAMAGED):
            assert err.startswith("ckpt: "), err
            assert err.count("\n") == 1, err
        elif code == DAMAGED:
            assert out + err
        return code

    return run


@dataclass(frozen=True)
class Case:
    """A bad checkpoint. make: out of the sound root and a directory outside of it, the path to be read.

    error: of `restore(step=…)` and `open_checkpoint(...).load()`. codes: of `ckpt list`, `inspect`, `verify`.
    verify: its error, or None where it reports damage. newest: of `restore()` without a step, where it is
    another one; there is no older commit to fall back to.
    """

    name: str
    make: Callable[[Path, Path], Path]
    error: type[Exception]
    codes: tuple[int, int, int]
    verify: type[Exception] | None = None
    newest: type[Exception] | None = None


def in_step(change: Callable[[Path], object]) -> Callable[[Path, Path], Path]:
    def make(root: Path, outside: Path) -> Path:
        change(step_of(root))
        return root

    return make


def step_of(root: Path) -> Path:
    return root / f"step-{STEP:010d}"


def shard_of(step: Path, rank: int = 0) -> Path:
    return step / read_manifest(step).shards[rank].path


def nowhere(root: Path, outside: Path) -> Path:
    shutil.rmtree(root)
    return root


def other_files(root: Path, outside: Path) -> Path:
    shutil.rmtree(root)
    (root / "step-of-a-dance").mkdir(parents=True)
    (root / "model.safetensors").write_bytes(b"x")
    return root


def uncommitted(root: Path, outside: Path) -> Path:
    (step_of(root) / MANIFEST_NAME).unlink()
    return root


def edit_manifest(old: str, new: str) -> Callable[[Path], None]:
    def edit(step: Path) -> None:
        text = (step / MANIFEST_NAME).read_text()
        assert old in text
        (step / MANIFEST_NAME).write_text(text.replace(old, new, 1))

    return edit


def truncate(name: str | None, nbytes: int) -> Callable[[Path], None]:
    """Take bytes from the end of a file (None: the shard)."""

    def cut(step: Path) -> None:
        path = shard_of(step) if name is None else step / name
        os.truncate(path, path.stat().st_size - nbytes)

    return cut


def newer_header(step: Path) -> None:
    """A shard of a later version under a manifest of this one, with all digests right."""
    path = shard_of(step)
    data = path.read_bytes()
    old = rb"\"ckptengine.format\":\"1\"".replace(b"\\", b"")
    assert old in data
    path.write_bytes(data.replace(old, old.replace(b"1", b"2")))
    make_manifest_agree(step)


def larger_in_manifest(step: Path) -> None:
    ref = replace(read_manifest(step).shards[0], size=read_manifest(step).shards[0].size + 4096)
    rewrite_manifest(step, shards=(ref,), nbytes=ref.size)


def of_another_step(step: Path) -> None:
    other = write_checkpoint(step.parent.parent / "other", STEP + 1, ranks=1)
    shutil.copy(shard_of(other), shard_of(step))


def shard_linked_out(root: Path, outside: Path) -> Path:
    path = shard_of(step_of(root))
    path.rename(outside / "canary")
    path.symlink_to(outside / "canary")
    return root


def attempt_linked_out(root: Path, outside: Path) -> Path:
    path = shard_of(step_of(root)).parent
    path.rename(outside / "directory")
    path.symlink_to(outside / "directory")
    return root


def manifest_linked_out(root: Path, outside: Path) -> Path:
    path = step_of(root) / MANIFEST_NAME
    path.rename(outside / "canary")
    path.symlink_to(outside / "canary")
    return root


def shard_path(text: str) -> Callable[[Path, Path], Path]:
    """Has a manifest, whose digest is right, name a file by `text`; {outside} is where the canary is."""

    def make(root: Path, outside: Path) -> Path:
        step = step_of(root)
        shutil.copy(shard_of(step), outside / "canary")
        old = read_manifest(step).shards[0].path
        sound = (step / MANIFEST_NAME).read_text()
        changed = sound.replace(f'"{old}"', f'"{text.format(outside=outside)}"')
        assert changed != sound
        (step / MANIFEST_NAME).write_bytes(sealed(changed))
        return root

    return make


def sealed(text: str) -> bytes:
    """A manifest's text with the right digest."""
    body = text[: text.rindex(',\n  "digest"')].encode()
    return body + f',\n  "digest": "{hexdigest(body)}"\n}}\n'.encode()


def hostile_manifest(old: str, new: str) -> Callable[[Path, Path], Path]:
    """An edited manifest with the right digest."""

    def edit(step: Path) -> None:
        text = (step / MANIFEST_NAME).read_text()
        assert old in text
        (step / MANIFEST_NAME).write_bytes(sealed(text.replace(old, new, 1)))

    return in_step(edit)


CORRUPT, GONE = ck.CorruptCheckpointError, ck.CheckpointNotFoundError
METADATA = '"note": "written by a test"'

CASES = [
    Case("path missing", nowhere, GONE, (NOT_FOUND,) * 3, GONE),
    Case("not a checkpoint", other_files, GONE, (GOOD, NOT_FOUND, NOT_FOUND), GONE),
    Case(
        "uncommitted",
        uncommitted,
        ck.NotCommittedError,
        (GOOD, NOT_COMMITTED, NOT_COMMITTED),
        ck.NotCommittedError,
        newest=GONE,
    ),
    *(
        Case(f"newer format: {name}", in_step(change), ck.UnsupportedFormatError, (UNSUPPORTED,) * 3, error)
        for name, change, error in [
            ("version", edit_manifest('"version": 1', '"version": 2'), ck.UnsupportedFormatError),
            (
                "version and more",
                edit_manifest('"version": 1', '"version": 2, "new": []'),
                ck.UnsupportedFormatError,
            ),
        ]
    ),
    Case(
        "newer format: feature",
        hostile_manifest('"features": []', '"features": ["wings"]'),
        ck.UnsupportedFormatError,
        (UNSUPPORTED,) * 3,
        ck.UnsupportedFormatError,
    ),
    Case(
        "newer format: shard",
        in_step(newer_header),
        ck.UnsupportedFormatError,
        (GOOD, UNSUPPORTED, UNSUPPORTED),
        ck.UnsupportedFormatError,
    ),
    *(
        Case(f"truncated: manifest by {n}", in_step(truncate(MANIFEST_NAME, n)), CORRUPT, (DAMAGED,) * 3)
        for n in (1, 100)
    ),
    Case(
        "truncated: manifest to nothing",
        in_step(lambda step: os.truncate(step / MANIFEST_NAME, 0)),
        CORRUPT,
        (DAMAGED,) * 3,
    ),
    Case("truncated: shard by a byte", in_step(truncate(None, 1)), CORRUPT, (GOOD, DAMAGED, DAMAGED)),
    Case("truncated: shard by a block", in_step(truncate(None, 4096)), CORRUPT, (GOOD, DAMAGED, DAMAGED)),
    Case(
        "truncated: shard within its header",
        in_step(lambda step: os.truncate(shard_of(step), 100)),
        CORRUPT,
        (GOOD, DAMAGED, DAMAGED),
    ),
    Case(
        "truncated: shard to nothing",
        in_step(lambda step: os.truncate(shard_of(step), 0)),
        CORRUPT,
        (GOOD, DAMAGED, DAMAGED),
    ),
    Case("gone: shard", in_step(lambda step: shard_of(step).unlink()), CORRUPT, (GOOD, DAMAGED, DAMAGED)),
    Case("larger in the manifest: shard", in_step(larger_in_manifest), CORRUPT, (GOOD, DAMAGED, DAMAGED)),
    Case("flipped: manifest", in_step(lambda step: flip(step / MANIFEST_NAME, 99)), CORRUPT, (DAMAGED,) * 3),
    Case(
        "flipped: header", in_step(lambda step: flip(shard_of(step), 99)), CORRUPT, (GOOD, DAMAGED, DAMAGED)
    ),
    Case("flipped: data", in_step(lambda step: flip(shard_of(step), 4097)), CORRUPT, (GOOD, GOOD, DAMAGED)),
    Case("shard of another step", in_step(of_another_step), CORRUPT, (GOOD, DAMAGED, DAMAGED)),
    *(
        Case(f"linked out: {name}", make, CORRUPT, codes)
        for name, make, codes in [
            ("shard", shard_linked_out, (GOOD, DAMAGED, DAMAGED)),
            ("attempt", attempt_linked_out, (GOOD, DAMAGED, DAMAGED)),
            ("manifest", manifest_linked_out, (DAMAGED,) * 3),
        ]
    ),
    *(
        Case(f"path {text!r}", shard_path(text), CORRUPT, (DAMAGED,) * 3)
        for text in [
            "{outside}/canary",
            "../../outside/canary",
            "a/../../../outside/canary",
            "./shard",
            "a//b",
            "/etc/passwd",
            "..",
            "",
            "a\\\\b",
            "a\\u0000b",
            "\\ud800",
            "a" * 5000,
        ]
    ),
    *(
        Case(f"JSON: {name}", hostile_manifest(METADATA, text), CORRUPT, (DAMAGED,) * 3)
        for name, text in [
            ("an integer of 10,000 digits", f'"n": {"9" * 10_000}'),
            ("a float that is none", '"n": 1e999'),
            ("NaN", '"n": NaN'),
            ("100,000 levels", f'"n": {"[" * 100_000}{"]" * 100_000}'),
            ("100 levels", f'"n": {"[" * 100}{"]" * 100}'),
            ("a key twice", '"a": 1, "a": 2'),
            ("a lone surrogate", '"a": "\\ud800"'),
            ("an unknown tag", '"a": {"$": "eval", "v": "1"}'),
            ("a tensor", '"a": {"$": "t", "i": 0}'),
        ]
    ),
    *(
        Case(
            f"JSON: {field}",
            hostile_manifest(f'"{field}": {old}', f'"{field}": {new}'),
            CORRUPT,
            (DAMAGED,) * 3,
        )
        for field, old, new in [
            ("world_size", "1", "2"),
            ("world_size", "1", "1000000000000"),
            ("step", str(STEP), str(2**70)),
            ("step", str(STEP), "-1"),
            ("block_nbytes", "4096", "4097"),
            ("block_nbytes", "4096", "0"),
            ("block_nbytes", "4096", "40960000000000000000"),
            ("created", "1700000000.0", '"yesterday"'),
            ("header_nbytes", "4096", "4503599627370496"),
            ("header_nbytes", "4096", "0"),
        ]
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_checkpoints_end_in_the_named_error_and_exit_code(
    case: Case, tmp_path: Path, exit_code: Callable[..., int]
) -> None:
    sound = sound_state(tmp_path)
    before, state = blank(sound), blank(sound)
    root, outside = tmp_path / "root", tmp_path / "outside"
    write_checkpoint(root, STEP, ranks=1)
    outside.mkdir()
    path = case.make(root, outside)
    canaries = [outside, *outside.rglob("*")]
    with Watch(*canaries) as watch:
        assert tuple(exit_code(command, path) for command in ("list", "inspect", "verify")) == case.codes
        with pytest.raises(case.error):
            loaded(path)
        if case.verify is None:
            assert not ck.verify(path).ok
        else:
            with pytest.raises(case.verify):
                ck.verify(path)
        # Last: a Checkpointer makes a root that is not there.
        with pytest.raises(case.error) as caught:
            restored(root, state)
        assert str(root) in str(caught.value)
        with pytest.raises(case.newest or case.error):
            restored(root, state, step=None)
        assert watch.touched() == []
    if "data" not in case.name and "block" not in case.name:
        assert same(state, before)


def two_ranks(rank: int, ranks: int) -> RankContent:
    return RankContent([Tensor("w", np.arange(2000, dtype=np.float32) + rank)])


@pytest.mark.parametrize("swapped", [False, True])
def test_shards_of_two_ranks_swapped(tmp_path: Path, swapped: bool, exit_code: Callable[..., int]) -> None:
    step = write_checkpoint(tmp_path, STEP, content=two_ranks)
    one, other = shard_of(step, 0), shard_of(step, 1)
    if swapped:
        one.rename(step / "kept")
        other.rename(one)
        (step / "kept").rename(other)
        with pytest.raises(CORRUPT, match=r"the file is the shard of rank [01]"):
            loaded(step)
    assert exit_code("verify", step) == exit_code("inspect", step) == (DAMAGED if swapped else GOOD)
    for rank, (error, tensor) in enumerate(both_restored(tmp_path)):
        if swapped:
            assert isinstance(error, CORRUPT)
            assert (error.rank, error.path) == (0, str(one))
            assert not tensor.any()
        else:
            assert error is None
            assert torch.equal(tensor, torch.arange(2000.0) + rank)


def both_restored(root: Path) -> list[tuple[Exception | None, torch.Tensor]]:
    """How a restore by two ranks, as threads, ends on each, and what it has filled."""
    transport = MemoryTransport()

    def run(rank: int) -> tuple[Exception | None, torch.Tensor]:
        group = Group(rank, 2, transport, "group", 30.0)
        tensor = torch.zeros(2000)
        state = {"model": {"w": tensor}}
        try:
            restore(str(root), state, STEP, RestoreOptions(), PosixStore(), group, ck.Config())
        except ck.CheckpointError as error:
            return error, tensor
        return None, tensor

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


# --- malformed files whose digests are right -----------------------------------------------------

each = pytest.mark.parametrize(
    "each", [6, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)


@each
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_malformed_headers_are_refused_by_every_reader(tmp_path: Path, codec: str, each: int) -> None:
    sound = sound_state(tmp_path)
    before, state = blank(sound), blank(sound)
    root = tmp_path / "root"
    step = write_checkpoint(root, STEP, ranks=1, codec=codec)
    shard, manifest = shard_of(step), step / MANIFEST_NAME
    whole, committed = shard.read_bytes(), manifest.read_bytes()
    corpus = [abuse for abuse in ABUSE if abuse.target == "header"]
    corpus += COMPRESSED_ABUSE if codec == "zstd" else []
    for abuse in corpus[::each]:
        header = abuse.mutate(whole[:4096])
        shard.write_bytes(header + whole[4096:])
        manifest.write_bytes(committed)
        if shard.stat().st_size % 4096 == 0:
            make_manifest_agree(step)
        refused(abuse, root, state)
    assert same(state, before)


@each
def test_malformed_manifests_are_refused_by_every_reader(tmp_path: Path, each: int) -> None:
    sound = sound_state(tmp_path)
    before, state = blank(sound), blank(sound)
    root = tmp_path / "root"
    manifest = write_checkpoint(root, STEP, ranks=1) / MANIFEST_NAME
    whole = manifest.read_bytes()
    for abuse in [abuse for abuse in ABUSE if abuse.target == "manifest"][::each]:
        manifest.write_bytes(abuse.mutate(whole))
        refused(abuse, root, state)
    assert same(state, before)


def refused(abuse: Abuse, root: Path, state: Any) -> None:
    for read in (
        lambda: loaded(root),
        lambda: restored(root, state),
        lambda: restored(root, state, step=None),
    ):
        with pytest.raises((ck.CorruptCheckpointError, ck.UnsupportedFormatError)) as caught:
            read()
        assert str(root) in str(caught.value), abuse


# --- trees that follow the format and still mean nothing -----------------------------------------

EMPTY = {"$": "ndarray", "d": "<f8", "s": [0], "v": ""}
NODES = {
    "a device": {"$": "device", "v": "nowhere:1"},
    "a device with a huge number": {"$": "device", "v": "cuda:99999999999999999999"},
    "a dtype that is a function": {"$": "dtype", "v": "load"},
    "a dtype that is a module": {"$": "dtype", "v": "nn"},
    "a layout that is a dtype": {"$": "layout", "v": "float32"},
    "an enum of a function": {"$": "enum", "m": "os", "q": "system", "n": "id"},
    "an enum of a module that is not there": {"$": "enum", "m": "no.such", "q": "A", "n": "B"},
    "an enum of a module that does things": {"$": "enum", "m": "antigravity", "q": "A", "n": "B"},
    "a member that is not there": {"$": "enum", "m": "http", "q": "HTTPStatus", "n": "FOUND_OUT"},
    "an array of objects": {"$": "ndarray", "d": "|O", "s": [1], "v": "AAAAAAAAAAA="},
    "an array of nothing too large to be": EMPTY | {"s": [0, 2**62, 2**62]},
    "an array with too few bytes": EMPTY | {"s": [2**40]},
    "a dtype of terabytes": {"$": "npdtype", "v": [["a", "<f8", [2**40, 2**40]]]},
    "a dtype of no kind": {"$": "npdtype", "v": "nonsense"},
    "a scalar of two": {"$": "npscalar", "d": "<i2", "v": "AAAAAA=="},
    "a set of lists": {"$": "set", "v": [[1]]},
    "a key that is a list": {"$": "dict", "v": [[[1], 2]]},
    "a key that is a tensor": {"$": "dict", "v": [[{"$": "t", "i": 0}, 2]]},
    "a str that is no UTF-8": {"$": "str", "v": "/w=="},
    "a deque of negative length": {"$": "deque", "v": [], "m": 2**70},
    "a pickle": {"$": "pickle", "v": "Y3Bvc2l4CnN5c3RlbQooUydmYWxzZScKdFIu"},
}


@pytest.mark.parametrize("name", NODES)
def test_hostile_trees_are_refused_by_every_reader(
    tmp_path: Path, name: str, exit_code: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("a checkpoint ran a command"))
    sound = RankContent(tree={"x": 1, "w": {"y": 2}})
    root = tmp_path / "root"
    step = write_checkpoint(root, STEP, ranks=1, content=lambda rank, ranks: sound)
    try:
        rewrite_shard(step, 0, tree={"x": NODES[name], "w": {"y": 2}})
    except ValueError:
        return  # the format itself refuses it, on both sides
    modules = set(sys.modules)
    refusals = (ck.CorruptCheckpointError, ck.UnsupportedStateError)
    with ck.open_checkpoint(root) as c:
        for read in (c.load, lambda: c.get_value("x"), lambda: c.load(rank=0)):
            with pytest.raises(refusals, match=r"\bx\b"):
                read()
        assert c.get_value("w.y") == 2
    target = {"x": None, "w": {"y": 0}}
    with pytest.raises(refusals):
        restored(root, target)
    assert target == {"x": None, "w": {"y": 0}}
    # Sound as far as bytes go, and shown without being decoded.
    assert exit_code("verify", root) == exit_code("inspect", root) == GOOD
    assert "antigravity" not in set(sys.modules) - modules


def test_a_tensor_that_claims_to_be_huge_is_not_made(tmp_path: Path) -> None:
    """Its chunk is small and the rest is nowhere: that is found before memory is asked for."""
    root = tmp_path / "root"
    step = write_checkpoint(root, STEP, ranks=1)
    manifest = read_manifest(step)
    header = open_header(PosixStore(), str(step), manifest.shards[0], manifest)
    first = header.tensors[0]
    huge = TensorEntry(
        first.name, first.dtype, first.shape, first.start, first.stop, Chunk((2**40, 96), (0, 0), (8, 96))
    )
    rewrite_shard(step, 0, tensors=(huge, *header.tensors[1:]))
    with ck.open_checkpoint(root) as c:
        with pytest.raises(CORRUPT, match="not whole"):
            c.get_tensor(first.name)
        with pytest.raises(CORRUPT, match="not whole"):
            c.get_slice(first.name)
    assert not ck.verify(root, level="structure").ok


# --- nothing outside -----------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A committed step that belongs to someone else, with all its files watched."""
    made = write_checkpoint(tmp_path / "outside", 1, ranks=1)
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    with Watch(*(path for path in (made, *made.rglob("*")))) as watch:
        yield made
        assert watch.touched() == []
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


def test_retention_deletes_nothing_through_links(tmp_path: Path, outside: Path) -> None:
    root = tmp_path / "root"
    with ck.Checkpointer(root, config=ck.Config(keep_last=1)) as ckpt:
        ckpt.save(5, {"w": torch.ones(3)})
        (root / outside.name).symlink_to(outside)
        (root / "step-0000000005" / "a000000-000000000001-00000000-000001.0").symlink_to(outside)
        (root / ".exchange-old").symlink_to(outside)
        os.utime(root / ".exchange-old", (0, 0), follow_symlinks=False)
        for step in (6, 7):
            ckpt.save(step, {"w": torch.ones(3)})
        assert ckpt.latest == 7
    with ck.Checkpointer(root, config=ck.Config(keep_last=1)) as ckpt:
        ckpt.save(8, {"w": torch.ones(3)})
    # Retention runs after the commit; closed, the writer is done with it.
    with ck.Checkpointer(root) as ckpt:
        assert ckpt.steps() == [8]
    assert (root / outside.name).is_symlink()


def test_a_save_writes_nothing_through_a_linked_step(tmp_path: Path, outside: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / outside.name).symlink_to(outside)
    with ck.Checkpointer(root) as ckpt:
        with pytest.raises(ck.SaveFailedError, match="symbolic link"):
            ckpt.save(1, {"w": torch.ones(3)})
        assert ckpt.steps() == []
        # A link is no step, so that this one is not taken for a commit of this root either.
        with pytest.raises(GONE):
            ckpt.restore({"w": torch.ones(3)})
        assert ckpt.save(2, {"w": torch.ones(3)}).step == 2


def test_a_linked_step_may_be_read_by_its_own_path(tmp_path: Path) -> None:
    """Whoever names it means it."""
    step = write_checkpoint(tmp_path / "archive", STEP, ranks=1)
    (tmp_path / "best").symlink_to(step)
    assert ck.verify(tmp_path / "best").ok
    assert loaded(tmp_path / "best")[1] == {"note": "written by a test"}


def test_an_index_that_is_damaged_or_gone_hinders_no_restore(tmp_path: Path) -> None:
    target = sound_state(tmp_path)
    for number, harm in enumerate(
        [
            lambda path: path.unlink(),
            lambda path: os.truncate(path, 10),
            lambda path: flip(path, 30),
            lambda path: path.write_bytes(b""),
        ]
    ):
        root = tmp_path / f"root-{number}"
        harm(write_checkpoint(root, STEP, ranks=1) / INDEX_NAME)
        state = blank(target)
        assert restored(root, state).step == STEP
        assert same(state, target)
        assert same(loaded(root)[0], target)
        assert not ck.verify(root).ok


def test_the_manifest_of_another_root_in_the_place_of_the_own(tmp_path: Path) -> None:
    """Right step, right digest, and shards that are not here."""
    root = tmp_path / "root"
    step = write_checkpoint(root, STEP, ranks=1, save=1)
    other = write_checkpoint(tmp_path / "other", STEP, ranks=1, save=2)
    shutil.copy(other / MANIFEST_NAME, step / MANIFEST_NAME)
    with pytest.raises(CORRUPT, match="missing"):
        loaded(root)
    with pytest.raises(CORRUPT, match="missing"):
        restored(root, {})
    rewrite_manifest(step, shards=read_manifest(step).shards)
    assert not ck.verify(root, level="sizes").ok
