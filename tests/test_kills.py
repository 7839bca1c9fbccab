"""Does a SIGKILL of trainer or writer, at any moment of a save loop, leave the newest commit whole?

The loop is `tests.helpers.save_loop`, in processes of its own; what it saved is known from the step alone.
The seed of the moments is printed; CKPT_KILL_SEED sets it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptengine as ck
from ckptengine.format.names import AttemptId
from tests.adapters.fake import same
from tests.helpers.checkpoints import read_manifest
from tests.helpers.ranks import lives
from tests.helpers.save_loop import KEEP_LAST, state_at

REPOSITORY = Path(__file__).parents[1]
WAIT_S = 90.0
ORPHAN_S = 30.0
"""How long a writer may outlive its trainer."""
STOP_AFTER = 100
"""Steps from the newest commit to the last save: no rank can be past that one when it hears of it."""


def until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.002)


class Rank:
    """One process of the loop, and what it has told."""

    def __init__(self, root: Path, rank: int, world_size: int, life: int, codec: str) -> None:
        directory = root.parent
        self.rank = rank
        self._log = directory / f"log-{life}-{rank}"
        self._errors = directory / f"errors-{life}-{rank}"
        command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.save_loop", str(root), str(self._log)]
        command += [codec, str(rank), str(world_size), str(directory / f"rendezvous-{life}")]
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def told(self, word: str) -> list[list[str]]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [line.split(" ")[1:] for line in lines if line.split(" ")[0] == word]

    def committed(self) -> list[int]:
        return [int(step) for step, _ in self.told("committed")]

    def failed(self) -> list[int]:
        return [int(words[0]) for words in self.told("failed")]

    def writers(self) -> list[int]:
        return [int(pid) for (pid,) in self.told("writer")]

    def lives(self) -> bool:
        return self.process.poll() is None

    def errors(self) -> str:
        return self._errors.read_text()[-3000:]


class Loop:
    """All ranks of one life of the loop."""

    def __init__(self, root: Path, life: int, *, world_size: int = 1) -> None:
        self.root = root
        codec = "zstd" if life % 3 == 0 else "raw"
        self.ranks = [Rank(root, rank, world_size, life, codec) for rank in range(world_size)]

    def committed(self) -> int:
        """The newest step that any rank has announced as committed in this life; 0 if none."""
        return max((max(rank.committed(), default=0) for rank in self.ranks), default=0)

    def wait_for_commits(self, number: int = 1) -> None:
        """Until so many commits more than now were announced by every rank."""
        before = [len(rank.committed()) for rank in self.ranks]

        def happened() -> bool:
            for rank in self.ranks:
                assert rank.lives(), f"rank {rank.rank} has ended: {rank.errors()}"
            return all(
                len(rank.committed()) >= n + number for rank, n in zip(self.ranks, before, strict=True)
            )

        until(happened, f"{number} more commits")

    def kill_writer(self, rank: Rank) -> None:
        """The trainers live on: that save, if there was one, failed on all ranks, and later ones commit."""
        pid, committed = rank.writers()[-1], self.committed()
        os.kill(pid, signal.SIGKILL)
        with self.stopped():  # or a new writer might delete what is looked at
            check_newest(self.root, committed, len(self.ranks))
        until(lambda: rank.writers()[-1] != pid, "a new writer")
        self.wait_for_commits(2)
        for other in self.ranks:
            assert other.failed() == self.ranks[0].failed()
            for step, at, message in (
                (words[0], words[1], " ".join(words[2:])) for words in other.told("failed")
            ):
                assert f"step {step}" in message
                assert "writer process ended" in message, message
                assert at in {str(rank.rank) for rank in self.ranks}

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The trainers make no step, and start no writer, meanwhile."""
        for rank in self.ranks:
            rank.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for rank in self.ranks:
                rank.process.send_signal(signal.SIGCONT)

    def kill_trainer(self, rank: Rank) -> None:
        """As a launcher does, the other ranks are ended soon after."""
        rank.process.kill()
        rank.process.wait()
        if len(self.ranks) > 1:
            time.sleep(random.random() * 0.3)
        self.kill()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait()

    def stop(self) -> None:
        """In good order."""
        stop = self.root.with_name(f"{self.root.name}.stop")
        stop.write_text(str(self.committed() + STOP_AFTER))
        for rank in self.ranks:
            assert rank.process.wait(WAIT_S) == 0, rank.errors()
            assert rank.told("closed")
        stop.unlink()

    def check_no_orphans(self) -> None:
        for rank in self.ranks:
            for pid in rank.writers():
                until(lambda pid=pid: not lives(pid), f"the end of writer {pid}", ORPHAN_S)  # type: ignore[misc]


def check_newest(root: Path, at_least: int, world_size: int) -> int:
    """The newest commit is whole, and every rank's part of it is what that rank had captured."""
    with ck.open_checkpoint(root) as c:
        step = c.step
        assert step >= at_least, f"step {at_least} was announced as committed, the newest is {step}"
        for rank in range(world_size):
            assert same(c.load(rank=rank), state_at(step, rank)), f"step {step}, rank {rank}"
        # That very step: where only a writer was killed, the job goes on and may have committed another.
        report = ck.verify(root / f"step-{step:010d}", level="data")
        assert (report.step, report.damages) == (step, ())
    return step


def check_all_steps(root: Path) -> None:
    """Every listed step is whole, not only the newest."""
    for path in root.glob("step-*"):
        if (path / "MANIFEST.json").exists():
            assert ck.verify(path, level="data").ok, path


def check_tidy(root: Path, life: int) -> None:
    """After an end in good order nothing is left of what earlier lives did not finish."""
    others = {path.name for path in root.iterdir() if not path.name.startswith("step-")}
    # Where ranks of killed lives met; kept for days, as a life elsewhere may be at one.
    assert not {name for name in others if not name.startswith(".exchange-a")}
    assert not {name for name in others if name.startswith(f".exchange-a{life:06d}")}
    steps = sorted(root.glob("step-*"))
    assert len(steps) == KEEP_LAST
    for step in steps:
        attempt = read_manifest(step).attempt
        assert sorted(path.name for path in step.iterdir()) == sorted(["MANIFEST.json", "INDEX", attempt])


@pytest.fixture
def moments(request: pytest.FixtureRequest) -> random.Random:
    """When to kill."""
    seed = int(os.environ.get("CKPT_KILL_SEED") or time.time_ns() % 10**9)
    print(f"CKPT_KILL_SEED={seed}")
    random.seed(seed)
    return random.Random(seed)


@pytest.fixture
def loops() -> Iterator[list[Loop]]:
    started: list[Loop] = []
    yield started
    for loop in started:
        loop.kill()


def life_of(step_path: Path) -> int:
    return AttemptId.parse(read_manifest(step_path).attempt).run.life


def kill_and_check(
    root: Path, rounds: list[str], moments: random.Random, loops: list[Loop], *, world_size: int = 1
) -> None:
    """One kill for each of `rounds`, each checked: of a "writer", or of a "trainer", which ends the life."""
    newest, life = 0, 0
    loop: Loop | None = None
    for what in rounds:
        if loop is None:
            life += 1
            loop = Loop(root, life, world_size=world_size)
            loops.append(loop)
        loop.wait_for_commits(moments.randrange(1, 4))
        time.sleep(moments.random() * 0.06)
        rank = loop.ranks[moments.randrange(world_size)]
        if what == "writer":
            loop.kill_writer(rank)
            newest = max(newest, loop.committed())
        else:
            loop.kill_trainer(rank)
            loop.check_no_orphans()
            newest = check_newest(root, max(newest, loop.committed()), world_size)
            check_all_steps(root)
            assert life_of(root / f"step-{newest:010d}") == life
            loop = None
    # The next life restores (the loop compares, too), saves, and cleans up.
    if loop is None:
        life += 1
        loop = Loop(root, life, world_size=world_size)
        loops.append(loop)
        loop.wait_for_commits()
        assert [int(step) for (step,) in loop.ranks[0].told("restored")] == [newest]
    loop.stop()
    loop.check_no_orphans()
    newest = check_newest(root, loop.committed(), world_size)
    assert life_of(root / f"step-{newest:010d}") == life
    check_tidy(root, life)


def test_kills_leave_the_newest_commit_whole(
    tmp_path: Path, moments: random.Random, loops: list[Loop]
) -> None:
    kill_and_check(tmp_path / "root", ["writer", "trainer", "writer"], moments, loops)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_kills_leave_the_newest_commit_whole(
    tmp_path: Path, moments: random.Random, loops: list[Loop]
) -> None:
    rounds = ["writer", "trainer"] * 9 + ["trainer"] * 6 + ["writer"] * 6
    kill_and_check(tmp_path / "root", rounds, moments, loops)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pairs", [pytest.param(1, marks=pytest.mark.sample), 6])
def test_kills_of_one_of_two_ranks_leave_the_newest_commit_whole(
    tmp_path: Path, moments: random.Random, loops: list[Loop], pairs: int
) -> None:
    kill_and_check(tmp_path / "root", ["writer", "trainer"] * pairs, moments, loops, world_size=2)
